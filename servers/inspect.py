"""The graph census of an arm: which shapes find their graph ready, and which graphs there are.

`python -m servers.inspect --config ARM.json --shapes "prefill 1x128, decode 8@512"` loads and warms the arm as it would
be served, runs each shape as a step of the engine, and prints what the compiler did. No port is opened and no traffic
is needed. Exit codes: 0 no shape makes the compiler run, 99 some do, 2 cannot be configured so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import random
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from servers import stdout
from servers.clock import now_ns
from servers.compiler.events import CompileEvent, CompilerFacts
from servers.complaint import fault, one_line
from servers.config import ArmConfig, ConfigError, EngineConfig
from servers.engine.messages import startup_groups
from servers.engine.scheduler import Job, Kind, Step
from servers.engine.shapes import StepShape
from servers.engine.startup import itemised, memory_peaks, process_started_ns

EXIT_COMPILES = 99

Outcome = Literal["ready", "compile", "recompile", "capture", "limit", "guarded", "error", "off"]

# How each outcome reads, and its colour.
SHOWN: dict[Outcome, tuple[str, str]] = {
    "ready": ("ready", "green"),
    "compile": ("compiles", "bold red"),
    "recompile": ("recompiles", "bold red"),
    "capture": ("captures", "bold yellow"),
    "limit": ("eager", "bold red"),
    "guarded": ("eager, guarded", "yellow"),
    "error": ("fails", "bold red"),
    "off": ("eager", "dim"),
}
# A request that meets one of these waits, is slow without a word, or fails.
UNREADY: frozenset[Outcome] = frozenset({"compile", "recompile", "capture", "limit", "error"})

_LISTED = re.compile(r"(prefill|extend|decode)\s+([0-9]{1,18})(?:\s*[x×]\s*([0-9]{1,18}))?(?:\s*@\s*([0-9]{1,18}))?")
# A StepShape as events carry it.
_STEP_SHAPE = re.compile(r"(prefill|extend|decode) batch (\d+) × length (\d+), context (\d+)")
_NOTATION = "write prefill ROWSxTOKENS, extend ROWSxTOKENS@CONTEXT or decode ROWS@CONTEXT"


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
    def size(self) -> str:
        """Its size in the notation of --shapes."""
        return {
            "prefill": f"{self.batch}x{self.length}",
            "extend": f"{self.batch}x{self.length}@{self.context}",
            "decode": f"{self.batch}@{self.context}",
        }[self.kind]

    def __str__(self) -> str:
        return f"{self.kind} {self.size}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """What one listed shape met."""

    shape: ListedShape
    padded: ListedShape
    planned: bool
    outcome: Outcome
    reason: str
    first_s: float  # the first call, compiles included
    again_s: float  # the last call


@dataclass(frozen=True, slots=True, kw_only=True)
class Census:
    """An arm, its shapes and its graphs."""

    arm: ArmConfig
    device: str
    dtype: str
    visits: tuple[Visit, ...]
    graphs: tuple[CompileEvent, ...]  # one for each compile that ended with a graph
    facts: CompilerFacts
    memory_bytes: dict[str, int]
    startup_ns: dict[str, int]

    @property
    def unready(self) -> tuple[Visit, ...]:
        """The visits that made a request wait, run slow or fail."""
        return tuple(visit for visit in self.visits if visit.outcome in UNREADY)

    @property
    def exit_code(self) -> int:
        """0 when every shape found what it needs."""
        return EXIT_COMPILES if self.unready else 0

    def to_dict(self) -> dict[str, Any]:
        """Everything, in JSON's own types."""
        return {
            "arm": self.arm.name,
            "device": self.device,
            "dtype": self.dtype,
            "exit_code": self.exit_code,
            "unready": [str(visit.shape) for visit in self.unready],
            "shapes": [
                asdict(visit) | {"shape": str(visit.shape), "padded": visit.padded.size} for visit in self.visits
            ],
            "graphs": [
                {
                    "id": graph.compile_id,
                    "frame": graph.frame,
                    "made_for": graph.shape,
                    "dynamic": graph.dynamic,
                    "guards": graph.guards,
                    "nodes": graph.nodes,
                    "kernels": graph.kernels,
                    "breaks": list(graph.breaks),
                    "cache": graph.cache,
                    "seconds": (graph.end_ns - graph.start_ns) / 1e9,
                    "backend_s": graph.backend_ns / 1e9,
                    "autotune_s": graph.autotune_ns / 1e9,
                    "in_warmup": graph.phase == "warmup",
                    "reason": graph.reason,
                }
                for graph in self.graphs
            ],
            "graph_breaks": self.facts.graph_breaks,
            "cudagraph_skips": self.facts.cudagraph_skips,
            "memory_bytes": self.memory_bytes,
            "startup_ns": self.startup_ns,
        }


# --- Which shapes -----------------------------------------------------------------------------------------------------


def parse_shapes(text: str, engine: EngineConfig) -> list[ListedShape]:
    """The shapes in `text`, separated by commas. Raises ConfigError for what the engine can never run."""
    shapes = []
    for item in text.split(","):
        found = _LISTED.fullmatch(item.strip())
        kind = found[1] if found else ""
        if found is None or (found[3] is None) != (kind == "decode") or (found[4] is None) != (kind == "prefill"):
            raise ConfigError(f'--shapes "{item.strip()}" is not a shape: {_NOTATION}')
        batch, length = int(found[2]), int(found[3] or 1)
        shape = ListedShape(kind=kind, batch=batch, length=length, context=int(found[4] or length))  # type: ignore[arg-type]
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


# --- Running them -----------------------------------------------------------------------------------------------------


def take_census(arm: ArmConfig, shapes: Sequence[ListedShape], *, report: Callable[[str], None]) -> Census:
    """The arm is loaded, warmed as it would be served, and has run each shape; by default planned and unplanned ones.

    A shape that compiles changes what later ones meet, as it does while serving. `report` hears what goes on.
    """
    entered_ns = now_ns()
    report(f"loading {arm.model.id}")
    import torch

    from servers.compiler.recorder import CompileRecorder
    from servers.engine.runner import ModelRunner
    from servers.engine.warmup import WARMUP_CALLS, warmup_plan

    imported_ns = now_ns()
    recorder = CompileRecorder()
    recorder.install()
    try:
        runner = ModelRunner(arm, recorder)
        runner.load()
        runner.warm_up(lambda done, total, detail: report(f"warm-up {done}/{total}: {detail}"))
        startup_ns = itemised(
            runner.startup_ns,
            started_ns=process_started_ns(os.getpid()),
            entered_ns=entered_ns,
            imported_ns=imported_ns,
            ready_ns=now_ns(),
        )
        warm = recorder.drain()
        steps = warmup_plan(arm.compile, runner.shapes, longest=arm.engine.prefill_tokens)
        planned = [ListedShape.of(kind, shape) for kind, shape in steps]
        visits: list[Visit] = []
        events = list(warm)
        for number, shape in enumerate(shapes or dict.fromkeys([*planned, *unplanned_shapes(arm.engine)])):
            report(f"shape {number + 1}: {shape}")
            visit, met = _visit(runner, recorder, shape, planned, events, calls=WARMUP_CALLS)
            visits.append(visit)
            events += met
    finally:
        recorder.remove()
    segments: Any = ()
    if runner.device.type == "cuda":
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    return Census(
        arm=arm,
        device=runner.device_name(),
        dtype=str(runner.model.dtype).removeprefix("torch."),
        visits=tuple(visits),
        graphs=tuple(event for event in events if event.kind in ("compile", "recompile")),
        facts=recorder.facts,
        memory_bytes={**runner.memory_bytes(), **memory_peaks(segments)},
        startup_ns=startup_ns,
    )


def _visit(
    runner: Any,
    recorder: Any,
    shape: ListedShape,
    planned: Sequence[ListedShape],
    before: Sequence[CompileEvent],
    *,
    calls: int,
) -> tuple[Visit, list[CompileEvent]]:
    """Run the shape as often as graph capture needs. Under graph trees the second or third call records."""
    step = _step_for(shape, runner.vocab_size)
    padded = ListedShape.of(shape.kind, runner.shape_of(step))
    met: list[CompileEvent] = []
    seconds: list[float] = []
    compiled, error = True, ""
    for _ in range(calls):
        started_ns = now_ns()
        try:
            launched = runner.launch(step, 0)
            runner.collect(launched)
            compiled = launched.compiled
        except Exception as raised:  # the engine, too, fails the requests of a step and goes on
            error = f"{type(raised).__name__}: {(str(raised).splitlines() or [''])[0]}"
        seconds.append((now_ns() - started_ns) / 1e9)
        met += recorder.drain()
        if error:
            break
    outcome, reason = _outcome(runner.arm, met, before, compiled=compiled, error=error)
    visit = Visit(
        shape=shape,
        padded=padded,
        planned=padded in planned,
        outcome=outcome,
        reason=reason,
        first_s=seconds[0],
        again_s=seconds[-1],
    )
    return visit, met


def _step_for(shape: ListedShape, vocab_size: int) -> Step:
    rng = random.Random(0)
    prompt_tokens = shape.context - 1 if shape.kind == "decode" else shape.context
    jobs = tuple(
        Job(
            request_id=f"{row}",
            prompt=[rng.randrange(vocab_size) for _ in range(prompt_tokens)],
            max_tokens=2,
            recv_ns=0,
            row=row,
            launched=2,  # the token that the step feeds and the one that it answers
        )
        for row in range(shape.batch)
    )
    if shape.kind == "decode":
        return Step("decode", jobs)
    return Step(shape.kind, jobs, ((shape.context - shape.length, shape.context),) * shape.batch)


def _outcome(
    arm: ArmConfig, met: Sequence[CompileEvent], before: Sequence[CompileEvent], *, compiled: bool, error: str
) -> tuple[Outcome, str]:
    """What a shape met, and why."""
    if error:
        return "error", error
    if not arm.compile.enabled:
        return "off", ""
    if not compiled:
        limit = next((event for event in (*met, *before) if event.kind == "limit_hit"), None)
        if limit is not None:
            return "limit", f"the recompile limit was reached at {limit.shape or 'an earlier shape'}\n{limit.reason}"
        if arm.compile.guarded:
            return "guarded", "no graph fits, and compile.guarded forbids a compile while serving"
        return "limit", "part of the step runs as plain Python: see the graph breaks"
    for kind in ("recompile", "compile"):
        reasons = [event.reason for event in met if event.kind == kind]
        if reasons:
            return kind, next((reason for reason in reasons if reason), "no graph of this step was there")  # type: ignore[return-value]
    if any(event.kind == "graph_capture" for event in met):
        return "capture", "its CUDA graph was not recorded in the warm-up"
    return "ready", ""


# --- Showing them -----------------------------------------------------------------------------------------------------


def show(census: Census, console: Console) -> None:
    """The census as tables, with the verdict last."""
    arm, policy = census.arm, census.arm.compile
    asked = ["eager"]
    if policy.enabled:
        asked = [
            f"torch.compile {policy.backend}",
            policy.mode,
            f"dynamic={policy.dynamic}",
            f"warm-up {policy.warmup}",
        ]
        asked += [name for name in ("fullgraph", "regional", "capture", "guarded") if getattr(policy, name)]
    console.print(
        Text.assemble(
            (arm.name, "bold"),
            f"  {arm.model.id}, {census.dtype} on {census.device}; shapes {arm.shapes.kind}; {', '.join(asked)}",
        )
    )
    console.print(_shape_table(census.visits))
    if census.graphs:
        console.print(_graph_table(census.graphs))
    for title, counts in (
        ("graph breaks", census.facts.graph_breaks),
        ("CUDA graphs not made", census.facts.cudagraph_skips),
    ):
        shown = [f"{count} × {text}" for text, count in counts.items()] or ["none"]
        console.print(Text.assemble((f"{title}: ", "bold"), "\n  ".join(["", *shown] if len(shown) > 1 else shown)))
    memory = ", ".join(f"{name.replace('_', ' ')} {_size(size)}" for name, size in census.memory_bytes.items())
    groups = startup_groups(census.startup_ns)
    start = ", ".join(f"{name} {groups[name] / 1e9:.1f} s" for name in groups if groups[name] >= 50_000_000)
    console.print(Text.assemble(("memory: ", "bold"), memory))
    console.print(Text.assemble(("start: ", "bold"), start))
    console.print(_verdict(census))


def _shape_table(visits: Sequence[Visit]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, expand=False, padding=(0, 1), pad_edge=False)
    table.add_column("shape", no_wrap=True)
    table.add_column("padded to", no_wrap=True)
    table.add_column("planned", no_wrap=True)
    table.add_column("met", no_wrap=True)
    table.add_column("first", justify="right", no_wrap=True)
    table.add_column("again", justify="right", no_wrap=True)
    table.add_column("why", overflow="fold")
    for visit in visits:
        word, style = SHOWN[visit.outcome]
        first, _, more = visit.reason.partition("\n")
        table.add_row(
            str(visit.shape),
            Text("as it is", "dim") if visit.padded == visit.shape else visit.padded.size,
            "yes" if visit.planned else Text("no", "dim"),
            Text(word, style),
            _seconds(visit.first_s),
            _seconds(visit.again_s),
            Text(first + (f" (and {len(more.splitlines())} more)" if more else "")),
        )
    return table


def _graph_table(graphs: Sequence[CompileEvent]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, expand=False, padding=(0, 1), pad_edge=False)
    for name in ("graph", "frame", "made for", "in", "sizes"):
        table.add_column(name, no_wrap=name != "frame", overflow="fold")
    for name in ("guards", "nodes", "kernels", "breaks", "cache", "took", "backend"):
        table.add_column(name, justify="right", no_wrap=True)
    tuned = any(graph.autotune_ns for graph in graphs)
    if tuned:
        table.add_column("tuning", justify="right", no_wrap=True)
    for graph in graphs:
        table.add_row(
            graph.compile_id,
            graph.frame,
            _STEP_SHAPE.sub(_briefly, graph.shape),
            "warm-up" if graph.phase == "warmup" else Text("serving", "bold red"),
            "dynamic" if graph.dynamic else "static",
            *(f"{number or '–'}" for number in (graph.guards, graph.nodes, graph.kernels)),
            f"{len(graph.breaks)}",
            graph.cache or "–",
            _seconds((graph.end_ns - graph.start_ns) / 1e9),
            _seconds(graph.backend_ns / 1e9),
            *([_seconds(graph.autotune_ns / 1e9)] if tuned else []),
        )
    return table


def _briefly(found: re.Match[str]) -> str:
    kind, *sizes = found.groups()
    batch, length, context = map(int, sizes)
    return str(ListedShape(kind=kind, batch=batch, length=length, context=context))  # type: ignore[arg-type]


def _verdict(census: Census) -> Text:
    total = len(census.visits)
    guarded = sum(visit.outcome == "guarded" for visit in census.visits)
    aside = f" {guarded} run eagerly, as compile.guarded asks." if guarded else ""
    if not census.arm.compile.enabled:
        return Text(f"This arm compiles nothing: all {total} shapes run eagerly.", "bold")
    if not census.unready:
        return Text(f"None of the {total} shapes makes the compiler run.{aside}", "bold green")
    groups: dict[str, list[str]] = {}
    for visit in census.unready:
        groups.setdefault(SHOWN[visit.outcome][0], []).append(str(visit.shape))
    named = "; ".join(f"{word}: {', '.join(shapes)}" for word, shapes in groups.items())
    return Text(f"{len(census.unready)} of {total} shapes are not ready. {named}.{aside}", "bold red")


def _seconds(value: float) -> str:
    return f"{value * 1e3:.1f} ms" if value < 0.9995 else f"{value:.2f} s"


def _size(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} TiB"


# --- Command ----------------------------------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line of `python -m servers.inspect`."""
    parser = argparse.ArgumentParser(prog="python -m servers.inspect", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", required=True, help="the arm as JSON (ArmConfig.to_dict())")
    parser.add_argument("--shapes", default="", help=f"shapes to run, separated by commas: {_NOTATION[6:]}")
    parser.add_argument("--cache-dir", default="", help="keep compiled code here (default: nowhere)")
    parser.add_argument("--json", action="store_true", help="print one JSON object alone")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    options = parse(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    temporary = "" if options.cache_dir else tempfile.mkdtemp(prefix="tailgate-compile-")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = options.cache_dir or temporary
    try:
        try:
            arm = ArmConfig.from_dict(json.loads(Path(options.config).read_text()))
        except (OSError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"--config {options.config} cannot be read: {error}") from None
        shapes = parse_shapes(options.shapes, arm.engine) if options.shapes.strip() else []
        census = take_census(arm, shapes, report=lambda line: print(line, file=sys.stderr, flush=True))
    except ConfigError as error:
        print(f"tailgate: {one_line(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("tailgate: interrupted", file=sys.stderr)
        return 1
    except Exception as error:
        print(f"tailgate: {one_line(fault(error))}", file=sys.stderr)
        return 1
    finally:
        if temporary:
            shutil.rmtree(temporary, ignore_errors=True)
    with contextlib.suppress(BrokenPipeError):
        # A pipe has no width of its own: enough for the tables to stand in one line each.
        console = Console(width=None if stdout.is_terminal() else 160, highlight=False, emoji=False)
        with console.capture() as captured:
            show(census, console)
        words = "\n".join(line.rstrip() for line in captured.get().splitlines())
        stdout.write(words, census.to_dict(), as_json=options.json)
    return census.exit_code


if __name__ == "__main__":
    sys.exit(main())
