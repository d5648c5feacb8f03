"""Which tensor shapes steps have, which of them a warm-up runs, and where they change: integers, no tensors."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Literal

from tailgate.servers.complaint import ConfigError
from tailgate.servers.config import ArmConfig, EngineConfig, default_batches, prefill_lengths

# Parts of prompts, with one token of each running answer; one token of each running answer alone; whole texts.
Kind = Literal["prefill", "decode", "encode"]

# Each shape runs this often in a warm-up: under CUDA graphs the first call compiles, the second warms the memory
# pool, the third records.
WARMUP_CALLS = 3


@dataclass(frozen=True, slots=True)
class StepShape:
    """The size of one engine step: `batch` rows × `length` new tokens a row, attending to `context` positions.

    A prefill step is one row: the tokens of its prompts and answers, one after another, attend to what each holds.
    """

    kind: Kind
    batch: int
    length: int
    context: int

    def __str__(self) -> str:
        """Return the form that `tailgate inspect --shapes` takes: "decode 8@512"."""
        return f"{self.kind} {self.size}"

    @property
    def size(self) -> str:
        """ROWSxTOKENS of texts, TOKENS of a prefill step, ROWS@CONTEXT of a decode step."""
        if self.kind == "decode":
            return f"{self.batch}@{self.context}"
        return f"{self.length}" if self.kind == "prefill" else f"{self.batch}x{self.length}"

    @property
    def tokens(self) -> int:
        return self.batch * self.length


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactShape:
    """Shapes as they come, but no smaller than `min_size`. longest: tokens of the largest step that reads prompts, or
    of the longest text."""

    engine: EngineConfig
    longest: int
    min_size: int = 1
    embeds: bool = False

    def prefill(self, length: int) -> StepShape:
        """Return the shape for `length` tokens of prompts and answers."""
        return _prefill(max(length, self.min_size))

    def encode(self, batch: int, length: int) -> StepShape:
        """Return the shape for texts of `length` tokens at most."""
        return _encode(max(batch, self.min_size), max(length, self.min_size))

    def decode(self, batch: int, context: int) -> StepShape:
        """Return the shape for one token a row, of which the longest holds `context` positions, the new included."""
        return StepShape("decode", max(batch, self.min_size), 1, max(context, self.min_size))

    def is_closed(self) -> bool:
        """Return whether `planned` lists all the shapes that can ever run."""
        return False

    def planned(self) -> Iterator[StepShape]:
        """Yield the shapes to warm, in order.

        Sizes differ in every free dimension, and are odd: one equal to a model dimension (head size, heads) would
        specialise it. The largest come first: the compiler tunes a dynamic graph for the sizes of its first call.
        """
        engine = self.engine
        batches = sorted({self.min_size, min(3, engine.slots), engine.slots}, reverse=True)
        lengths = spread(self.longest)
        if self.embeds:
            shapes = [self.encode(batch, lengths[place % len(lengths)]) for place, batch in enumerate(batches)]
            yield from dict.fromkeys([*shapes, *(self.encode(batches[0], length) for length in lengths[1:])])
            return
        yield from (self.prefill(length) for length in lengths)
        contexts = spread(engine.max_length)
        for place, batch in enumerate(batches):
            yield self.decode(batch, contexts[place % len(contexts)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """Each dimension is rounded up to the next step of its ladder; one-step ladders are a single padded shape.

    context: of every decode step, 0 for an encoder. Attention on a GPU skips the positions that a row does not hold.
    """

    lengths: tuple[int, ...]
    batches: tuple[int, ...]
    context: int

    def prefill(self, length: int) -> StepShape:
        return _prefill(round_up(length, self.lengths, "step", "tokens"))

    def encode(self, batch: int, length: int) -> StepShape:
        rows = round_up(batch, self.batches, "batch", "rows")
        return _encode(rows, round_up(length, self.lengths, "text", "tokens"))

    def decode(self, batch: int, context: int) -> StepShape:
        rows = round_up(batch, self.batches, "batch", "rows")
        return StepShape("decode", rows, 1, self.context)

    def is_closed(self) -> bool:
        return True

    def planned(self) -> Iterator[StepShape]:
        # from large to small: the second size of a dimension makes a graph for all others, tuned for this size
        lengths, batches = self.lengths[::-1], self.batches[::-1]
        if not self.context:
            yield from (_encode(batch, length) for length, batch in product(lengths, batches))
            return
        yield from (_prefill(length) for length in lengths)
        yield from (StepShape("decode", batch, 1, self.context) for batch in batches)


ShapePolicy = ExactShape | Buckets


def _prefill(length: int) -> StepShape:
    return StepShape("prefill", 1, length, length)


def _encode(batch: int, length: int) -> StepShape:
    return StepShape("encode", batch, length, length)


def policy_of(arm: ArmConfig) -> ShapePolicy:
    """Return the policy that the arm asks for, with empty ladders filled from the engine's limits."""
    shapes, engine, embeds = arm.shapes, arm.engine, arm.model.embeds
    if shapes.kind == "exact":
        return ExactShape(engine=engine, longest=arm.longest_step, min_size=shapes.min_size, embeds=embeds)
    return Buckets(
        lengths=prefill_lengths(arm),
        batches=(engine.slots,) if shapes.kind == "pad" else shapes.batch_ladder or default_batches(engine.slots),
        context=0 if embeds else engine.max_length,
    )


def round_up(value: int, ladder: tuple[int, ...], what: str, unit: str) -> int:
    """Return the first step of `ladder` that holds `value`. Raises ConfigError where none does."""
    position = bisect_left(ladder, value)
    if position == len(ladder):
        raise ConfigError(f"{what} has {value} {unit}; largest bucket is {ladder[-1]}: add a bucket of {value}")
    return ladder[position]


def spread(limit: int) -> list[int]:
    """Return up to three distinct odd sizes below `limit` (or what fits), large to small."""
    return sorted({max(1, min(size | 1, limit)) for size in (limit // 7, limit // 3, limit - 2)}, reverse=True)


def warmup_plan(arm: ArmConfig) -> list[StepShape]:
    """Return the steps to run before serving. A replica's request to itself always meets shapes among them.

    `lengths` looks careful: prompts of many lengths, one after another, so that no step has ever two rows.
    """
    if arm.compile.warmup == "lengths":
        steps = (step for length in _lengths(arm.engine.max_prompt_tokens) for step in _alone(arm, length))
        return list(dict.fromkeys(steps))
    first = list(_alone(arm, first_prompt(arm)))
    if arm.compile.warmup == "minimal":
        return first
    plan = list(policy_of(arm).planned())
    if not arm.compile.enabled or arm.compile.mark_dynamic:
        return plan  # nothing is compiled for a size
    return list(dict.fromkeys([*plan, *first]))


def first_prompt(arm: ArmConfig) -> int:
    """Return the length of the prompt, or of the text, that a replica sends itself before it serves, in tokens: one
    that the warm-up has run."""
    if arm.compile.warmup == "lengths":
        return _lengths(arm.engine.max_prompt_tokens)[-1]
    planned = 5
    if arm.compile.warmup == "shapes":
        planned = min(shape.length for shape in policy_of(arm).planned() if shape.kind in ("prefill", "encode"))
    return min(planned, arm.engine.max_prompt_tokens)


def _lengths(longest: int) -> list[int]:
    """Return eight prompt lengths at most, halving from the longest. They are odd, as in `ExactShape.planned`."""
    return list(dict.fromkeys(max(1, (longest >> halvings) - 1 | 1) for halvings in range(8)))


def _alone(arm: ArmConfig, length: int) -> Iterator[StepShape]:
    """Yield the steps of a request that has the replica to itself: its prompt, chunk by chunk, and its first new token;
    or its text."""
    shapes, most = policy_of(arm), arm.longest_step
    if arm.model.embeds:
        yield shapes.encode(1, length)
        return
    for begun in range(0, length, most):
        yield shapes.prefill(min(most, length - begun))
    yield shapes.decode(1, length + 1)


def prompt_borders(arm: ArmConfig) -> frozenset[int]:
    """Return the lengths of prompts, in tokens, that lie on a border or just past it.

    Borders are one token, the longest prompt, the buckets, the smallest size that is not padded up, and the first
    length that is cut. A prompt of n tokens is decoded from context n + 1 on.
    """
    shapes, longest = arm.shapes, arm.engine.max_prompt_tokens
    # sizes 0 and 1 are their own to a compiler: 2 is the first that is like the others
    small = {shapes.min_size - 1, shapes.min_size, 2} if shapes.kind == "exact" else set()
    ends = {1, arm.longest_step, longest, *prefill_lengths(arm), *small}
    return frozenset(end + past for end in ends for past in (0, 1) if 1 <= end + past <= longest)
