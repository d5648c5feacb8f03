"""`answers-ARM.json` of a trial: what an external arm answered to the prompts that all were asked, each time twice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from analysis.records.plain_values import mapping, number, rows_of, text_of

BEFORE: Final = "before"
AFTER: Final = "after"
PATTERN: Final = "answers-*.json"


def file_name(arm: str) -> str:
    """The name of the arm's file."""
    return PATTERN.replace("*", arm)


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedAnswer:
    """One answer to a prompt that `digest` names. `tokens` stand beside their log-probabilities and those of the
    tokens that were likeliest in their place; all three are empty where the server does not tell. `asked` is how many
    tokens it was to have, `error` why there is none."""

    digest: str = ""
    asked: int = 0
    text: str = ""
    pieces: int = 0
    tokens: tuple[str, ...] = ()
    log_probs: tuple[float, ...] = ()
    likeliest: tuple[Mapping[str, float], ...] = ()
    error: str = ""


Twice = tuple[tuple[AskedAnswer, ...], tuple[AskedAnswer, ...]]


def answers_in(document: Mapping[str, Any], when: str) -> Twice | None:
    """The answers of the document before or after the load, to the same prompts twice; None where it holds none."""
    prompts = rows_of(document.get("prompts"))
    rounds = mapping(document.get("answers")).get(when)
    if not isinstance(rounds, list) or len(rounds) != 2 or not prompts:
        return None
    first, second = (
        tuple(_answer(prompt, row) for prompt, row in zip(prompts, rows_of(rows), strict=False)) for rows in rounds
    )
    return (first, second) if len(first) == len(second) == len(prompts) else None


def _answer(prompt: Mapping[str, Any], row: Mapping[str, Any]) -> AskedAnswer:
    tokens, values, likeliest = (row.get(key) for key in ("tokens", "log_probs", "likeliest"))
    told = isinstance(tokens, list) and isinstance(values, list) and isinstance(likeliest, list)
    known = [number(value) for value in values] if isinstance(values, list) else []
    # A log-probability that is no number makes the others of the answer useless: they stand side by side.
    if not told or len({len(tokens or ()), len(known), len(likeliest or ())}) != 1 or None in known:
        tokens, known, likeliest = [], [], []
    return AskedAnswer(
        digest=text_of(prompt, "digest"),
        asked=int(number(prompt.get("max_tokens")) or 0),
        text=text_of(row, "text"),
        pieces=int(number(row.get("pieces")) or 0),
        tokens=tuple(map(str, tokens or ())),
        log_probs=tuple(value for value in known if value is not None),
        likeliest=tuple(_numbers(others) for others in likeliest or ()),
        error=text_of(row, "error"),
    )


def _numbers(value: Any) -> dict[str, float]:
    return {str(key): known for key, other in mapping(value).items() if (known := number(other)) is not None}
