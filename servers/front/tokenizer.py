"""Text to token ids and back: the model's own tokenizer, or bytes for random presets."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any, Protocol

from tailgate.servers.complaint import ConfigError
from tailgate.servers.presets import BOS_ID, BYTE_OFFSET


class TextStream(Protocol):
    """Decodes a growing sequence of tokens; holds back what is not yet a whole character."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that `token_ids` adds."""


class Tokenizer(Protocol):
    """What the gRPC front needs of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`, with the begin-of-sequence token if the model has one."""

    def stream(self) -> TextStream:
        """Return a fresh decoder for one answer."""


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
        return ModelStream(self._tokenizer)


class ModelStream:
    """Decodes the newest tokens with a few before them, since a token's text may depend on its neighbours (a space
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


def load_tokenizer(model_id: str) -> Tokenizer:
    """Load the byte tokenizer for `random:` presets, otherwise the model's own."""
    return ByteTokenizer() if model_id.startswith("random:") else ModelTokenizer(model_id)
