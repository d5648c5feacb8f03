"""`answers-ARM.json` of a trial: what an external arm answered, twice, to the prompts that all were asked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pydantic import BaseModel, ValidationError
from pydantic.dataclasses import dataclass

PATTERN: Final = "answers-*.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class GreedyAnswer:
    """One answer of a replica to the prompt that `digest` names, which came in so many `pieces`."""

    digest: str
    asked: int  # tokens that it was to have
    replica: str = ""
    text: str = ""
    pieces: int = 0
    error: str = ""  # why there is no answer


Twice = tuple[tuple[GreedyAnswer, ...], tuple[GreedyAnswer, ...]]


class _Document(BaseModel):
    answers: Twice


def answers_in(document: Mapping[str, Any]) -> Twice | None:
    """Return the answers of the document, to the same prompts twice; None if it does not hold them."""
    try:
        first, second = _Document.model_validate(document).answers
    except ValidationError:
        return None
    return (first, second) if len(first) == len(second) > 0 else None
