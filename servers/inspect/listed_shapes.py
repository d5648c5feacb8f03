"""The shapes that an inspection runs, unpadded: as --shapes lists them, or a few that traffic brings."""

from __future__ import annotations

import re
from collections.abc import Iterator

from servers.config import ArmConfig
from servers.engine.shapes import StepShape
from servers.fields import ConfigError

NOTATION = (
    "write prefill ROWSxTOKENS, extend ROWSxTOKENS@CONTEXT or decode ROWS@CONTEXT; of an encoder encode ROWSxTOKENS"
)
_KINDS = "prefill|extend|decode|encode"
_LISTED = re.compile(rf"({_KINDS})\s+([0-9]{{1,18}})(?:\s*[x×]\s*([0-9]{{1,18}}))?(?:\s*@\s*([0-9]{{1,18}}))?")


def size_of(shape: StepShape) -> str:
    """The size of the shape as --shapes writes it: "1x128" of a prefill, "8@512" of a decode step."""
    return {
        "prefill": f"{shape.batch}x{shape.length}",
        "encode": f"{shape.batch}x{shape.length}",
        "extend": f"{shape.batch}x{shape.length}@{shape.context}",
        "decode": f"{shape.batch}@{shape.context}",
    }[shape.kind]


def listed(shape: StepShape) -> str:
    """The shape as --shapes writes it: "decode 8@512"."""
    return f"{shape.kind} {size_of(shape)}"


_WHOLE = ("prefill", "encode")  # read from the beginning, so that the context is the length


def parse_shapes(text: str, arm: ArmConfig) -> list[StepShape]:
    """The shapes in `text`, separated by commas. Raises ConfigError for what the engine can never run."""
    shapes = []
    for item in text.split(","):
        match = _LISTED.fullmatch(item.strip())
        kind = match[1] if match else ""
        if match is None or (match[3] is None) != (kind == "decode") or (match[4] is None) != (kind in _WHOLE):
            raise ConfigError(f'--shapes "{item.strip()}" is not a shape: {NOTATION}')
        batch, length = int(match[2]), int(match[3] or 1)
        shape = StepShape(kind, batch, length, int(match[4] or length))  # type: ignore[arg-type]
        _check(shape, arm)
        shapes.append(shape)
    return shapes


def _check(shape: StepShape, arm: ArmConfig) -> None:
    engine = arm.engine
    if arm.model.embeds != (shape.kind == "encode"):
        steps = "encode steps alone" if arm.model.embeds else "no encode steps"
        raise ConfigError(f'--shapes "{listed(shape)}" is not run: model.task is "{arm.model.task}", which has {steps}')
    rows, key, context = engine.prefill_batch, "engine.prefill_batch", engine.max_prompt_tokens
    if shape.kind == "decode":
        rows, key, context = engine.slots, "engine.slots", engine.longest_context
    elif shape.kind == "encode":
        rows, key = engine.slots, "engine.slots"
    shortest = 1 if shape.kind in _WHOLE else shape.length + 1
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


def unplanned_shapes(arm: ArmConfig) -> Iterator[StepShape]:
    """A few sizes that traffic brings and no ladder names, from small to the limits."""
    engine = arm.engine
    tokens, prompt, rows = engine.prefill_tokens, engine.max_prompt_tokens, engine.prefill_batch
    if arm.model.embeds:
        for batch in dict.fromkeys((1, max(1, engine.slots // 2), engine.slots)):
            for length in dict.fromkeys((1, max(1, tokens // 3), tokens)):
                yield StepShape("encode", batch, length, length)
        return
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
