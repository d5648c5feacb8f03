"""The shapes that an inspection runs: as --shapes lists them, or a few that traffic brings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from servers.config import EngineConfig
from servers.engine.scheduler import Kind
from servers.engine.shapes import StepShape
from servers.fields import ConfigError

NOTATION = "write prefill ROWSxTOKENS, extend ROWSxTOKENS@CONTEXT or decode ROWS@CONTEXT"
_LISTED = re.compile(r"(prefill|extend|decode)\s+([0-9]{1,18})(?:\s*[x×]\s*([0-9]{1,18}))?(?:\s*@\s*([0-9]{1,18}))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedShape:
    """A step as traffic brings it, unpadded: `batch` rows × `length` new tokens, up to `context` positions."""

    kind: Kind
    batch: int
    length: int
    context: int

    @classmethod
    def of(cls, kind: Kind, shape: StepShape) -> ListedShape:
        """The step that fills `shape`."""
        return cls(kind=kind, batch=shape.batch, length=shape.length, context=shape.context)

    @property
    def step_shape(self) -> StepShape:
        """The size that it has without padding."""
        return StepShape(self.batch, self.length, self.context)

    @property
    def size(self) -> str:
        """Its size in the notation of --shapes."""
        return {
            "prefill": f"{self.batch}x{self.length}",
            "extend": f"{self.batch}x{self.length}@{self.context}",
            "decode": f"{self.batch}@{self.context}",
        }[self.kind]

    def __str__(self) -> str:
        return f"{self.kind} {self.size}"


def parse_shapes(text: str, engine: EngineConfig) -> list[ListedShape]:
    """The shapes in `text`, separated by commas. Raises ConfigError for what the engine can never run."""
    shapes = []
    for item in text.split(","):
        match = _LISTED.fullmatch(item.strip())
        kind = match[1] if match else ""
        if match is None or (match[3] is None) != (kind == "decode") or (match[4] is None) != (kind == "prefill"):
            raise ConfigError(f'--shapes "{item.strip()}" is not a shape: {NOTATION}')
        batch, length = int(match[2]), int(match[3] or 1)
        shape = ListedShape(kind=kind, batch=batch, length=length, context=int(match[4] or length))  # type: ignore[arg-type]
        _check(shape, engine)
        shapes.append(shape)
    return shapes


def _check(shape: ListedShape, engine: EngineConfig) -> None:
    rows = engine.slots if shape.kind == "decode" else engine.prefill_batch
    context = engine.max_length if shape.kind == "decode" else engine.max_prompt_tokens
    for value, low, high, what, key in (
        (shape.batch, 1, rows, "rows", "engine.slots" if shape.kind == "decode" else "engine.prefill_batch"),
        (shape.length, 1, engine.prefill_tokens, "tokens", "min(max_prompt_tokens, prefill_chunk)"),
        (
            shape.context,
            1 if shape.kind == "prefill" else shape.length + 1,
            context,
            "positions",
            "the engine's limits",
        ),
    ):
        if not low <= value <= high:
            raise ConfigError(
                f'--shapes "{shape}" has {value} {what}; {key} allows {low} to {high}: list another shape or change it'
            )


def unplanned_shapes(engine: EngineConfig) -> Iterator[ListedShape]:
    """A few sizes that traffic brings and no ladder names, from small to the limits."""
    tokens, prompt, rows = engine.prefill_tokens, engine.max_prompt_tokens, engine.prefill_batch
    for length in (1, max(1, tokens // 5), max(1, tokens // 2), tokens):
        yield ListedShape(kind="prefill", batch=1, length=length, context=length)
    if rows > 1:
        length = max(1, tokens // 3)
        yield ListedShape(kind="prefill", batch=rows, length=length, context=length)
    if tokens < prompt:
        yield ListedShape(kind="extend", batch=1, length=max(1, tokens // 3), context=prompt)
    longest, slots = engine.max_length, engine.slots
    for batch, context in ((1, longest // 3), (slots // 2, longest // 2), (slots, longest - 1), (slots, longest)):
        yield ListedShape(kind="decode", batch=max(1, batch), length=1, context=max(2, context))
