"""The sizes at which what a step runs changes: both sides of every border of an arm's shapes."""

from __future__ import annotations

from servers.config import ArmConfig
from servers.ladders import default_batches


def late_contexts(arm: ArmConfig) -> frozenset[int]:
    """Contexts of decode steps, in positions, that lie on a border or just past it, where no prompt is so long: the
    borders of a context that an answer reaches only as it grows, its longest one among them."""
    longest, policy = arm.engine.longest_context, arm.compile
    ends = {longest, *arm.shapes.context_ladder, *policy.context_bounds}
    first = arm.engine.max_prompt_tokens + 1
    return frozenset(end + past for end in ends for past in (0, 1) if first < end + past <= longest)


def prompt_borders(arm: ArmConfig) -> frozenset[int]:
    """Lengths of prompts, in tokens, that lie on a border or just past it, as far as prompts may be so long.

    Borders are one token, the longest prompt, the steps of a ladder, the smallest size that is not padded up, the first
    length that is cut (whose last chunk is one token), the ends of the bounds that the policy gives, and those of a
    context: a prompt of n tokens is decoded from context n + 1 on.
    """
    longest, policy = arm.engine.max_prompt_tokens, arm.compile
    ends = {1, arm.engine.prefill_tokens, longest, *arm.length_ladder}
    if arm.shapes.kind == "exact":
        # sizes 0 and 1 are their own to a compiler: 2 is the first that is like the others
        ends |= {arm.shapes.min_size - 1, arm.shapes.min_size, 2}
    for bounds in (policy.length_bounds, policy.context_bounds):
        ends |= {bounds[0] - 1, bounds[1]} if bounds else set()
    if policy.context_bounds:
        ends |= {end - 2 for end in policy.context_bounds}
    ends |= {end - 1 for end in arm.shapes.context_ladder}
    return frozenset(length + past for length in ends for past in (0, 1) if 1 <= length + past <= longest)


def batch_borders(arm: ArmConfig) -> frozenset[int]:
    """Texts of an encoder's batches that lie on a border or just past it: one and two, all slots, the steps of a
    ladder, the smallest size that is not padded up, and the ends of given bounds."""
    most, shapes, bounds = arm.engine.slots, arm.shapes, arm.compile.batch_bounds
    ends = {1, most}
    if shapes.kind == "buckets":
        ends |= set(shapes.batch_ladder or default_batches(most))
    elif shapes.kind == "exact":
        ends |= {shapes.min_size - 1, shapes.min_size, 2}
    ends |= {bounds[0] - 1, bounds[1]} if bounds else set()
    return frozenset(size + past for size in ends for past in (0, 1) if 1 <= size + past <= most)
