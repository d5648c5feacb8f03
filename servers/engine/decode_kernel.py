"""One new token a row against a long cache, on a GPU: attention split over positions, in one kernel.

A decode step has few queries and much cache. One program a (row, key head), as general attention kernels run it, leaves
most of the card idle at small batches; here a row's positions are divided over several programs, and the last one to
finish joins their partial softmaxes (the split of flash-decoding: Dao, Haziza, Massa & Sizov 2023). Positions beyond a
row's length are never read, so padding the context costs no bandwidth.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

_SHARED_BYTES = 200 << 10  # of the 227 KiB that a Hopper processor offers one program
_BLOCK = 64  # positions that a program reads at once
_MAX_SPLITS = 16
_PARTIAL = 32 * (256 + 2)  # float32 that one program may leave: 32 query heads a key head, of 256 dimensions


@triton.jit  # type: ignore[untyped-decorator]
def _decode(  # type: ignore[no-untyped-def]
    query,
    new_key,
    new_value,
    keys,
    values,
    positions,
    output,
    partial,
    arrived,
    scale,
    padding,
    reach,
    query_row,
    query_head,
    key_row,
    key_head,
    value_row,
    value_head,
    position_row,
    KV_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    SPLITS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WRITES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row = tl.program_id(0) // KV_HEADS
    head = tl.program_id(0) % KV_HEADS
    split = tl.program_id(1)
    newest = tl.load(positions + row * position_row)
    if newest < 0:  # a row without a token in this step
        return
    length = tl.where(newest < padding, newest + 1, 1)
    lowest = tl.maximum(length - reach, 0)
    held = length - 1 if WRITES else length  # positions that are read from the cache end here
    begin = lowest // BLOCK_N
    blocks = tl.cdiv(held, BLOCK_N) - begin
    parts = tl.maximum(tl.minimum(blocks, SPLITS), 1)  # a short row needs fewer programs: the others leave
    if split >= parts:
        return
    first = begin + (blocks * split) // parts
    last = begin + (blocks * (split + 1)) // parts

    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    in_key, in_value = d < HEAD_DIM, d < VALUE_DIM
    real = (g[:, None] < GROUPS) & in_value[None, :]
    q = tl.load(
        query + row * query_row + (head * GROUPS + g[:, None]) * query_head + d[None, :],
        mask=(g[:, None] < GROUPS) & in_key[None, :],
        other=0.0,
    )
    first_token = row.to(tl.int64) * (padding + 1)
    own_keys = keys + (first_token * KV_HEADS + head) * HEAD_DIM
    own_values = values + (first_token * KV_HEADS + head) * VALUE_DIM
    if WRITES:
        k_new = tl.load(new_key + row * key_row + head * key_head + d, mask=in_key, other=0.0)
        v_new = tl.load(new_value + row * value_row + head * value_head + d, mask=in_value, other=0.0)
        if split == parts - 1:
            tl.store(own_keys + newest * KV_HEADS * HEAD_DIM + d, k_new, mask=in_key)
            tl.store(own_values + newest * KV_HEADS * VALUE_DIM + d, v_new, mask=in_value)

    highest = tl.full([BLOCK_G], -1.0e30, tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    sums = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for block in range(first, last):
        position = block * BLOCK_N + n
        seen = (position < held) & (position >= lowest)
        k = tl.load(
            own_keys + position[:, None] * (KV_HEADS * HEAD_DIM) + d[None, :],
            mask=seen[:, None] & in_key[None, :],
            other=0.0,
        )
        v = tl.load(
            own_values + position[:, None] * (KV_HEADS * VALUE_DIM) + d[None, :],
            mask=seen[:, None] & in_value[None, :],
            other=0.0,
        )
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        score = tl.where(seen[None, :], score, -1.0e30)
        raised = tl.maximum(highest, tl.max(score, 1))
        weight = tl.where(seen[None, :], tl.exp(score - raised[:, None]), 0.0)
        fade = tl.exp(highest - raised)
        total = total * fade + tl.sum(weight, 1)
        sums = sums * fade[:, None] + tl.dot(weight.to(v.dtype), v, input_precision=PRECISION)
        highest = raised
    if WRITES:  # noqa: SIM102 (known when the kernel is compiled, the next when it runs)
        # The new token apart: a block that it is put into would go through registers.
        if split == parts - 1:
            score = tl.sum(q.to(tl.float32) * k_new[None, :].to(tl.float32), 1) * scale
            raised = tl.maximum(highest, score)
            weight, fade = tl.exp(score - raised), tl.exp(highest - raised)
            total = total * fade + weight
            sums = sums * fade[:, None] + weight[:, None] * v_new[None, :].to(tl.float32)
            highest = raised

    out = output + (row * KV_HEADS * GROUPS + head * GROUPS + g[:, None]) * VALUE_DIM + d[None, :]
    if SPLITS == 1:
        tl.store(out, (sums / total[:, None]).to(output.dtype.element_ty), mask=real)
    else:
        # partial: [row · head, split, group, head_dim + 2] float32: sums, then the highest score and the total
        width: tl.constexpr = BLOCK_D + 2
        in_group = g < GROUPS
        slot = partial + ((tl.program_id(0) * SPLITS + split) * BLOCK_G + g) * width
        tl.store(slot[:, None] + d[None, :], sums, mask=in_group[:, None])
        tl.store(slot + BLOCK_D, highest, mask=in_group)
        tl.store(slot + BLOCK_D + 1, total, mask=in_group)
        tl.debug_barrier()  # every thread has stored before the count says so
        if tl.atomic_add(arrived + tl.program_id(0), 1, sem="acq_rel") == parts - 1:
            tl.debug_barrier()
            highest = tl.full([BLOCK_G], -1.0e30, tl.float32)
            total = tl.zeros([BLOCK_G], tl.float32)
            sums = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
            for other in tl.static_range(SPLITS):
                slot = partial + ((tl.program_id(0) * SPLITS + other) * BLOCK_G + g) * width
                exists = in_group & (other < parts)
                # written by another processor: read past this one's own cache
                part = tl.load(slot[:, None] + d[None, :], mask=exists[:, None], other=0.0, cache_modifier=".cg")
                part_highest = tl.load(slot + BLOCK_D, mask=exists, other=-1.0e30, cache_modifier=".cg")
                part_total = tl.load(slot + BLOCK_D + 1, mask=exists, other=0.0, cache_modifier=".cg")
                raised = tl.maximum(highest, part_highest)
                fade, part_fade = tl.exp(highest - raised), tl.exp(part_highest - raised)
                total = total * fade + part_total * part_fade
                sums = sums * fade[:, None] + part * part_fade[:, None]
                highest = raised
            tl.store(out, (sums / total[:, None]).to(output.dtype.element_ty), mask=real)
            tl.store(arrived + tl.program_id(0), 0)  # ready for the next call


@functools.cache
def tiling(device: torch.device, programs: int, context: int, token_bytes: int) -> tuple[int, int, int]:
    """Return (programs a row and key head, positions that each reads at once, pipeline stages).

    `programs` = rows × key heads, over at most `context` positions of `token_bytes` a key head.
    Rows are split until the programs fill the card about twice: more parts than that cost more to join than they save.
    The kernel is compiled for each number of parts, so there are few: powers of two.
    """
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    block = _BLOCK
    stages = 3 if 2 * 3 * block * token_bytes <= _SHARED_BYTES else 2
    if 2 * stages * block * token_bytes > _SHARED_BYTES:
        block = 32
    most = max(1, min(2 * processors // programs, -(-context // block), _MAX_SPLITS))
    return 1 << (most.bit_length() - 1), block, stages


def contexts_of_variants(limit: int) -> list[int]:
    """Return contexts up to `limit` at which one row or two meet every number of parts that `tiling` can choose."""
    steps = (_BLOCK * parts for parts in (1, 2, 4, 8, 16) if _BLOCK * parts < limit)
    return [*steps, limit]


@functools.cache
def arrivals(device: torch.device) -> torch.Tensor:
    """Return counters, zero between calls; one stream at a time uses them."""
    return torch.zeros(1 << 20, dtype=torch.int32, device=device)


@functools.cache
def partials(device: torch.device) -> torch.Tensor:
    """Allocate space for the partial results of the most programs that `tiling` splits into, for one launch at a
    time."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return torch.empty(2 * processors * _PARTIAL, dtype=torch.float32, device=device)


def launch(
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
    """Return what `attention.decode` does, on a GPU. The last dimension of every tensor must be contiguous."""
    output = query.new_empty((query.shape[0], 1, query.shape[1], values.shape[2]))
    _launch(query, (new_key, new_value), keys, values, positions, padding, reach, context, scale, output)
    return output


def attend_rows(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    decoding: torch.Tensor,
    padding: int,
    reach: int,
    scale: float,
    output: torch.Tensor,
) -> None:
    """Write the attention of token r of query [1, heads, N, head_dim] over row r to output [1, N, heads, head_dim] for
    each row r whose position in `decoding` [slots] is not -1. The cache holds the new tokens.

    Every step launches programs for all slots, so that one variant of the kernel serves steps of any size.
    """
    positions = decoding[:, None]
    _launch(query.transpose(0, 2), None, keys, values, positions, padding, reach, padding, scale, output)


def _launch(
    query: torch.Tensor,
    new: tuple[torch.Tensor, torch.Tensor] | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    padding: int,
    reach: int,
    context: int,
    scale: float,
    output: torch.Tensor,
) -> None:
    _, heads, _, head_dim = query.shape
    kv_heads, value_dim = keys.shape[1], values.shape[2]
    new_key, new_value = new or (query, query)
    groups = heads // kv_heads
    device = query.device
    programs = positions.shape[0] * kv_heads
    block_g = max(16, triton.next_power_of_2(groups))
    block_d = triton.next_power_of_2(max(head_dim, value_dim))
    splits, block_n, stages = tiling(device, programs, context, block_d * query.element_size())
    if block_g * (block_d + 2) > _PARTIAL:
        splits = 1
    _decode[(programs, splits)](
        query,
        new_key,
        new_value,
        keys,
        values,
        positions,
        output,
        output if splits == 1 else partials(device),
        arrivals(device),
        scale,
        padding,
        reach,
        *query.stride()[:2],
        *new_key.stride()[:2],
        *new_value.stride()[:2],
        positions.stride(0),
        KV_HEADS=kv_heads,
        GROUPS=groups,
        SPLITS=splits,
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim,
        BLOCK_G=block_g,
        BLOCK_D=block_d,
        BLOCK_N=block_n,
        WRITES=new is not None,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=4,
        num_stages=stages,
    )


# An operator of its own, opaque to a compiled graph. `torch.library.custom_op` would do as well, but it
# minds autograd in each call: 55 us of the host instead of 5, in every layer of a step that is no CUDA graph.
_NAME = "tailgate::decode_attention"
torch.library.define(_NAME, torch.library.infer_schema(launch, mutates_args=("keys", "values")))
torch.library.impl(_NAME, "cuda", launch)
decode_attention = torch.ops.tailgate.decode_attention.default


@torch.library.register_fake(_NAME)  # type: ignore[untyped-decorator]
def _(query: torch.Tensor, new_key: torch.Tensor, new_value: torch.Tensor, *rest: object) -> torch.Tensor:
    return query.new_empty((query.shape[0], 1, query.shape[1], new_value.shape[3]))
