"""Attention for grouped heads that does not copy the cache: what the arms run when `model.attention` is `sdpa`.

transformers' own `sdpa` repeats keys and values to the number of query heads whenever a mask is given (in 5.17 always,
in 5.23 except in eager decode), which reads and writes the cache several times a step. Here

- decode on a GPU runs one kernel that writes the new token, splits each row's positions over the processors and skips
  those that the row does not hold (decode_kernel.py);
- decode elsewhere puts the query heads that share a key head into the query-length dimension: one pass over the cache;
- whole prompts on a GPU run as causal attention without a mask, where no layer has a window of its own;
- anything else is transformers' `sdpa`.

The rule depends on device, dtype and shape alone, never on the compile policy: all arms take the same path.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from servers.kv_cache import Window

NAME = "tailgate_sdpa"

_HALF = (torch.bfloat16, torch.float16)


def grouped_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    window: Window | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention output [B, T, heads, head_dim] for query [B, heads, T, head_dim] over key, value [B, kv_heads, L, …].

    `window` is what the cache knows of the step; it travels through the model's keyword arguments.
    """
    groups = query.shape[1] // key.shape[1]
    scale = kwargs.get("scaling")
    if window is not None and window.memory is not None:
        return _decode_in_kernel(query, key, value, attention_mask, window, scale), None
    is_plain = kwargs.get("position_bias") is None and kwargs.get("softcap") is None
    if is_plain and query.shape[2] == 1 and groups > 1 and attention_mask is not None and attention_mask.shape[1] == 1:
        batch, heads, _, head_dim = query.shape
        packed = query.reshape(batch, key.shape[1], groups, head_dim)
        attended = nn.functional.scaled_dot_product_attention(packed, key, value, attn_mask=attention_mask, scale=scale)
        return attended.reshape(batch, 1, heads, value.shape[-1]), None
    is_fresh = window is not None and window.is_causal and window.reads == "fresh"
    if is_plain and is_fresh and query.is_cuda:
        if groups > 1 and query.dtype not in _HALF:
            # the memory-efficient kernel, which float32 falls back to, takes no grouped heads
            key, value = (item.repeat_interleave(groups, dim=1) for item in (key, value))
        attended = nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=key.shape[1] != query.shape[1]
        )
        return attended.transpose(1, 2).contiguous(), None
    output: tuple[torch.Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    return output


def _decode_in_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    window: Window,
    scale: float | None,
) -> torch.Tensor:
    from servers import decode_kernel

    assert window.memory is not None
    assert window.positions is not None
    keys, values = window.memory
    window.memory = None
    mask = None if window.is_causal else attention_mask
    # an operator of its own for the compiler; without one, the way there would cost more than the kernel
    attend = decode_kernel.decode_attention if torch.compiler.is_compiling() else decode_kernel.launch
    output: torch.Tensor = attend(
        query, key, value, keys, values, window.positions, mask, window.padding, window.context, scale
    )
    return output


def is_ours(model: Any) -> bool:
    """Whether the model runs this attention, which takes a `window`."""
    return bool(getattr(model.config, "_attn_implementation", "") == NAME)


def prepare(device: torch.device) -> None:
    """What the kernels keep between calls exists, so that no graph capture allocates it."""
    if device.type == "cuda":
        from servers.decode_kernel import arrivals, partials

        arrivals(device)
        partials(device)


def contexts_to_warm(model: Any, device: torch.device, limit: int) -> list[int]:
    """Contexts up to `limit` that a decode step must have met, so that no kernel of ours is compiled while serving."""
    if device.type != "cuda" or not is_ours(model):
        return []
    from servers.decode_kernel import contexts_of_variants

    return contexts_of_variants(limit)


def register() -> str:
    """Make the attention known to transformers; returns the name to load models with."""
    AttentionInterface.register(NAME, grouped_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    return NAME
