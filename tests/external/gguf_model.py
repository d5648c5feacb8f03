"""The model of tests/fakes/hub_model.py as one file for llama.cpp, in the format of ggml's docs/gguf.md, version 3.

llama.cpp's kind of vocabulary joins neighbours from single characters on, so it has what each word begins with too. Its
words have the numbers that they have in the model's folder.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

from tests.fakes.hub_model import SPECIAL, WORDS, weights

_ALIGNED = 32
_F32 = 0  # the type of every tensor
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    **{f"model.layers.0.self_attn.{name}_proj": f"blk.0.attn_{name}" for name in "qkv"},
    "model.layers.0.self_attn.o_proj": "blk.0.attn_output",
    **{f"model.layers.0.mlp.{name}_proj": f"blk.0.ffn_{name}" for name in ("gate", "up", "down")},
    "model.layers.0.input_layernorm": "blk.0.attn_norm",
    "model.layers.0.post_attention_layernorm": "blk.0.ffn_norm",
}


def make_gguf(path: Path, *, hidden: int, inner: int, heads: int = 2) -> Path:
    """`path` is the model, of one layer."""
    words = [f"▁{word}" for word in WORDS]
    begins = sorted({word[:end] for word in words for end in range(2, len(word))})
    text = [*words, *begins, *sorted(set("".join(words)))]
    rest = [f"<0x{byte:02X}>" for byte in range(256)]  # for characters that no word has
    vocabulary = [*SPECIAL, *text, *rest]
    shape = {
        **{"context_length": 1024, "embedding_length": hidden, "feed_forward_length": inner, "block_count": 1},
        **{"attention.head_count": heads, "attention.head_count_kv": heads, "rope.dimension_count": hidden // heads},
    }
    settings: dict[str, Any] = {
        "general.architecture": "llama",
        **{f"llama.{key}": value for key, value in shape.items()},
        "llama.attention.layer_norm_rms_epsilon": 1e-6,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": vocabulary,
        "tokenizer.ggml.scores": [0.0] * len(vocabulary),
        # 2 stands for what is unknown, 3 for what steers, 1 for text, 6 for a byte.
        "tokenizer.ggml.token_type": [2, *[3] * (len(SPECIAL) - 1), *[1] * len(text), *[6] * len(rest)],
        **{f"tokenizer.ggml.{name}_token_id": number for number, name in enumerate(("unknown", "bos", "eos"))},
        "tokenizer.ggml.add_bos_token": False,
    }
    drawn = weights(len(vocabulary), hidden, inner)
    drawn["lm_head.weight"][-len(rest) :] = 0.0  # a server holds back half a character
    tensors = {f"{_NAMES[name.removesuffix('.weight')]}.weight": tensor for name, tensor in drawn.items()}
    infos, data = b"", b""
    for name, tensor in tensors.items():
        infos += _text(name) + struct.pack(f"<I{tensor.ndim}QIQ", tensor.ndim, *tensor.shape[::-1], _F32, len(data))
        data += _padded(tensor.astype("<f4").tobytes())
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(settings))
    head += b"".join(_text(key) + _typed(value) for key, value in settings.items())
    path.write_bytes(_padded(head + infos) + data)
    return path


def _text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def _typed(value: Any) -> bytes:
    """The number of its type, then the value."""
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<II", 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + _text(value)
        case [first, *_]:
            # The numbers in a list are signed.
            items = [struct.pack("<Ii", 5, item) if isinstance(first, int) else _typed(item) for item in value]
            return struct.pack("<I", 9) + items[0][:4] + struct.pack("<Q", len(items)) + b"".join(i[4:] for i in items)
        case _:
            raise TypeError(f"{value!r} has no type here")


def _padded(raw: bytes) -> bytes:
    return raw + bytes(-len(raw) % _ALIGNED)
