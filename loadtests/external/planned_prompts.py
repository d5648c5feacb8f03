"""The prompt of a planned request as an external arm takes it: token ids or text."""

from __future__ import annotations

import numpy as np

from loadtests.external.arms import ExternalArm, OpenAiOptions
from loadtests.traffic.prompts import Pieces, PromptSource, PromptText, load_prompt_text
from loadtests.traffic.schedule import PlannedRequest

# One token each in the common byte-pair vocabularies, with a space before and mostly without; where the server's
# tokenizer is not at hand, prompts made of them have about the planned length.
_COMMON_WORDS = (
    *("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state"),
    *("family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company", "system"),
    *("program", "question", "work", "government", "number", "night", "point", "home", "water", "room", "mother"),
    *("area", "money", "story", "fact", "month", "lot", "right", "study", "book", "eye", "job", "word", "business"),
    *("issue", "side", "kind", "head", "house", "service", "friend", "father", "power", "hour", "game", "line", "end"),
)


def prompt_source(config: ExternalArm, traffic: PromptSource) -> PromptSource:
    """What makes the arm's prompts, where `traffic` makes those of own arms. ConfigError where nothing can."""
    options = config.options
    if options.prompt == "token_ids":
        return traffic
    if options.tokenizer:
        chat = isinstance(options, OpenAiOptions) and options.endpoint == "chat"
        remedy = f"remove {config.kind}.tokenizer"
        remedy += "" if chat else f', or set {config.kind}.prompt = "token_ids" and vocab_size in its place'
        return PromptSource(text=load_prompt_text(options.tokenizer, chat=chat, remedy=remedy))
    return traffic if traffic.text is not None else PromptSource(text=_common_words())


def _common_words() -> PromptText:
    nothing = np.zeros(len(_COMMON_WORDS), dtype=np.int64)
    follows = tuple(f" {word}" for word in _COMMON_WORDS)
    return PromptText(pieces=Pieces(starts=_COMMON_WORDS, start_ids=nothing, follows=follows, follow_ids=nothing))


def prompt_of(config: ExternalArm, source: PromptSource, plan: PlannedRequest) -> str | list[int]:
    """Return the prompt as text or token ids; `source` is the arm's own."""
    text = source.plain(plan)
    return source.ids(plan) if text is None or config.options.prompt == "token_ids" else text
