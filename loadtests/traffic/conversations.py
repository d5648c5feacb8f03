"""Conversations, streamed: what people wrote and what models answered, turn by turn.

A file is a JSON array, or JSON Lines, of objects with `conversations`, `conversation` or `messages`: a list of
`{"from": ..., "value": ...}` as in ShareGPT, or of `{"role": ..., "content": ...}` as OpenAI's API takes them. A file
of any size takes the memory of the conversations that are kept.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from loadtests.traffic.traces import DAMAGED, open_text
from servers.fields import ConfigError

KEPT = 4096  # conversations: about 30 MB of text at ShareGPT's mean length

_LISTS = ("conversations", "conversation", "messages")
_SYSTEM_ROLES = ("system", "developer")
_USER_ROLES = ("human", "user")
_MODEL_ROLES = ("gpt", "chatgpt", "assistant", "bing", "bard", "model")
_CHUNK = 1 << 20
_LONGEST = 1 << 26  # characters of one conversation
_DECODER = json.JSONDecoder()


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
    try:
        with open_text(path) as source:
            for read, value in enumerate(_objects(name, source), 1):
                conversation = _conversation(name, read, value)
                if conversation is None:
                    continue
                usable += 1
                if len(kept) < keep:
                    kept.append((read, conversation))
                elif (place := int(draws.random() * usable)) < keep:
                    kept[place] = (read, conversation)
    except FileNotFoundError:
        raise ConfigError(f'conversations "{name}" do not exist: give the path of a ShareGPT JSON file') from None
    except DAMAGED:
        raise ConfigError(f'conversations "{name}" are damaged gzip data: copy them again') from None
    except OSError as error:
        raise ConfigError(f'conversations "{name}" cannot be read ({error.strerror}): give a readable file') from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f'conversations "{name}" have byte 0x{error.object[error.start]:02x}, which is not UTF-8 text: '
            "unpack or convert them"
        ) from None
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


def _objects(name: str, source: TextIO) -> Iterator[Any]:
    """The values of a JSON array, or of JSON Lines, one by one."""
    text = _JsonText(source)
    in_array = text.peek() == "["
    text.at += in_array
    number = 0
    while True:
        if (first := text.peek()) == "," and in_array and number:
            text.at += 1
            first = text.peek()
        if first == ("]" if in_array else ""):
            return
        if not first:
            raise _malformed(name, number + 1, "the end of the array, but the file ends before it")
        number += 1
        yield text.value(name, number)


class _JsonText:
    """The part of a file that is being looked at: `text` from `at` on."""

    def __init__(self, source: TextIO) -> None:
        self._source = source
        self._ended = False
        self.text, self.at = "", 0

    def peek(self) -> str:
        """The next character that is no space; at the end of the file an empty string."""
        while True:
            while self.at < len(self.text) and self.text[self.at].isspace():
                self.at += 1
            if self.at < len(self.text):
                return self.text[self.at]
            if self._ended:
                return ""
            self._more()

    def value(self, name: str, number: int) -> Any:
        """The JSON value that begins here."""
        while True:
            try:
                value, self.at = _DECODER.raw_decode(self.text, self.at)
                return value
            except RecursionError:
                raise _malformed(name, number, "one JSON object") from None
            except json.JSONDecodeError as error:
                # A value that does not parse may only be cut: twice as much text tells.
                if self._ended or len(self.text) - self.at > _LONGEST:
                    near = self.text[max(self.at, error.pos - 30) : error.pos + 30]
                    shown = "".join(char if char.isprintable() else "?" for char in near)
                    raise _malformed(name, number, f'one JSON object, near "{shown}"') from None
                self._more()
            except ValueError:
                raise _malformed(name, number, "whole numbers of 4,300 digits at most") from None

    def _more(self) -> None:
        rest = self.text[self.at :]
        chunk = self._source.read(max(_CHUNK, len(rest)))
        self._ended = not chunk
        self.text, self.at = rest + chunk, 0


def _malformed(name: str, number: int, expected: str) -> ConfigError:
    return ConfigError(f"{name} conversation {number}: expected {expected}: correct or remove it")
