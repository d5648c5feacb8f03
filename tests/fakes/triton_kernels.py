"""A kernel of Triton's as a plug-in brings it, and one that is tuned. Only what runs on a GPU imports this."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def increment(values, count, BLOCK: tl.constexpr):  # noqa: N803
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(values + place, tl.load(values + place, mask=place < count) + 1, mask=place < count)


tuned_increment = triton.autotune(
    configs=[triton.Config({"BLOCK": block}, num_warps=4) for block in (64, 128, 256)], key=["count"]
)(increment)
