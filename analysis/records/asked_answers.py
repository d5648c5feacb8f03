"""`answers-ARM.json` of a trial: what an external arm answered to the prompts that all were asked, each time twice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from pydantic import BaseModel, Field, ValidationError
from pydantic.dataclasses import dataclass

BEFORE: Final = "before"
AFTER: Final = "after"
PATTERN: Final = "answers-*.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class GreedyAnswer:
    """One answer to the prompt that `digest` names, which came in so many `pieces`."""

    digest: str = ""
    asked: int = 0  # tokens that it was to have
    text: str = ""
    pieces: int = 0
    error: str = ""  # why there is no answer


Twice = tuple[tuple[GreedyAnswer, ...], tuple[GreedyAnswer, ...]]


class _Prompt(BaseModel):
    digest: str = ""
    max_tokens: int = 0


class _Document(BaseModel):
    prompts: list[_Prompt] = Field(min_length=1)
    answers: dict[str, list[list[GreedyAnswer]]]


def answers_in(document: Mapping[str, Any], when: str) -> Twice | None:
    """Return the answers of the document before or after the load, to the same prompts twice; None if it holds none."""
    try:
        content = _Document.model_validate(document)
    except ValidationError:
        return None
    rounds = content.answers.get(when, [])
    if len(rounds) != 2 or any(len(answers) != len(content.prompts) for answers in rounds):
        return None
    first, second = (
        tuple(
            replace(answer, digest=prompt.digest, asked=prompt.max_tokens)
            for prompt, answer in zip(content.prompts, answers, strict=True)
        )
        for answers in rounds
    )
    return first, second
