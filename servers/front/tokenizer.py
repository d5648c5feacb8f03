"""Text to token ids and back: the model's own tokenizer, or bytes for random presets; and where to stop."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from servers.fields import ConfigError
from servers.presets import BOS_ID, BYTE_OFFSET


class TextStream(Protocol):
    """Decodes a growing sequence of tokens; holds back what is not yet a whole character."""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that `token_ids` adds."""


class Tokenizer(Protocol):
    """What the gRPC front needs of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, with the begin-of-sequence token where the model has one."""

    def stream(self) -> TextStream:
        """A fresh decoder for one answer."""


class ByteTokenizer:
    """One token a byte, after padding, begin and end: ids 3 … 258. Ids beyond decode to nothing."""

    def encode(self, text: str) -> list[int]:
        return [BOS_ID, *(byte + BYTE_OFFSET for byte in text.encode("utf-8"))]

    def stream(self) -> TextStream:
        return _ByteStream()


class _ByteStream:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Sequence[int]) -> str:
        return self._decoder.decode(bytes(i - BYTE_OFFSET for i in token_ids if BYTE_OFFSET <= i < BYTE_OFFSET + 256))


class ModelTokenizer:
    """The tokenizer that ships with a Hugging Face model path or id."""

    def __init__(self, model_id: str) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(model_id)
        except (OSError, ValueError) as error:
            first = str(error).strip().splitlines()[0]
            raise ConfigError(f'no tokenizer can be loaded for model.id "{model_id}": {first}') from None

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text)["input_ids"]
        return ids

    def stream(self) -> TextStream:
        return _ModelStream(self._tokenizer)


class _ModelStream:
    """Decodes the newest tokens beside a few before them, since a token's text may depend on its neighbours (a space
    that only stands inside a line). So the time does not grow with the answer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # from where the context begins
        self._shown = 0  # of these, how many are context: their text is out

    def push(self, token_ids: Sequence[int]) -> str:
        self._ids.extend(token_ids)
        waiting = len(self._ids) - self._shown
        for held in range(min(waiting, _CHARACTER_BYTES)):
            whole = self._ids[: len(self._ids) - held]
            text = self._text(whole)
            if not text.endswith("\N{REPLACEMENT CHARACTER}"):
                return self._show(text, whole)
        # What is no character after twice its longest form will not become one.
        return self._show(text, whole) if waiting >= 2 * _CHARACTER_BYTES else ""

    def _show(self, text: str, whole: list[int]) -> str:
        added = text[len(self._text(self._ids[: self._shown])) :]
        first = max(0, min(self._shown, len(whole) - _CONTEXT_TOKENS))
        self._ids, self._shown = self._ids[first:], len(whole) - first
        return added

    def _text(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text


_CONTEXT_TOKENS = 4
_CHARACTER_BYTES = 4  # in UTF-8 at most, and a token is a byte at least


class StopStrings:
    """Cuts text at the first stop string, holding back what might be the beginning of one.

    First is the one that ends first, and of those that end together the longest, so that the cut does not depend on
    how the text came in pieces. Each character is looked at once, whatever the strings are: A. V. Aho and M. J.
    Corasick, "Efficient string matching" (1975). Making one takes time and memory in the length of all strings.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._children: list[dict[str, int]] = [{}]  # of each node of a tree of all beginnings; node 0 is ""
        self._depth = [0]
        self._stop = [0]  # length of the longest stop string that ends in this node
        for stop in stops:
            self._add(stop)
        self._shorter = self._links()
        self._node = 0
        self._held = ""

    def _add(self, stop: str) -> None:
        node = 0
        for character in stop:
            children = self._children[node]
            if character not in children:
                children[character] = len(self._children)
                self._children.append({})
                self._depth.append(self._depth[node] + 1)
                self._stop.append(0)
            node = children[character]
        self._stop[node] = self._depth[node]

    def _links(self) -> list[int]:
        """For each node, the node of its longest ending that also begins a stop string."""
        links = [0] * len(self._children)
        level = deque([0])
        while level:
            node = level.popleft()
            for character, child in self._children[node].items():
                links[child] = self._follow(links, links[node], character) if node else 0
                self._stop[child] = self._stop[child] or self._stop[links[child]]
                level.append(child)
        return links

    def _follow(self, links: list[int], node: int, character: str) -> int:
        while node and character not in self._children[node]:
            node = links[node]
        return self._children[node].get(character, 0)

    def push(self, text: str) -> tuple[str, bool]:
        """(text that may be shown, whether a stop string was met)."""
        if len(self._children) == 1:
            return text, False
        for number, character in enumerate(text, start=1):
            self._node = self._follow(self._shorter, self._node, character)
            if length := self._stop[self._node]:
                return (self._held + text[:number])[:-length], True
        held = self._held + text
        cut = len(held) - self._depth[self._node]
        self._held = held[cut:]
        return held[:cut], False

    def rest(self) -> str:
        """What was held back, once no more text comes."""
        held, self._held = self._held, ""
        return held


def load_tokenizer(model_id: str) -> Tokenizer:
    """The byte tokenizer for `random:` presets, otherwise the model's own."""
    return ByteTokenizer() if model_id.startswith("random:") else ModelTokenizer(model_id)
