"""Which tensor shapes an encoder's batcher may produce: pure integers, no tensors.

A step takes whole texts, so it has two sizes, rows and tokens, and no context beside them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Protocol

from servers.config import EngineConfig, ShapeConfig, prefill_lengths
from servers.engine.shapes import PlannedShapes, StepShape, round_up, spread
from servers.ladders import default_batches


class TextShapes(PlannedShapes, Protocol):
    """Turns real sizes of a batch of texts into the sizes that run."""

    def encode(self, batch: int, length: int) -> StepShape:
        """The shape for `batch` texts, the longest of `length` tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactTexts:
    """Shapes as they come: texts are padded to the longest of their batch, and neither batch nor length is ever smaller
    than `min_size`."""

    engine: EngineConfig
    min_size: int = 1

    def encode(self, batch: int, length: int) -> StepShape:
        return _encode(max(batch, self.min_size), max(length, self.min_size))

    def is_closed(self) -> bool:
        return False

    def planned(self) -> Iterator[StepShape]:
        # As for prompts: sizes that differ in both dimensions, odd, the largest first, and both ends of the batch.
        slots = self.engine.slots
        lengths = spread(self.engine.max_prompt_tokens)
        batches = sorted({self.min_size, min(3, slots), slots}, reverse=True)
        shapes = [self.encode(batch, lengths[position % len(lengths)]) for position, batch in enumerate(batches)]
        shapes += [self.encode(batches[0], length) for length in lengths[1:]]
        yield from dict.fromkeys(shapes)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextBuckets:
    """Rows and tokens are rounded up to the next step of their ladders; one-step ladders are a single padded shape."""

    batches: tuple[int, ...]
    lengths: tuple[int, ...]

    def encode(self, batch: int, length: int) -> StepShape:
        return _encode(round_up(batch, self.batches, "batch", "rows"), round_up(length, self.lengths, "text", "tokens"))

    def is_closed(self) -> bool:
        return True

    def planned(self) -> Iterator[StepShape]:
        for length, batch in product(self.lengths, self.batches):
            yield _encode(batch, length)


def text_shapes(shapes: ShapeConfig, engine: EngineConfig) -> TextShapes:
    """The policy that `shapes` asks for, with empty ladders filled from the engine's limits."""
    if shapes.kind == "exact":
        return ExactTexts(engine=engine, min_size=shapes.min_size)
    is_padded = shapes.kind == "pad"
    return TextBuckets(
        batches=(engine.slots,) if is_padded else shapes.batch_ladder or default_batches(engine.slots),
        lengths=prefill_lengths(shapes, engine),
    )


def _encode(batch: int, length: int) -> StepShape:
    return StepShape("encode", batch, length, length)
