"""`answers-ARM.json` of a trial: what an external arm answered to the prompts that all were asked, each time twice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Final

from pydantic import BaseModel, BeforeValidator, Field, ValidationError, model_validator
from pydantic.dataclasses import dataclass

BEFORE: Final = "before"
AFTER: Final = "after"
PATTERN: Final = "answers-*.json"


def _known(values: Any) -> Any:
    """Leave out what is null, as an infinite log-probability is in JSON."""
    return {key: value for key, value in values.items() if value is not None} if isinstance(values, dict) else values


Finite = Annotated[float, Field(allow_inf_nan=False)]
Candidates = Annotated[Mapping[str, Finite], BeforeValidator(_known)]


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedAnswer:
    """One answer to the prompt that `digest` names.

    `tokens`, their log-probabilities and those of the likeliest tokens in each place are of one length; all three are
    empty if the server reports none.
    """

    digest: str = ""
    asked: int = 0  # tokens that it was to have
    text: str = ""
    pieces: int = 0
    tokens: tuple[str, ...] = ()
    log_probs: tuple[Finite, ...] = ()
    likeliest: tuple[Candidates, ...] = ()
    error: str = ""  # why there is no answer

    @model_validator(mode="after")
    def _check_lengths(self) -> AskedAnswer:
        if len({len(self.tokens), len(self.log_probs), len(self.likeliest)}) > 1:
            raise ValueError("tokens, log_probs and likeliest have unequal lengths")
        return self


Twice = tuple[tuple[AskedAnswer, ...], tuple[AskedAnswer, ...]]


class _Prompt(BaseModel):
    digest: str = ""
    max_tokens: int = 0


class _Document(BaseModel):
    prompts: list[_Prompt] = Field(min_length=1)
    answers: dict[str, list[list[AskedAnswer]]]


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
