"""Conversations: what people wrote and what models answered, turn by turn.

A file is a JSON array, or JSON Lines, of objects with `conversations`, `conversation` or `messages`: a list of
`{"from": ..., "value": ...}` as in ShareGPT, or of `{"role": ..., "content": ...}` as OpenAI's API takes them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from loadtests.traffic.traces import opened
from servers.complaint import one_line
from servers.fields import ConfigError

KEPT = 4096  # conversations: about 30 MB of text at ShareGPT's mean length

_LISTS = ("conversations", "conversation", "messages")
_SYSTEM_ROLES = ("system", "developer")
_USER_ROLES = ("human", "user")
_MODEL_ROLES = ("gpt", "chatgpt", "assistant", "bing", "bard", "model")


@dataclass(frozen=True, slots=True)
class Exchange:
    """One turn. Neither text is empty."""

    question: str
    answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """At least one exchange, in order, and the system's text before it if there is one."""

    system: str
    exchanges: tuple[Exchange, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversations:
    """Conversations of one file, drawn evenly when it holds more than were to be kept.

    `read` counts all of the file, `unusable` those without a question that is followed by its answer.
    """

    kept: tuple[Conversation, ...]
    read: int
    unusable: int


def read_conversations(path: str | Path, *, keep: int = KEPT, seed: int = 0) -> Conversations:
    """The conversations at `path`, at most `keep` of them, drawn by `seed`.

    Published files hold conversations that begin with an answer, end with a question or are empty: what is no question
    with its answer is left out, and a conversation without any is counted as unusable. Anything that is not of the
    form at all raises ConfigError with the file, the number of the conversation and what was expected.
    """
    name = str(path)
    kept: list[tuple[int, Conversation]] = []
    # `random()` gives equal draws for equal seeds in all versions of Python.
    draws = random.Random(seed)
    read = usable = 0
    with opened(f'conversations "{name}"', path) as file:
        for read, value in enumerate(_objects(name, file), 1):
            conversation = _conversation(name, read, value)
            if conversation is None:
                continue
            usable += 1
            if len(kept) < keep:
                kept.append((read, conversation))
            elif (place := int(draws.random() * usable)) < keep:
                kept[place] = (read, conversation)
    if not kept:
        raise ConfigError(
            f'conversations "{name}" hold no question with its answer in {read} conversations: '
            'give [{"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}]}, ...]'
        )
    kept.sort(key=lambda item: item[0])
    return Conversations(kept=tuple(conversation for _, conversation in kept), read=read, unusable=read - usable)


def _conversation(name: str, number: int, value: Any) -> Conversation | None:
    lists = [value.get(key) for key in _LISTS] if isinstance(value, dict) else []
    messages = next((found for found in lists if found is not None), None)
    if not isinstance(messages, list):
        raise _malformed(name, number, 'an object with a list "conversations" or "messages"')
    system, question = "", ""
    exchanges: list[Exchange] = []
    for message in messages:
        role, text = _message(message)
        if role is None or text is None:
            raise _malformed(name, number, '"from" and "value", or "role" and "content", as text in every message')
        if role in _SYSTEM_ROLES and not exchanges:
            system = text
        elif role in _USER_ROLES:
            question = text
        elif role in _MODEL_ROLES and question.strip() and text.strip():
            exchanges.append(Exchange(question, text))
            question = ""
    return Conversation(system=system, exchanges=tuple(exchanges)) if exchanges else None


def _message(message: Any) -> tuple[str | None, str | None]:
    """Who wrote the message, and its text: empty where it is null, as beside tool calls, or holds images alone."""
    if not isinstance(message, dict):
        return None, None
    form = ("from", "value") if "from" in message else ("role", "content")
    role, content = (message.get(key, ...) for key in form)
    if isinstance(content, list):
        content = "\n".join(str(part["text"]) for part in content if isinstance(part, dict) and "text" in part)
    text = "" if content is None else content
    return role if isinstance(role, str) else None, text if isinstance(text, str) else None


def _objects(name: str, file: IO[bytes]) -> Iterator[Any]:
    """The values of a JSON array, or of JSON Lines."""
    lines = (line for raw in file if (line := raw.decode("utf-8-sig").strip()))
    first = next(lines, "")
    if first.startswith("["):
        yield from _parsed(name, 1, "\n".join([first, *lines]))
        return
    for number, line in enumerate([first, *lines] if first else [], 1):
        yield _parsed(name, number, line)


def _parsed(name: str, number: int, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # a number of too many digits is a ValueError
        raise _malformed(name, number, f"JSON ({one_line(str(error))})") from None


def _malformed(name: str, number: int, expected: str) -> ConfigError:
    return ConfigError(f"{name} conversation {number}: expected {expected}: correct or remove it")
