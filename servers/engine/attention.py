"""Attention for grouped heads that does not copy the cache: what the arms run when `model.attention` is `sdpa`.

transformers' own `sdpa` repeats keys and values to the number of query heads whenever a mask is given (in 5.17 always,
in 5.23 except in eager decode), which reads and writes the cache several times a step. Here

- decode on a GPU runs one kernel that writes the new token, splits each row's positions over the processors and skips
  those that the row does not hold (decode_kernel.py);
- decode elsewhere puts the query heads that share a key head into the query-length dimension: one pass over the cache;
- whole prompts on a GPU run as causal attention without a mask, where no layer has a window of its own;
- later chunks of prompts on a GPU, under the same condition and in half precision, run as flash attention over rows of
  unequal length, which reads each row's keys where they lie and no further than the chunk reaches;
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

from tailgate.servers.engine.kv_cache import Window

# As transformers knows them: of models that generate, and of encoders, which run `sdpa` with a mask in every step.
NAME = "tailgate_sdpa"
ENCODER_NAME = "tailgate_encoder_sdpa"

_HALF = (torch.bfloat16, torch.float16)
_FLASH_HEAD = 256  # elements, the largest head that flash attention takes; a multiple of 8


def grouped_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    window: Window | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Return attention [B, T, heads, head_dim] of query [B, heads, T, head_dim] over key, value [B, kv_heads, L, …].

    `window` is what the cache knows of the step; it travels through the model's keyword arguments.
    """
    groups = query.shape[1] // key.shape[1]
    scale = kwargs.get("scaling")
    if window is not None and window.memory is not None:
        if window.in_place:
            return _extend_in_place(query, window, scale), None
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
    from tailgate.servers.engine import decode_kernel

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


def segments(
    positions: torch.Tensor, rows: torch.Tensor, padding: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the query and key offsets of a chunk and the number of keys it sees, as `Window.segments`.

    positions: [B, T], which rise by one in a row, except padding. rows: [B]. Flash attention aligns the last query with
    the last key, so a chunk that is padded to T queries sees as many keys as if they were all real; the real ones then
    see exactly what precedes them. A padding row sees the first T keys of its row, and is not to be used.
    """
    batch, length = positions.shape
    first = torch.where(positions[:, 0] < padding, positions[:, 0], 0)
    queries = torch.arange(batch + 1, device=rows.device) * length
    keys = torch.cat([rows, rows[:1]]) * (padding + 1)  # only the first B count: the lengths are given
    return queries.int(), keys.int(), (first + length).int()


def _extend_in_place(query: torch.Tensor, window: Window, scale: float | None) -> torch.Tensor:
    assert window.memory is not None
    assert window.segments is not None
    (keys, values), (query_starts, key_starts, seen) = window.memory, window.segments
    window.memory = None
    batch, heads, length, head_dim = query.shape
    flat = query.transpose(1, 2).reshape(batch * length, heads, head_dim)
    output: torch.Tensor = flash(
        flat,
        keys,
        values,
        query_starts,
        key_starts,
        length,
        window.context + length,
        0.0,
        True,
        False,
        scale=scale,
        seqused_k=seen,
    )[0]
    return output.view(batch, length, heads, head_dim)


# torch 2.11's public varlen_attn takes no key lengths, without which keys would have to lie densely
flash: Any = torch.ops.aten._flash_attention_forward


def reads_in_place(model: Any) -> bool:
    """Return whether flash attention can run the later chunks of the model's prompts."""
    weight = next(model.parameters())
    config = model.config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return (
        is_ours(model)
        and weight.is_cuda
        and weight.dtype in _HALF
        and head_dim <= _FLASH_HEAD
        and head_dim % 8 == 0
        and not getattr(config, "attn_logit_softcapping", None)
    )


def is_ours(model: Any) -> bool:
    """Return whether the model runs this attention, which takes a `window`."""
    return bool(getattr(model.config, "_attn_implementation", "") == NAME)


def prepare(device: torch.device) -> None:
    """Allocate what the kernels keep between calls, so that no graph capture allocates it."""
    if device.type == "cuda":
        from tailgate.servers.engine.decode_kernel import arrivals, partials

        arrivals(device)
        partials(device)


def contexts_to_warm(model: Any, device: torch.device, limit: int) -> list[int]:
    """Return contexts up to `limit` that warm-up must decode, so that serving compiles no kernel of ours."""
    if device.type != "cuda" or not is_ours(model):
        return []
    from tailgate.servers.engine.decode_kernel import contexts_of_variants

    return contexts_of_variants(limit)


def _whole_mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """Return an encoder's mask in every step: transformers leaves it out where no text of the batch is padded, which it
    finds out by waiting for the device, and which gives one shape two graphs."""
    mask: torch.Tensor | None = sdpa_mask(*args, **{**kwargs, "allow_is_bidirectional_skip": False})
    return mask


AttentionInterface.register(NAME, grouped_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
AttentionInterface.register(ENCODER_NAME, sdpa_attention_forward)
AttentionMaskInterface.register(ENCODER_NAME, _whole_mask)
