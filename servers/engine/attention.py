"""Attention for grouped heads that does not copy the cache: what every arm runs.

transformers' own `sdpa` repeats keys and values to the number of query heads whenever a mask is given (in 5.17 always,
in 5.23 except in eager decode), which reads and writes the cache several times a step, and takes rows of one length.
Here

- a prefill step attends to the cache in place, piece by piece of its prompts, whatever their lengths: on a GPU by a
  kernel of our own (prefill_kernel.py), elsewhere by `scaled_dot_product_attention`;
- decode on a GPU runs one kernel that writes the new token, splits each row's positions over the processors and skips
  those that the row does not hold (decode_kernel.py);
- decode elsewhere puts the query heads that share a key head into the query-length dimension: one pass over the cache;
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
    scale, sliding = kwargs.get("scaling"), kwargs.get("sliding_window")
    if window is not None and window.memory is not None:
        if window.parts is not None:
            return _attend_to_parts(query, window, scale, sliding), None
        return _decode_in_kernel(query, key, value, window, scale, sliding), None
    is_plain = kwargs.get("position_bias") is None and kwargs.get("softcap") is None
    if is_plain and query.shape[2] == 1 and groups > 1 and attention_mask is not None and attention_mask.shape[1] == 1:
        batch, heads, _, head_dim = query.shape
        packed = query.reshape(batch, key.shape[1], groups, head_dim)
        attended = nn.functional.scaled_dot_product_attention(packed, key, value, attn_mask=attention_mask, scale=scale)
        return attended.reshape(batch, 1, heads, value.shape[-1]), None
    output: tuple[torch.Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    return output


def _decode_in_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    window: Window,
    scale: float | None,
    sliding: int | None,
) -> torch.Tensor:
    from tailgate.servers.engine import decode_kernel

    assert window.memory is not None
    assert window.positions is not None
    keys, values = window.memory
    window.memory = None
    # an operator of its own for the compiler; without one, the way there would cost more than the kernel
    attend = decode_kernel.decode_attention if torch.compiler.is_compiling() else decode_kernel.launch
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    output: torch.Tensor = attend(
        query,
        key,
        value,
        keys,
        values,
        window.positions,
        window.padding,
        sliding or window.padding,
        window.context,
        scale,
    )
    return output


def _attend_to_parts(query: torch.Tensor, window: Window, scale: float | None, sliding: int | None) -> torch.Tensor:
    assert window.memory is not None
    assert window.parts is not None
    (keys, values), parts = window.memory, window.parts
    window.memory = None
    if scale is None:
        scale = query.shape[-1] ** -0.5
    reach = sliding or window.padding
    attended: torch.Tensor = prefill_attention(
        query, keys, values, parts.tiles, parts.decoding, window.padding, reach, scale
    )
    return attended


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tiles: torch.Tensor,
    decoding: torch.Tensor,
    padding: int,
    reach: int,
    scale: float,
) -> torch.Tensor:
    """Return attention [1, N, heads, head_dim] of query [1, heads, N, head_dim] over what each token's row holds.

    keys, values: [slots · (padding + 1), kv_heads, head_dim], the new tokens included. tiles, decoding: `Parts`. A
    token sees itself and the `reach` - 1 positions before it. What padding attends to is not defined.
    """
    output = query.new_zeros((1, query.shape[2], query.shape[1], values.shape[-1]))
    own = [(row, 1, position, row) for row, position in enumerate(decoding.tolist()) if position >= 0]
    for token, count, position, row in [*own, *tiles.tolist()]:
        if not count:
            continue
        end = position + count
        start = max(0, position - reach + 1)
        at = row * (padding + 1)
        key, value = (memory[at + start : at + end].transpose(0, 1)[None] for memory in (keys, values))
        distance = torch.arange(position, end)[:, None] - torch.arange(start, end)
        output[:, token : token + count] = nn.functional.scaled_dot_product_attention(
            query[:, :, token : token + count],
            key,
            value,
            attn_mask=(distance >= 0) & (distance < reach),
            scale=scale,
            enable_gqa=True,
        ).transpose(1, 2)
    return output


# An operator of its own, opaque to a compiled graph: its CPU form reads the parts. `prepare` adds that of a GPU.
PREFILL = "tailgate::prefill_attention"
torch.library.define(PREFILL, torch.library.infer_schema(attend, mutates_args=()))
torch.library.impl(PREFILL, "cpu", attend)
prefill_attention = torch.ops.tailgate.prefill_attention.default


@torch.library.register_fake(PREFILL)  # type: ignore[untyped-decorator]
def _(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *rest: object) -> torch.Tensor:
    return query.new_empty((1, query.shape[2], query.shape[1], values.shape[-1]))


def prepare(device: torch.device) -> None:
    """Load the kernels of a GPU, and allocate what they keep between calls, so that no graph capture allocates it."""
    if device.type == "cuda":
        from tailgate.servers.engine import prefill_kernel  # noqa: F401 (registers itself)
        from tailgate.servers.engine.decode_kernel import arrivals, partials

        arrivals(device)
        partials(device)


def contexts_to_warm(device: torch.device, limit: int) -> list[int]:
    """Return contexts up to `limit` that warm-up must decode, so that serving compiles no kernel of ours."""
    if device.type != "cuda":
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
