"""Text to token ids: the model's own tokenizer, or bytes for random presets."""

from __future__ import annotations

from collections.abc import Callable

from tailgate.servers.complaint import ConfigError
from tailgate.servers.presets import BOS_ID, BYTE_OFFSET

# The token ids of a text, with the begin-of-sequence token if the model has one.
Encode = Callable[[str], list[int]]


def encode_bytes(text: str) -> list[int]:
    """Return one token a byte, after padding, begin and end: ids 3 … 258."""
    return [BOS_ID, *(byte + BYTE_OFFSET for byte in text.encode("utf-8"))]


def load_tokenizer(model_id: str) -> Encode:
    """Load the byte tokenizer for `random:` presets, otherwise the model's own. Raises ConfigError."""
    if model_id.startswith("random:"):
        return encode_bytes
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model_id)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise ConfigError(f'no tokenizer can be loaded for model.id "{model_id}": {first}') from None

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer(text)["input_ids"]
        return ids

    return encode
