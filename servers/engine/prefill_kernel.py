"""Attention of a prefill step on a GPU: pieces of prompts, and one token of each running answer, over the cache.

One program attends with a piece of up to `TILE` tokens and one head to what the piece's row holds, in blocks of
positions with a running softmax (Dao 2023, FlashAttention-2, algorithm 1). The keys stay where they lie; running
answers take the decode kernel, which splits their positions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tailgate.servers.engine import decode_kernel
from tailgate.servers.engine.attention import PREFILL
from tailgate.servers.engine.kv_cache import TILE

_BLOCK = 64  # positions that a program reads at once


@triton.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    q,
    keys,
    values,
    own,
    first,
    last,
    end,
    reach,
    scale,
    highest,
    total,
    sums,
    KEY_STRIDE: tl.constexpr,
    VALUE_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add positions `first` to `last` to the running softmax; without masks where every query sees all of them."""
    d = tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    for start in range(first, last, BLOCK_N):
        position = start + n
        place = position[:, None]
        if MASKED:
            held = (position < end)[:, None]
            k = tl.load(keys + place * KEY_STRIDE, mask=held & (d < HEAD_DIM)[None, :], other=0.0)
            v = tl.load(values + place * VALUE_STRIDE, mask=held & (d < VALUE_DIM)[None, :], other=0.0)
        elif HEAD_DIM == BLOCK_D and VALUE_DIM == BLOCK_D:
            k = tl.load(keys + place * KEY_STRIDE)
            v = tl.load(values + place * VALUE_STRIDE)
        else:
            k = tl.load(keys + place * KEY_STRIDE, mask=(d < HEAD_DIM)[None, :], other=0.0)
            v = tl.load(values + place * VALUE_STRIDE, mask=(d < VALUE_DIM)[None, :], other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if MASKED:
            distance = own[:, None] - position[None, :]
            score = tl.where((distance >= 0) & (distance < reach), score, float("-inf"))
        raised = tl.maximum(highest, tl.max(score, 1) * scale)
        weight = tl.exp2(score * scale - raised[:, None])
        fade = tl.exp2(highest - raised)
        total = total * fade + tl.sum(weight, 1)
        sums = sums * fade[:, None] + tl.dot(weight.to(v.dtype), v, input_precision=PRECISION)
        highest = raised
    return highest, total, sums


@triton.jit  # type: ignore[untyped-decorator]
def _prefill(  # type: ignore[no-untyped-def]
    query,
    keys,
    values,
    tiles,
    output,
    scale,
    padding,
    reach,
    query_token,
    query_head,
    KV_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # the last pieces of a prompt attend to most: they begin first
    tile = tiles + (tl.num_programs(1) - 1 - tl.program_id(1)) * 4
    count = tl.load(tile + 1)
    if count == 0:
        return
    head = tl.program_id(0)
    token = tl.load(tile)
    first = tl.load(tile + 2)
    row = tl.load(tile + 3)
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    real = m < count
    q = tl.load(
        query + (token + m[:, None]) * query_token + head * query_head + d[None, :],
        mask=real[:, None] & (d < HEAD_DIM)[None, :],
        other=0.0,
    )
    base = row * (padding + 1) * KV_HEADS + head // GROUPS
    own_keys = keys + base * HEAD_DIM + d[None, :]
    own_values = values + base * VALUE_DIM + d[None, :]
    own = first + m
    end = first + count
    exponent = scale * 1.4426950408889634
    # finite: a row that sees nothing of a block must not subtract infinities
    highest = tl.full([BLOCK_M], -1.0e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # blocks between `whole` and `border` are seen by every query of the piece
    begin = tl.maximum(first - reach + 1, 0) // BLOCK_N * BLOCK_N
    border = (first + 1) // BLOCK_N * BLOCK_N
    whole = begin
    if WINDOWED:
        whole = tl.minimum(tl.cdiv(tl.maximum(first + BLOCK_M - reach, 0), BLOCK_N) * BLOCK_N, border)
        whole = tl.maximum(whole, begin)
        border = tl.maximum(border, whole)
        highest, total, sums = _attend(
            q, own_keys, own_values, own, begin, whole, end, reach, exponent, highest, total, sums,
            KV_HEADS * HEAD_DIM, KV_HEADS * VALUE_DIM, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_N, True, PRECISION,
        )  # fmt: skip
    highest, total, sums = _attend(
        q, own_keys, own_values, own, whole, border, end, reach, exponent, highest, total, sums,
        KV_HEADS * HEAD_DIM, KV_HEADS * VALUE_DIM, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_N, False, PRECISION,
    )  # fmt: skip
    highest, total, sums = _attend(
        q, own_keys, own_values, own, border, end, end, reach, exponent, highest, total, sums,
        KV_HEADS * HEAD_DIM, KV_HEADS * VALUE_DIM, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_N, True, PRECISION,
    )  # fmt: skip
    out = output + ((token + m[:, None]) * KV_HEADS * GROUPS + head) * VALUE_DIM + d[None, :]
    tl.store(out, (sums / total[:, None]).to(output.dtype.element_ty), mask=real[:, None] & (d < VALUE_DIM)[None, :])


def launch(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tiles: torch.Tensor,
    decoding: torch.Tensor,
    padding: int,
    reach: int,
    scale: float,
) -> torch.Tensor:
    """Return what `attention.attend` does, on a GPU. The last dimension of every tensor must be contiguous."""
    _, heads, tokens, head_dim = query.shape
    kv_heads, value_dim = keys.shape[1], values.shape[2]
    output = torch.zeros((1, tokens, heads, value_dim), dtype=query.dtype, device=query.device)
    block_d = triton.next_power_of_2(max(head_dim, value_dim))
    is_half = query.element_size() == 2
    _prefill[(heads, tiles.shape[0])](
        query,
        keys,
        values,
        tiles,
        output,
        scale,
        padding,
        reach,
        query.stride(2),
        query.stride(1),
        KV_HEADS=kv_heads,
        GROUPS=heads // kv_heads,
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim,
        BLOCK_M=TILE,
        BLOCK_D=block_d,
        BLOCK_N=_BLOCK if is_half and block_d <= 128 else 32,
        WINDOWED=reach < padding,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=4,
        num_stages=2,
    )
    decode_kernel.attend_rows(query, keys, values, decoding, padding, reach, scale, output)
    return output


torch.library.impl(PREFILL, "cuda", launch)
