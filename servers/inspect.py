"""Which shapes of an arm find their graph ready.

`python -m tailgate.servers.inspect --config ARM.json --shapes "prefill 128, decode 8@512"` loads and warms the arm as
a server would, runs each shape as a step of the engine, and prints what the compiler did. Exit codes: 0 no shape makes
the compiler run, 99 some do, 2 cannot be configured so.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from tailgate.servers import stdout
from tailgate.servers.clock import now_ns
from tailgate.servers.complaint import ConfigError, named
from tailgate.servers.config import ArmConfig
from tailgate.servers.engine.shapes import WARMUP_CALLS, StepShape, warmup_plan
from tailgate.servers.program import (
    compile_cache,
    exit_code,
    isolate_compiler,
    log_to_stderr,
    pin_to_card,
    progress_to_stderr,
    read_arm,
)
from tailgate.servers.rpc.telemetry_pb2 import CompileEvent

if TYPE_CHECKING:
    from tailgate.servers.compiler.recorder import Compile
    from tailgate.servers.engine.encoder import EncoderRunner
    from tailgate.servers.engine.runner import ModelRunner

EXIT_COMPILES = 99
NOTATION = "write prefill TOKENS or decode ROWS@CONTEXT; of an encoder encode ROWSxTOKENS"
_SIZE = r"[0-9]{1,18}"
_LISTED = re.compile(
    rf"(?P<kind>prefill|decode|encode)\s+(?:(?P<rows>{_SIZE})\s*(?:[x×]|(?P<at>@))\s*)?(?P<size>{_SIZE})"
)
_RAN = "Torch-Compiled Region: "  # and the compile id, in a profile

# With any other outcome a request waits, runs slowly unnoticed, or fails.
READY, AS_CONFIGURED = "ready", "eager as asked"


def parse_shapes(text: str, arm: ArmConfig) -> list[StepShape]:
    """Read the shapes in `text`, separated by commas. Raises ConfigError for what the engine can never run."""
    shapes = []
    for item in text.split(","):
        match = _LISTED.fullmatch(item.strip())
        kind = match["kind"] if match else ""
        if match is None or (match["rows"] is None) != (kind == "prefill") or bool(match["at"]) != (kind == "decode"):
            raise ConfigError(f'--shapes "{item.strip()}" is not a shape: {NOTATION}')
        size = int(match["size"])
        shape = StepShape(kind, int(match["rows"] or 1), 1 if kind == "decode" else size, size)  # type: ignore[arg-type]
        _check(shape, arm)
        shapes.append(shape)
    return shapes


def _check(shape: StepShape, arm: ArmConfig) -> None:
    engine = arm.engine
    if arm.model.embeds != (shape.kind == "encode"):
        steps = "encode steps alone" if arm.model.embeds else "no encode steps"
        raise ConfigError(f'--shapes "{shape}" is not run: model.task is "{arm.model.task}", which has {steps}')
    longest = "engine.max_prompt_tokens" if arm.model.embeds else "engine.step_tokens"
    for value, low, high, what, limit in (
        (shape.batch, 1, engine.slots, "rows", "engine.slots"),
        (shape.length, 1, arm.longest_step, "tokens", longest),
        (shape.context, 2, engine.longest_context, "positions", "the engine's limits"),
    )[: 3 if shape.kind == "decode" else 2]:
        if not low <= value <= high:
            raise ConfigError(
                f'--shapes "{shape}" has {value} {what}; {limit} allows {low} to {high}: list another shape or change '
                "it"
            )


def unplanned_shapes(arm: ArmConfig) -> Iterator[StepShape]:
    """Yield a few sizes that traffic brings and no ladder names, from small to the limits."""
    engine, longest = arm.engine, arm.engine.longest_context
    lengths = (1, max(1, arm.longest_step // 3), arm.longest_step)
    if arm.model.embeds:
        yield from (StepShape("encode", batch, length, length) for batch in (1, engine.slots) for length in lengths)
        return
    yield from (StepShape("prefill", 1, length, length) for length in lengths)
    for batch in (1, engine.slots):
        for context in (max(2, longest // 3), longest):
            yield StepShape("decode", batch, 1, context)


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """What running one listed shape took."""

    shape: StepShape
    padded: StepShape
    planned: bool
    outcome: str
    reason: str
    first_s: float  # the first call, compiles included
    again_s: float  # the last call
    graphs: tuple[str, ...]  # compile ids of what it ran


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """An arm, its shapes and its graphs."""

    arm: ArmConfig
    device: str
    dtype: str
    visits: tuple[Visit, ...]
    graphs: tuple[CompileEvent, ...]  # one for each compile that ended with a graph
    contents: Mapping[str, Counter[str]]  # of each compile, by its id, where shapes are listed
    cudagraph_skips: int
    blind_spots: tuple[str, ...]

    @property
    def unready(self) -> tuple[Visit, ...]:
        """The visits that made a request wait, run slowly or fail."""
        return tuple(visit for visit in self.visits if visit.outcome not in (READY, AS_CONFIGURED))

    @property
    def graph_breaks(self) -> dict[str, int]:
        """How often each graph break was met, by place and cause."""
        return dict(Counter(text for graph in self.graphs for text in graph.breaks))

    @property
    def differences(self) -> list[dict[str, Any]]:
        """How many more of each node, guard and graph break a listed shape has than the one of its kind before it."""
        found = []
        for kind in ("prefill", "decode", "encode") if self.contents and self.arm.compile.enabled else ():
            for pair in pairwise(visit for visit in self.visits if visit.shape.kind == kind):
                old, new = (sum((self.contents[name] for name in visit.graphs), Counter[str]()) for visit in pair)
                new.subtract(old)
                shapes, graphs = [str(visit.shape) for visit in pair], [" ".join(visit.graphs) for visit in pair]
                changes = {text: more for text, more in sorted(new.items(), key=itemgetter(1)) if more and all(graphs)}
                found.append({"shapes": shapes, "graphs": graphs, "changes": changes})
        return found

    def to_dict(self) -> dict[str, Any]:
        return {
            "arm": self.arm.name,
            "device": self.device,
            "dtype": self.dtype,
            "exit_code": EXIT_COMPILES if self.unready else 0,
            "unready": [str(visit.shape) for visit in self.unready],
            "shapes": [
                asdict(visit) | {"shape": str(visit.shape), "padded": str(visit.padded)} for visit in self.visits
            ],
            "graphs": [_plain(graph) for graph in self.graphs],
            "differences": self.differences,
            "graph_breaks": self.graph_breaks,
            "cudagraph_skips": self.cudagraph_skips,
            "blind_spots": self.blind_spots,
        }


def _plain(event: CompileEvent) -> dict[str, Any]:
    values = {field.name: getattr(event, field.name) for field in event.DESCRIPTOR.fields}
    return {**values, "request_ids": list(event.request_ids), "breaks": list(event.breaks)}


def inspect_arm(arm: ArmConfig, shapes: Sequence[StepShape], *, report: Callable[[str], None]) -> Inspection:
    """Load the arm, warm it as it would be served, and run each shape; by default planned and unplanned ones. A shape
    that compiles changes the outcome of later ones, as it does while serving."""
    report(f"loading {arm.model.id}")
    from tailgate.servers.engine.in_process import warm_runner

    planned = warmup_plan(arm)
    visits: list[Visit] = []
    compiles: list[Compile] = []
    with warm_runner(arm, lambda *at: report("warm-up {}/{}: {}".format(*at)), compiles.append) as runner:
        recorder = runner.recorder
        events = recorder.drain()
        for number, shape in enumerate(shapes or dict.fromkeys([*planned, *unplanned_shapes(arm)])):
            report(f"shape {number + 1}: {shape}")
            visits.append(_visit(runner, shape, planned, events))
    return Inspection(
        arm=arm,
        device=runner.device_name(),
        dtype=runner.dtype_name(),
        visits=tuple(visits),
        graphs=tuple(event for event in events if event.kind in ("compile", "recompile")),
        contents=defaultdict(Counter, {compile.key: compile.contents() for compile in compiles if shapes}),
        cudagraph_skips=recorder.cudagraph_skips,
        blind_spots=recorder.blind_spots,
    )


def _visit(
    runner: ModelRunner | EncoderRunner, shape: StepShape, planned: Sequence[StepShape], events: list[CompileEvent]
) -> Visit:
    """Run the shape as often as graph capture needs: under graph trees the second or third call records. The compile
    events go to the end of `events`."""
    import torch

    from tailgate.servers.compiler.policy import UnforeseenShapeError
    from tailgate.servers.engine.step_runner import filling_step

    step = filling_step(shape, runner.arm, runner.vocab_size, torch.Generator().manual_seed(0))
    padded, before = runner.shape_of(step), len(events)
    seconds: list[float] = []
    compiled, failed = True, None
    while len(seconds) < WARMUP_CALLS and not failed:
        started_ns = now_ns()
        try:
            launched = runner.launch(step, 0)
            runner.collect(launched)  # type: ignore[arg-type]
            compiled = launched.compiled
        except UnforeseenShapeError as raised:
            failed = "is refused", str(raised)
        except Exception as raised:  # the engine, too, fails the requests of a step and goes on
            failed = "fails", named(raised)
        seconds.append((now_ns() - started_ns) / 1e9)
        events += runner.recorder.drain()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        if not failed:
            runner.collect(runner.launch(step, 0))  # type: ignore[arg-type]
    outcome, reason = failed or _outcome(runner.arm, events[before:], events, compiled=compiled)
    return Visit(
        shape=shape,
        padded=padded,
        planned=padded in planned,
        outcome=outcome,
        reason=reason,
        first_s=seconds[0],
        again_s=seconds[-1],
        graphs=tuple(dict.fromkeys(event.name[len(_RAN) :] for event in profile.events() if _RAN in event.name)),
    )


def _outcome(
    arm: ArmConfig, caused: Sequence[CompileEvent], events: Sequence[CompileEvent], *, compiled: bool
) -> tuple[str, str]:
    """Return the outcome of a shape whose run `caused` these of all events so far, and why."""
    kernels = [event.reason for event in caused if event.kind == "jit"]
    if not arm.compile.enabled:
        return ("compiles a kernel", kernels[0]) if kernels else (AS_CONFIGURED, "")
    if not compiled:
        limit = next((event for event in (*caused, *events) if event.kind == "limit_hit"), None)
        if limit is not None:
            return "eager", f"the recompile limit was reached at {limit.shape or 'an earlier shape'}\n{limit.reason}"
        return "eager", "part of the step runs as plain Python: see the graph breaks"
    for kind in ("recompile", "compile"):
        reasons = [event.reason for event in caused if event.kind == kind]
        if reasons:
            return f"{kind}s", next(filter(None, reasons), "no graph of this step was there")
    if kernels:
        return "compiles a kernel", kernels[0]
    if any(event.kind == "graph_capture" for event in caused):
        return "captures", "its CUDA graph was not recorded in the warm-up"
    return READY, ""


def text_of(inspection: Inspection) -> str:
    """Return the inspection for a terminal: the shapes, what was not compiled or seen, and the verdict."""
    arm, breaks = inspection.arm, inspection.graph_breaks
    policy = f"torch.compile {arm.compile.backend}, {arm.compile.mode}" if arm.compile.enabled else "eager"
    where = f"{arm.model.id}, {inspection.dtype} on {inspection.device}"
    shapes: list[tuple[str, ...]] = [("shape", "padded to", "planned", "met", "first", "again", "why")]
    shapes += [_shape_row(visit) for visit in inspection.visits]
    lines = [f"{arm.name}  {where}; shapes {arm.shapes.kind}; {policy}", "", *stdout.aligned(shapes, left=4), ""]
    took_s = sum(graph.end_ns - graph.start_ns for graph in inspection.graphs) / 1e9
    lines += [f"graphs: {len(inspection.graphs)}, made in {_seconds(took_s)}"]
    for each in inspection.differences:
        first, second = (ids or "no graph seen" for ids in each["graphs"])
        what = f"{second} instead of {first}" if second != first else f"the same, {first}"
        changes = (f"  {more:+d} {text}" for text, more in each["changes"].items())
        lines += [f"{' → '.join(each['shapes'])}: {what}", *changes]
    lines += [f"graph breaks:{'' if breaks else ' none'}", *(f"  {count} × {text}" for text, count in breaks.items())]
    if inspection.device != "cpu":
        lines += [f"CUDA graphs not made: {inspection.cudagraph_skips} (TORCH_LOGS=cudagraphs says why)"]
    lines += [f"not seen: {text}" for text in inspection.blind_spots]
    return "\n".join([*lines, _verdict(inspection)])


def _shape_row(visit: Visit) -> tuple[str, ...]:
    first, _, more = visit.reason.partition("\n")
    return (
        str(visit.shape),
        "as it is" if visit.padded == visit.shape else visit.padded.size,
        "yes" if visit.planned else "no",
        visit.outcome,
        _seconds(visit.first_s),
        _seconds(visit.again_s),
        first + (f" (and {len(more.splitlines())} more)" if more else ""),
    )


def _verdict(inspection: Inspection) -> str:
    total = len(inspection.visits)
    eager = sum(visit.outcome == AS_CONFIGURED for visit in inspection.visits)
    aside = f" {eager} run eagerly, as asked." if eager else ""
    if not inspection.unready:
        return f"None of the {total} shapes makes the compiler run.{aside}"
    listed = ", ".join(f"{visit.shape} {visit.outcome}" for visit in inspection.unready)
    return f"{len(inspection.unready)} of {total} shapes are not ready: {listed}.{aside}"


def _seconds(value: float) -> str:
    return f"{value * 1e3:.1f} ms" if value < 0.9995 else f"{value:.2f} s"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tailgate.servers.inspect")
    parser.add_argument("--config", required=True, help="the arm as JSON (ArmConfig.to_dict())")
    parser.add_argument("--shapes", default="", help=f"shapes to run, separated by commas: {NOTATION[6:]}")
    parser.add_argument("--cache-dir", default="", help="keep compiled code here (default: nowhere)")
    parser.add_argument("--json", action="store_true", help="print one JSON object alone")
    parser.add_argument("--quiet", action="store_true", help="print no progress")
    options = parser.parse_args(arguments)
    return exit_code(lambda: _inspect(options))


def _inspect(options: argparse.Namespace) -> int:
    log_to_stderr(logging.WARNING)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler would print that it starts and stops
    with compile_cache(options.cache_dir) as cache:
        arm = pin_to_card(read_arm(options.config), os.environ)
        isolate_compiler(os.environ, cache)
        shapes = parse_shapes(options.shapes, arm) if options.shapes.strip() else []
        inspection = inspect_arm(arm, shapes, report=progress_to_stderr(quiet=options.quiet))
    with contextlib.suppress(BrokenPipeError):
        stdout.write(text_of(inspection), inspection.to_dict(), as_json=options.json)
    return EXIT_COMPILES if inspection.unready else 0


if __name__ == "__main__":
    sys.exit(main())
