"""Attention over the slot cache: what every arm runs.

transformers' own `sdpa` repeats keys and values to the number of query heads whenever a mask is given (in 5.17 always,
in 5.23 except in eager decode), which reads and writes the cache several times a step, and takes rows of one length.
Here both kinds of step attend to the cache in place, each token to what its row holds, and are given no mask: on a GPU
by kernels of our own (decode_kernel.py, prefill_kernel.py), elsewhere by `scaled_dot_product_attention`, decoding rows
together and prompts piece by piece.

The rule depends on the device alone, never on the compile policy: all arms take the same path.
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


def cached_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    window: Window | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Return attention [B, T, heads, head_dim] of query [B, heads, T, head_dim] over the cache and the new key, value
    [B, kv_heads, T, head_dim].

    `window` is what the cache knows of the step; it travels through the model's keyword arguments.
    """
    assert window is not None, "layers of this model do not pass on what the cache knows of a step: give another model"
    assert window.memory is not None
    assert window.positions is not None
    keys, values = window.memory
    window.memory = None
    scale = kwargs.get("scaling")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    padding, reach = window.padding, kwargs.get("sliding_window") or window.padding
    tiles, decoding = window.tiles, window.decoding
    if tiles is not None and decoding is not None:
        return prefill_attention(query, keys, values, tiles, decoding, padding, reach, scale), None
    run: Any = decode
    if query.is_cuda:
        from tailgate.servers.engine import decode_kernel

        # an operator of its own for the compiler; without one, the way there would cost more than the kernel
        run = decode_kernel.decode_attention if torch.compiler.is_compiling() else decode_kernel.launch
    return run(query, key, value, keys, values, window.positions, padding, reach, window.context, scale), None


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

    keys, values: [slots · (padding + 1), kv_heads, head_dim], the new tokens included. tiles, decoding: `Window`. A
    token sees itself and the `reach` - 1 positions before it. What padding attends to is not defined.
    """
    output = query.new_zeros((1, query.shape[2], query.shape[1], values.shape[-1]))
    if shared := max((row + 1 for row, position in enumerate(decoding.tolist()) if position >= 0), default=0):
        own, positions = query[:, :, :shared].transpose(0, 2), decoding[:shared].clamp(min=0)
        context = int(positions.max()) + 1
        output[:, :shared] = _attend_rows(own, keys, values, positions, padding, reach, context, scale).transpose(0, 1)
    for token, count, position, row in tiles.tolist():
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


def decode(
    query: torch.Tensor,
    new_key: torch.Tensor,
    new_value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    padding: int,
    reach: int,
    context: int,
    scale: float,
) -> torch.Tensor:
    """Return attention [B, 1, heads, head_dim] of query [B, heads, 1, head_dim] over rows 0 … B-1 of keys, values, and
    store the new token there.

    new_key, new_value: [B, kv_heads, 1, head_dim]. keys, values: [slots · (padding + 1), kv_heads, head_dim],
    contiguous. positions: [B, 1] int64, where the new token stands; the row sees it and the `reach` - 1 before it. What
    a row at `padding` attends to is not defined. context: an upper bound of the positions.
    """
    stands, width = positions[:, 0], padding + 1
    index = torch.arange(0, len(stands) * width, width) + stands
    keys.index_copy_(0, index, new_key[:, :, 0])
    values.index_copy_(0, index, new_value[:, :, 0])
    return _attend_rows(query, keys, values, stands % padding, padding, reach, context, scale)


def _attend_rows(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    padding: int,
    reach: int,
    context: int,
    scale: float,
) -> torch.Tensor:
    """Return attention [B, 1, heads, head_dim] of query [B, heads, 1, head_dim] over rows 0 … B-1 of keys, values: each
    sees its position [B], below `context`, and the `reach` - 1 before it."""
    batch, heads, _, head_dim = query.shape
    key, value = (
        memory.view(-1, padding + 1, *memory.shape[1:])[:batch, :context].transpose(1, 2) for memory in (keys, values)
    )
    # cut from rows of one length, a mask of dynamic width leaves the compiler no question about its layout
    distance = positions[:, None, None, None] - torch.arange(padding)
    seen = distance >= 0
    if reach < padding:
        seen &= distance < reach
    attended = nn.functional.scaled_dot_product_attention(
        query.reshape(batch, key.shape[1], -1, head_dim),  # the heads that share a key head
        key,
        value,
        attn_mask=seen[..., :context],
        scale=scale,
    )
    return attended.reshape(batch, 1, heads, -1)


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


AttentionInterface.register(NAME, cached_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
AttentionInterface.register(ENCODER_NAME, sdpa_attention_forward)
AttentionMaskInterface.register(ENCODER_NAME, _whole_mask)
