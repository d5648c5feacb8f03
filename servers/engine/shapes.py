"""Which tensor shapes the batcher may produce: pure integers, no tensors.

A step has a real size (rows, new tokens a row, positions attended to) and the padded size that the policy turns it
into. The fewer padded sizes there are, the fewer graphs a compiler needs; the more there are, the less is padded.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Literal, Protocol

from servers.config import EngineConfig, ShapeConfig, prefill_lengths, prompt_contexts
from servers.fields import ConfigError
from servers.ladders import default_batches

# Beginnings of prompts, later chunks of prompts, or one token a row; whole texts for an encoder.
Kind = Literal["prefill", "extend", "decode", "encode"]


@dataclass(frozen=True, slots=True)
class StepShape:
    """The size of one engine step: `batch` rows × `length` new tokens a row, attending to `context` positions."""

    kind: Kind
    batch: int
    length: int
    context: int

    def __str__(self) -> str:
        """As `tailgate inspect --shapes` takes it: "decode 8@512"."""
        return f"{self.kind} {self.size}"

    @property
    def size(self) -> str:
        """ROWSxTOKENS of prompts and texts, ROWSxTOKENS@CONTEXT of later chunks, ROWS@CONTEXT of decode steps."""
        if self.kind == "decode":
            return f"{self.batch}@{self.context}"
        return f"{self.batch}x{self.length}" + (f"@{self.context}" if self.kind == "extend" else "")

    @property
    def tokens(self) -> int:
        """Tokens the step computes, padding included."""
        return self.batch * self.length


class PlannedShapes(Protocol):
    """The shapes that a warm-up runs."""

    def is_closed(self) -> bool:
        """Whether `planned` lists all the shapes that can ever run."""

    def planned(self) -> Iterator[StepShape]:
        """The shapes to warm, in order; later chunks only where prompts are cut."""


class ShapePolicy(PlannedShapes, Protocol):
    """Turns real sizes into the sizes that run."""

    def prefill(self, batch: int, length: int) -> StepShape:
        """The shape for the beginnings of `batch` prompts, the longest of `length` tokens."""

    def extend(self, batch: int, length: int, context: int) -> StepShape:
        """The shape for later chunks of `batch` prompts, of `length` tokens at most, that end at `context`."""

    def decode(self, batch: int, context: int) -> StepShape:
        """The shape for one token on `batch` rows of which the longest holds `context` positions, the new included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactShape:
    """Shapes as they come, nothing padded, except that batch and prompt length are never smaller than `min_size`."""

    engine: EngineConfig
    min_size: int = 1

    def prefill(self, batch: int, length: int) -> StepShape:
        rows = batch if self.engine.prefill_batch == 1 else max(batch, self.min_size)
        padded = max(length, self.min_size)
        return StepShape("prefill", rows, padded, padded)

    def extend(self, batch: int, length: int, context: int) -> StepShape:
        shape = self.prefill(batch, length)
        return StepShape("extend", shape.batch, shape.length, max(context, self.min_size))

    def decode(self, batch: int, context: int) -> StepShape:
        return StepShape("decode", max(batch, self.min_size), 1, max(context, self.min_size))

    def is_closed(self) -> bool:
        return False

    def planned(self) -> Iterator[StepShape]:
        # Two sizes that differ in every free dimension: a graph that served both has no size of its own left.
        # Odd sizes on purpose: a size equal to a model dimension (head size, heads) would specialise that dimension.
        # Largest first: the compiler tunes a dynamic graph for the sizes of its first call.
        engine = self.engine
        lengths, rows = spread(engine.prefill_tokens), min(engine.prefill_batch, 2)
        for length in lengths:
            yield self.prefill(rows, length)
        if engine.prefill_batch > 2:
            yield self.prefill(engine.prefill_batch, lengths[0])
        if engine.prefill_tokens < engine.max_prompt_tokens:
            ends = spread(engine.max_prompt_tokens)
            for length, end in zip(lengths, ends, strict=False):
                yield self.extend(rows, length, max(end, length + 2))
            if engine.prefill_batch > 2:
                yield self.extend(engine.prefill_batch, lengths[0], ends[0])
        contexts = spread(engine.max_length)
        batches = sorted({self.min_size, min(3, engine.slots), engine.slots}, reverse=True)
        for position, batch in enumerate(batches):
            yield self.decode(batch, contexts[position % len(contexts)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """Each dimension is rounded up to the next step of its ladder; one-step ladders are a single padded shape."""

    batches: tuple[int, ...]
    prefill_batches: tuple[int, ...]
    lengths: tuple[int, ...]
    contexts: tuple[int, ...]
    prompt_contexts: tuple[int, ...] = ()  # where later chunks may end; empty where prompts are never cut

    def prefill(self, batch: int, length: int) -> StepShape:
        padded = round_up(length, self.lengths, "prompt", "tokens")
        return StepShape("prefill", round_up(batch, self.prefill_batches, "prefill batch", "rows"), padded, padded)

    def extend(self, batch: int, length: int, context: int) -> StepShape:
        # a later chunk is padded to the full chunk: its length is no dimension of its own in the ladder
        rows = self.prefill(batch, length).batch
        return StepShape("extend", rows, self.lengths[-1], round_up(context, self.prompt_contexts, "prompt", "tokens"))

    def decode(self, batch: int, context: int) -> StepShape:
        rows = round_up(batch, self.batches, "batch", "rows")
        return StepShape("decode", rows, 1, round_up(context, self.contexts, "context", "positions"))

    def is_closed(self) -> bool:
        return True

    def planned(self) -> Iterator[StepShape]:
        for length, batch in product(self.lengths, self.prefill_batches):
            yield StepShape("prefill", batch, length, length)
        for context, batch in product(self.prompt_contexts, self.prefill_batches):
            yield StepShape("extend", batch, self.lengths[-1], context)
        for context, batch in product(self.contexts, self.batches):
            yield StepShape("decode", batch, 1, context)


def shape_policy(shapes: ShapeConfig, engine: EngineConfig) -> ShapePolicy:
    """The policy that `shapes` asks for, with empty ladders filled from the engine's limits."""
    if shapes.kind == "exact":
        return ExactShape(engine=engine, min_size=shapes.min_size)
    is_padded = shapes.kind == "pad"
    return Buckets(
        batches=(engine.slots,) if is_padded else shapes.batch_ladder or default_batches(engine.slots),
        prefill_batches=(engine.prefill_batch,) if is_padded else default_batches(engine.prefill_batch),
        lengths=prefill_lengths(shapes, engine),
        # one step: decode attention skips the positions that a row does not hold, so padding costs it next to nothing
        contexts=tuple(
            sorted({min(step, engine.max_length) for step in shapes.context_ladder or (engine.max_length,)})
        ),
        prompt_contexts=prompt_contexts(shapes, engine),
    )


def round_up(value: int, ladder: tuple[int, ...], what: str, unit: str) -> int:
    """The first step of `ladder` that holds `value`. Raises ConfigError where none does."""
    position = bisect_left(ladder, value)
    if position == len(ladder):
        raise ConfigError(f"{what} has {value} {unit}; largest bucket is {ladder[-1]}: add a bucket of {value}")
    return ladder[position]


def spread(limit: int) -> list[int]:
    """Up to three distinct odd sizes below `limit` (or what fits), large to small."""
    return sorted({max(1, min(size | 1, limit)) for size in (limit // 7, limit // 3, limit - 2)}, reverse=True)
