"""Attention for grouped heads that does not copy the cache: what the arms run when `model.attention` is `sdpa`.

transformers' own `sdpa` repeats keys and values to the number of query heads whenever a mask is given (in 5.17 always,
in 5.23 except in eager decode), which reads and writes the cache several times a step. In decode, the query heads that
share a key head can stand in the query-length dimension instead: the same numbers from one pass over the cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

NAME = "tailgate_sdpa"


def grouped_decode_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention output [B, T, heads, head_dim] for query [B, heads, T, head_dim] over key, value [B, kv_heads, L, …].

    Decode (T = 1) with grouped heads and one mask for all heads is packed; anything else goes to transformers' `sdpa`.
    """
    groups = query.shape[1] // key.shape[1]
    shared_mask = attention_mask is not None and attention_mask.shape[1] == 1
    if query.shape[2] != 1 or groups == 1 or not shared_mask or kwargs.get("position_bias") is not None:
        output: tuple[torch.Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        return output
    batch, heads, _, head_dim = query.shape
    packed = query.reshape(batch, key.shape[1], groups, head_dim)
    attended = nn.functional.scaled_dot_product_attention(
        packed, key, value, attn_mask=attention_mask, scale=kwargs.get("scaling")
    )
    return attended.reshape(batch, 1, heads, value.shape[-1]), None


def register() -> str:
    """Make the attention known to transformers; returns the name to load models with."""
    AttentionInterface.register(NAME, grouped_decode_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    return NAME
