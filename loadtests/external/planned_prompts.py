"""The prompt of a planned request as an external arm takes it: token ids, text, or the messages of a chat."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from loadtests.external.arms import ExternalArm, OpenAiOptions
from loadtests.traffic.prompts import Message, Pieces, PromptSource, PromptText, load_prompt_text
from loadtests.traffic.schedule import PlannedRequest
from servers.complaint import ConfigError

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
    chat = isinstance(options, OpenAiOptions) and options.endpoint == "chat"
    if options.tokenizer:
        without = f"remove {config.kind}.tokenizer"
        without += "" if chat else f', or set {config.kind}.prompt = "token_ids" and vocab_size in its place'
        text = load_prompt_text(options.tokenizer, without=without)
        return PromptSource(kind="chat" if chat else "text", text=text)
    if traffic.kind == "chat" and not chat:
        raise ConfigError(
            'traffic.prompts is "chat" and an external arm takes plain text: use openai.endpoint = "chat" where kind '
            f'is "openai", {config.kind}.prompt = "token_ids" and vocab_size where the server takes them, or '
            'traffic.prompts = "text"'
        )
    return traffic if traffic.kind != "ids" else PromptSource(kind="text", text=_common_words())


def _common_words() -> PromptText:
    nothing = np.zeros(len(_COMMON_WORDS), dtype=np.int64)
    follows = tuple(f" {word}" for word in _COMMON_WORDS)
    pieces = Pieces(starts=_COMMON_WORDS, start_ids=nothing, follows=follows, follow_ids=nothing)
    return PromptText(
        name="common words",
        encode=lambda text: [0] * len(text.split()),
        encode_bare=lambda text: [0] * len(text.split()),
        pieces=pieces,
    )


def prompt_of(
    config: ExternalArm, source: PromptSource, plan: PlannedRequest
) -> str | Sequence[int] | Sequence[Message]:
    """The prompt for an arm over OpenAI-compatible HTTP; `source` is the arm's own."""
    options = config.options
    if source.kind == "chat" and isinstance(options, OpenAiOptions) and options.endpoint == "chat":
        messages = source.messages(plan)
        assert messages is not None
        return messages
    return plain_prompt_of(config, source, plan)


def plain_prompt_of(config: ExternalArm, source: PromptSource, plan: PlannedRequest) -> str | Sequence[int]:
    """The prompt as token ids or text; `source` is the arm's own."""
    if config.options.prompt == "token_ids":
        return source.ids(plan)
    text = source.plain(plan)
    assert text is not None, "prompt_source refuses chats where text is taken"
    return text
