"""What an external arm is asked: the prompt of a planned request, and how it is to answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tailgate.loadtests.external.arms import ExternalArm, OipOptions, OpenAiOptions
from tailgate.loadtests.traffic.prompts import PromptText, load_prompt_text

# One token each in the common byte-pair vocabularies, with a space before and mostly without; where the server's
# tokenizer is not at hand, prompts made of them have about the planned length.
_COMMON_WORDS = (
    *("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state"),
    *("family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company", "system"),
    *("program", "question", "work", "government", "number", "night", "point", "home", "water", "room", "mother"),
    *("area", "money", "story", "fact", "month", "lot", "right", "study", "book", "eye", "job", "word", "business"),
    *("issue", "side", "kind", "head", "house", "service", "friend", "father", "power", "hour", "game", "line", "end"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """One prompt, and how the arm is to answer.

    `whole_length` asks for exactly `max_tokens`, where the server can. The answer is greedy unless the arm's `extra`
    says otherwise, and with `greedy` whatever that says.
    """

    prompt: str
    max_tokens: int
    whole_length: bool
    seed: int
    greedy: bool = False

    def fields(self, options: OpenAiOptions | OipOptions) -> dict[str, Any]:
        greedy = {"temperature": 0, "seed": self.seed & 0x7FFFFFFF}
        fields: dict[str, Any] = {"max_tokens": self.max_tokens, **greedy}
        if self.whole_length:
            fields |= {name: True if name == "ignore_eos" else self.max_tokens for name in options.length_fields}
        return {**fields, **options.extra, **(greedy if self.greedy else {})}


def prompt_text(config: ExternalArm, traffic: PromptText | None) -> PromptText:
    """Return what makes the arm's prompts; `traffic` makes those of managed arms, None where they are token ids.

    Raises ConfigError for a tokenizer that is of no use.
    """
    options = config.options
    if options.tokenizer:
        return load_prompt_text(options.tokenizer, remedy=f"remove {config.kind}.tokenizer")
    if traffic is not None:
        return traffic
    follows = tuple(f" {word}" for word in _COMMON_WORDS)
    nothing = np.zeros(len(follows), dtype=np.int64)  # only its text is sent
    return PromptText(first=_COMMON_WORDS[0], first_id=0, follows=follows, follow_ids=nothing)
