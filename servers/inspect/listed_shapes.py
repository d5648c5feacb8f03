"""The shapes that an inspection runs, unpadded: as --shapes lists them, or a few that traffic brings."""

from __future__ import annotations

import re
from collections.abc import Iterator

from servers.config import EngineConfig
from servers.engine.shapes import StepShape
from servers.fields import ConfigError

NOTATION = "write prefill ROWSxTOKENS, extend ROWSxTOKENS@CONTEXT or decode ROWS@CONTEXT"
_LISTED = re.compile(r"(prefill|extend|decode)\s+([0-9]{1,18})(?:\s*[x×]\s*([0-9]{1,18}))?(?:\s*@\s*([0-9]{1,18}))?")


def size_of(shape: StepShape) -> str:
    """The size of the shape as --shapes writes it: "1x128" of a prefill, "8@512" of a decode step."""
    return {
        "prefill": f"{shape.batch}x{shape.length}",
        "extend": f"{shape.batch}x{shape.length}@{shape.context}",
        "decode": f"{shape.batch}@{shape.context}",
    }[shape.kind]


def listed(shape: StepShape) -> str:
    """The shape as --shapes writes it: "decode 8@512"."""
    return f"{shape.kind} {size_of(shape)}"


def parse_shapes(text: str, engine: EngineConfig) -> list[StepShape]:
    """The shapes in `text`, separated by commas. Raises ConfigError for what the engine can never run."""
    shapes = []
    for item in text.split(","):
        match = _LISTED.fullmatch(item.strip())
        kind = match[1] if match else ""
        if match is None or (match[3] is None) != (kind == "decode") or (match[4] is None) != (kind == "prefill"):
            raise ConfigError(f'--shapes "{item.strip()}" is not a shape: {NOTATION}')
        batch, length = int(match[2]), int(match[3] or 1)
        shape = StepShape(kind, batch, length, int(match[4] or length))  # type: ignore[arg-type]
        _check(shape, engine)
        shapes.append(shape)
    return shapes


def _check(shape: StepShape, engine: EngineConfig) -> None:
    rows, key, context = engine.prefill_batch, "engine.prefill_batch", engine.max_prompt_tokens
    if shape.kind == "decode":
        rows, key, context = engine.slots, "engine.slots", engine.longest_context
    shortest = 1 if shape.kind == "prefill" else shape.length + 1
    for value, low, high, what, limit in (
        (shape.batch, 1, rows, "rows", key),
        (shape.length, 1, engine.prefill_tokens, "tokens", "min(max_prompt_tokens, prefill_chunk)"),
        (shape.context, shortest, context, "positions", "the engine's limits"),
    ):
        if not low <= value <= high:
            raise ConfigError(
                f'--shapes "{listed(shape)}" has {value} {what}; {limit} allows {low} to {high}: '
                "list another shape or change it"
            )


def unplanned_shapes(engine: EngineConfig) -> Iterator[StepShape]:
    """A few sizes that traffic brings and no ladder names, from small to the limits."""
    tokens, prompt, rows = engine.prefill_tokens, engine.max_prompt_tokens, engine.prefill_batch
    for length in (1, max(1, tokens // 5), max(1, tokens // 2), tokens):
        yield StepShape("prefill", 1, length, length)
    if rows > 1:
        length = max(1, tokens // 3)
        yield StepShape("prefill", rows, length, length)
    if tokens < prompt:
        yield StepShape("extend", 1, max(1, tokens // 3), prompt)
    longest, slots = engine.longest_context, engine.slots
    for batch, context in ((1, longest // 3), (slots // 2, longest // 2), (slots, longest - 1), (slots, longest)):
        yield StepShape("decode", max(1, batch), 1, max(2, context))
