"""Names of arms, presets and random weights. Imports no pydantic: a command line names them before it reads any."""

from __future__ import annotations

import re
from typing import Any, Literal, get_args

Preset = Literal[
    "eager",
    "eager-padded",
    "compiled-padded",
    "compiled-bucketed",
    "compiled-dynamic",
    "compiled-strict",
    "compiled-naive",
]
PRESETS: tuple[Preset, ...] = get_args(Preset)
LONGEST_NAME = 64

# The byte tokenizer: bytes, after padding, begin and end.
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
BYTE_OFFSET = 3
BYTE_VOCABULARY = 256 + BYTE_OFFSET

# Model shapes that are served with random weights: they need no download and show only how fast a model runs.
# As published in each model's config.json, under the names of transformers' configurations.
RANDOM_PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        "model_type": "llama",
        "vocab_size": BYTE_VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        # Wide enough that greedy decoding wanders instead of repeating one token, so that a comparison can fail.
        "initializer_range": 0.3,
    },
    "llama-3.2-1b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": True,
    },
    "llama-3-8b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "tie_word_embeddings": False,
    },
    "bert-tiny": {
        "model_type": "bert",
        "vocab_size": 30522,
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        # Wide enough that texts differ in their embeddings, so that a comparison can fail.
        "initializer_range": 0.3,
    },
    "bert-base": {
        "model_type": "bert",
        "vocab_size": 30522,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
    },
}

# Those that embed texts. The others generate.
RANDOM_ENCODERS = frozenset(name for name, shape in RANDOM_PRESETS.items() if shape["model_type"] == "bert")


def check_name(name: str) -> str:
    """Return the name, which file names, headers, metrics and Envoy's configuration can hold. Raises ValueError."""
    if len(name) > LONGEST_NAME:
        raise ValueError(f"has {len(name)} characters: give at most {LONGEST_NAME}")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ValueError(
            f'is "{name}": give letters (A to Z), digits, "-", "_" and ".", and begin with a letter or a digit'
        )
    return name
