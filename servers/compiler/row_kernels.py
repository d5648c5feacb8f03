"""Products of one row, or of few, with a matrix on a GPU, bound by reading the matrix: two kernels, no tuning.

For one row, a program computes a few outputs from whole rows of the matrix. What the compiler would compute in kernels
of its own is part of it: the norm of the row, `silu(gate) * up`, the scales of quantised weights and the residual. It
begins to read its weights, which no step changes, before the kernel in front of it has ended (programmatic dependent
launch). For few rows, programs share the columns of a tile of outputs, and the last to finish adds their parts.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import nn
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tailgate.servers.compiler.products import FEW_PRODUCT, FEW_ROWS, FEW_TILE, ROW_PRODUCT, row_block

_ROWS = 4  # outputs of a program for one row, of one matrix or of each of two


@triton.jit  # type: ignore[untyped-decorator]
def _multiply(  # type: ignore[no-untyped-def]
    source,
    weight,
    scale,
    norm,
    residual,
    output,
    rows,
    epsilon,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    ROWS: tl.constexpr,
    GATED: tl.constexpr,
    SCALED: tl.constexpr,
    NORMED: tl.constexpr,
    ADDED: tl.constexpr,
    EARLY: tl.constexpr,
):
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, BLOCK)
    real = n < rows
    # the last program may repeat rows that it does not store
    place = weight + tl.where(real, n, 0).to(tl.int64)[:, None] * COLUMNS + k[None, :]
    if EARLY:
        # safe before the wait: kernels here wait before they read results, and all others until this one has ended
        gdc_launch_dependents()
    matrix = tl.load(place)
    if GATED:
        second = place + rows.to(tl.int64) * COLUMNS
        other = tl.load(second)
    if EARLY:
        gdc_wait()
    sums = tl.zeros([ROWS, BLOCK // VECTOR], tl.float32)
    if GATED:
        other_sums = tl.zeros([ROWS, BLOCK // VECTOR], tl.float32)
    if NORMED:
        squares = tl.zeros([BLOCK], tl.float32)
    for start in tl.static_range(0, COLUMNS, BLOCK):
        row = tl.load(source + start + k).to(tl.float32)
        if NORMED:
            squares += row * row
            row *= tl.load(norm + start + k).to(tl.float32)
        if start + BLOCK < COLUMNS:
            next_matrix = tl.load(place + start + BLOCK)
            if GATED:
                next_other = tl.load(second + start + BLOCK)
            # without it, the assembler moves these loads down to where they are used
            tl.debug_barrier()
        sums += tl.sum(tl.reshape(matrix.to(tl.float32) * row[None, :], (ROWS, BLOCK // VECTOR, VECTOR)), 2)
        if GATED:
            other_sums += tl.sum(tl.reshape(other.to(tl.float32) * row[None, :], (ROWS, BLOCK // VECTOR, VECTOR)), 2)
        if start + BLOCK < COLUMNS:
            matrix = next_matrix
            if GATED:
                other = next_other
    product = tl.sum(sums, 1)
    if GATED:
        up = tl.sum(other_sums, 1)
    if SCALED:
        product *= tl.load(scale + n, mask=real, other=0.0).to(tl.float32)
        if GATED:
            up *= tl.load(scale + rows + n, mask=real, other=0.0).to(tl.float32)
    if NORMED:
        shrink = tl.rsqrt(tl.sum(squares, 0) / COLUMNS + epsilon)
        product *= shrink
        if GATED:
            up *= shrink
    if GATED:
        product = product * tl.sigmoid(product) * up
    if ADDED:
        product += tl.load(residual + n, mask=real, other=0.0).to(tl.float32)
    tl.store(output + n, product.to(output.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def _multiply_few(  # type: ignore[no-untyped-def]
    source,
    weight,
    output,
    partial,
    arrived,
    count,
    rows,
    COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    GATED: tl.constexpr,
    EARLY: tl.constexpr,
):
    tile, split = tl.program_id(0), tl.program_id(1)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    real = (m < count)[None, :]
    place = weight + n.to(tl.int64)[:, None] * COLUMNS + k[None, :]
    second = place + rows.to(tl.int64) * COLUMNS
    inputs = source + m[None, :] * COLUMNS + k[:, None]
    blocks: tl.constexpr = COLUMNS // BLOCK_K
    first = blocks * split // SPLITS
    last = blocks * (split + 1) // SPLITS
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if GATED:
        up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for block in tl.range(first, last, num_stages=STAGES):
        start = block * BLOCK_K
        part = tl.load(inputs + start, mask=real, other=0.0)
        sums = tl.dot(tl.load(place + start), part, sums)
        if GATED:
            up = tl.dot(tl.load(second + start), part, up)
    if SPLITS > 1:
        # partial: [tile, split, BLOCK_N, BLOCK_M] float32; the last program of a tile adds the parts, in their order
        own = partial + (tile * SPLITS * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]) * BLOCK_M + m[None, :]
        tl.store(own + split * (BLOCK_N * BLOCK_M), sums)
        tl.debug_barrier()
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel") != SPLITS - 1:
            return
        tl.debug_barrier()
        sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for other in tl.static_range(SPLITS):
            sums += tl.load(own + other * (BLOCK_N * BLOCK_M), cache_modifier=".cg")
        tl.store(arrived + tile, 0)
    if GATED:
        sums = sums * tl.sigmoid(sums) * up
    tl.store(output + m[None, :] * rows + n[:, None], sums.to(output.dtype.element_ty), mask=real)


@triton.jit  # type: ignore[untyped-decorator]
def _gate(product, output, rows, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(0).to(tl.int64)
    gate = tl.load(product + 2 * row * rows + place, mask=place < rows, other=0.0).to(tl.float32)
    up = tl.load(product + (2 * row + 1) * rows + place, mask=place < rows, other=0.0).to(tl.float32)
    tl.store(output + row * rows + place, (gate * tl.sigmoid(gate) * up).to(output.dtype.element_ty), mask=place < rows)


@functools.cache
def _early(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def _arrivals(device: torch.device) -> torch.Tensor:
    """Return counters, zero between calls, for one stream at a time. The warm-up allocates them before any capture."""
    return torch.zeros(1 << 16, dtype=torch.int32, device=device)


def launch_row(
    source: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    norm: torch.Tensor | None,
    epsilon: float,
    residual: torch.Tensor | None,
    gated: bool,
) -> torch.Tensor:
    """Return what `products.multiply_row` does, on a GPU."""
    columns = weight.shape[1]
    rows = weight.shape[0] // 2 if gated else weight.shape[0]
    output = source.new_empty((*source.shape[:-1], rows))
    early = _early(source.device)
    _multiply[(triton.cdiv(rows, _ROWS),)](
        source.contiguous(),
        weight,
        scale if scale is not None else weight,
        norm if norm is not None else source,
        residual.contiguous() if residual is not None else source,
        output,
        rows,
        epsilon,
        COLUMNS=columns,
        BLOCK=row_block(columns),
        VECTOR=16 // weight.element_size(),
        ROWS=_ROWS,
        GATED=gated,
        SCALED=scale is not None,
        NORMED=norm is not None,
        ADDED=residual is not None,
        EARLY=early,
        num_warps=4,
        launch_pdl=early,
    )
    return output


def launch_few(source: torch.Tensor, weight: torch.Tensor, gated: bool) -> torch.Tensor:
    """Return what `products.multiply_few` does, on a GPU: more rows than FEW_ROWS by the library."""
    columns = weight.shape[1]
    count = source.numel() // columns
    rows = weight.shape[0] // 2 if gated else weight.shape[0]
    output = source.new_empty((*source.shape[:-1], rows))
    if count > FEW_ROWS:
        product = nn.functional.linear(source, weight)
        if not gated:
            return product
        _gate[(count, triton.cdiv(rows, 1024))](product, output, rows, BLOCK=1024)
        return output
    processors = torch.cuda.get_device_properties(source.device).multi_processor_count
    tiles, early = rows // FEW_TILE, _early(source.device)
    splits = 1 if gated else 2
    block_m = max(16, triton.next_power_of_2(count))
    is_single = not gated and tiles * splits <= processors  # one program a processor: it reads more at once
    _multiply_few[(tiles, splits)](
        source.contiguous(),
        weight,
        output,
        output if splits == 1 else source.new_empty(tiles * splits * FEW_TILE * block_m, dtype=torch.float32),
        _arrivals(source.device),
        count,
        rows,
        COLUMNS=columns,
        BLOCK_M=block_m,
        BLOCK_N=FEW_TILE,
        BLOCK_K=256 if is_single else 128,
        SPLITS=splits,
        STAGES=4 if gated else 3,
        GATED=gated,
        EARLY=early,
        num_warps=4,
        launch_pdl=early,
    )
    return output


torch.library.impl(ROW_PRODUCT, "cuda", launch_row)
torch.library.impl(FEW_PRODUCT, "cuda", launch_few)
