"""Text to token ids and back: the model's own tokenizer, or bytes for random presets; and where to stop."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from servers.config import ConfigError

PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
BYTE_OFFSET = 3


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
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._shown = ""

    def push(self, token_ids: Sequence[int]) -> str:
        self._ids.extend(token_ids)
        text: str = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        if text.endswith("�"):  # half of a character: wait for the rest
            return ""
        added, self._shown = text[len(self._shown) :], text
        return added


class StopStrings:
    """Cuts text at the first stop string, holding back what might be the beginning of one."""

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """(text that may be shown, whether a stop string was met)."""
        if not self._stops:
            return text, False
        self._held += text
        found = [position for stop in self._stops if (position := self._held.find(stop)) >= 0]
        if found:
            return self._held[: min(found)], True
        keep = max(
            (size for stop in self._stops for size in range(1, len(stop)) if self._held.endswith(stop[:size])),
            default=0,
        )
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown, False

    def rest(self) -> str:
        """What was held back, once no more text comes."""
        held, self._held = self._held, ""
        return held


def load_tokenizer(model_id: str) -> Tokenizer:
    """The byte tokenizer for `random:` presets, otherwise the model's own."""
    return ByteTokenizer() if model_id.startswith("random:") else ModelTokenizer(model_id)
