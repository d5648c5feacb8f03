"""What running each shape of a warmed arm takes: a ready graph, a compile, a capture or plain Python."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from servers.clock import now_ns
from servers.compiler.events import CompileEvent, CompilerFacts
from servers.complaint import named
from servers.config import ArmConfig
from servers.engine.shapes import StepShape
from servers.engine.startup import itemised, process_started_ns
from servers.engine.warmup import WARMUP_CALLS, warmup_plan
from servers.inspect.listed_shapes import listed, size_of, unplanned_shapes

if TYPE_CHECKING:
    from servers.compiler.recorder import CompileRecorder
    from servers.engine.encoder import EncoderRunner
    from servers.engine.runner import ModelRunner

EXIT_COMPILES = 99

Outcome = Literal["ready", "compile", "recompile", "jit", "capture", "limit", "guarded", "refused", "error", "off"]

# A request with one of these outcomes waits, runs slowly unnoticed, or fails.
UNREADY: frozenset[Outcome] = frozenset({"compile", "recompile", "jit", "capture", "limit", "refused", "error"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """What running one listed shape took."""

    shape: StepShape
    padded: StepShape
    planned: bool
    outcome: Outcome
    reason: str
    first_s: float  # the first call, compiles included
    again_s: float  # the last call


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
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
        """0 when every shape was ready."""
        return EXIT_COMPILES if self.unready else 0

    def to_dict(self) -> dict[str, Any]:
        """Everything, in JSON's own types."""
        return {
            "arm": self.arm.name,
            "device": self.device,
            "dtype": self.dtype,
            "exit_code": self.exit_code,
            "unready": [listed(visit.shape) for visit in self.unready],
            "shapes": [
                asdict(visit) | {"shape": listed(visit.shape), "padded": size_of(visit.padded)} for visit in self.visits
            ],
            "graphs": [
                {
                    "id": graph.compile_id,
                    "frame": graph.frame,
                    "made_for": graph.shape,
                    "dynamic": graph.dynamic,
                    "breaks": list(graph.breaks),
                    "cache": graph.cache,
                    "seconds": (graph.end_ns - graph.start_ns) / 1e9,
                    "backend_s": graph.backend_ns / 1e9,
                    "in_warmup": graph.phase == "warmup",
                    "reason": graph.reason,
                }
                for graph in self.graphs
            ],
            "graph_breaks": self.facts.graph_breaks,
            "cudagraph_skips": self.facts.cudagraph_skips,
            "blind_spots": list(self.facts.blind_spots),
            "memory_bytes": self.memory_bytes,
            "startup_ns": self.startup_ns,
        }


def inspect_arm(arm: ArmConfig, shapes: Sequence[StepShape], *, report: Callable[[str], None]) -> Inspection:
    """The arm is loaded, warmed as it would be served, and has run each shape; by default planned and unplanned ones.

    A shape that compiles changes the outcome of later ones, as it does while serving. `report` gets progress lines.
    """
    entered_ns = now_ns()
    report(f"loading {arm.model.id}")
    from servers.compiler.recorder import CompileRecorder
    from servers.engine.runners import runner_for

    imported_ns = now_ns()
    recorder = CompileRecorder()
    recorder.install()
    runner = runner_for(arm, recorder)
    with contextlib.ExitStack() as installed:
        installed.callback(recorder.remove)
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
        planned = warmup_plan(arm)
        visits: list[Visit] = []
        events = list(warm)
        for number, shape in enumerate(shapes or dict.fromkeys([*planned, *unplanned_shapes(arm)])):
            report(f"shape {number + 1}: {listed(shape)}")
            visit, caused = _visit(runner, recorder, shape, planned, events)
            visits.append(visit)
            events += caused
    return Inspection(
        arm=arm,
        device=runner.device_name(),
        dtype=runner.dtype_name(),
        visits=tuple(visits),
        graphs=tuple(event for event in events if event.kind in ("compile", "recompile")),
        facts=recorder.facts,
        memory_bytes=runner.memory_bytes(),
        startup_ns=startup_ns,
    )


def _visit(
    runner: ModelRunner | EncoderRunner,
    recorder: CompileRecorder,
    shape: StepShape,
    planned: Sequence[StepShape],
    before: Sequence[CompileEvent],
) -> tuple[Visit, list[CompileEvent]]:
    """The shape has run as often as graph capture needs: under graph trees the second or third call records."""
    import torch

    from servers.compiler.policy import UnforeseenShapeError
    from servers.engine.step_runner import filling_step

    step = filling_step(shape, runner.vocab_size, torch.Generator().manual_seed(0))
    padded = runner.shape_of(step)
    caused: list[CompileEvent] = []
    seconds: list[float] = []
    compiled, error, refused = True, "", ""
    for _ in range(WARMUP_CALLS):
        started_ns = now_ns()
        try:
            launched = runner.launch(step, 0)
            runner.collect(launched)  # type: ignore[arg-type]
            compiled = launched.compiled
        except UnforeseenShapeError as raised:
            refused = str(raised)
        except Exception as raised:  # the engine, too, fails the requests of a step and goes on
            error = named(raised)
        seconds.append((now_ns() - started_ns) / 1e9)
        caused += recorder.drain()
        if error or refused:
            break
    outcome, reason = _outcome(runner.arm, caused, before, compiled=compiled, error=error)
    if refused:
        outcome, reason = "refused", refused
    visit = Visit(
        shape=shape,
        padded=padded,
        planned=padded in planned,
        outcome=outcome,
        reason=reason,
        first_s=seconds[0],
        again_s=seconds[-1],
    )
    return visit, caused


def _outcome(
    arm: ArmConfig, caused: Sequence[CompileEvent], before: Sequence[CompileEvent], *, compiled: bool, error: str
) -> tuple[Outcome, str]:
    """The outcome of a shape whose run `caused` these events, and why."""
    if error:
        return "error", error
    kernels = [event.reason for event in caused if event.kind == "jit"]
    if not arm.compile.enabled:
        return ("jit", kernels[0]) if kernels else ("off", "")
    if not compiled:
        limit = next((event for event in (*caused, *before) if event.kind == "limit_hit"), None)
        if limit is not None:
            return "limit", f"the recompile limit was reached at {limit.shape or 'an earlier shape'}\n{limit.reason}"
        if arm.compile.guarded:
            return "guarded", "no graph fits, and compile.guarded forbids a compile while serving"
        return "limit", "part of the step runs as plain Python: see the graph breaks"
    for kind in ("recompile", "compile"):
        reasons = [event.reason for event in caused if event.kind == kind]
        if reasons:
            return kind, next((reason for reason in reasons if reason), "no graph of this step was there")  # type: ignore[return-value]
    if kernels:
        return "jit", kernels[0]
    if any(event.kind == "graph_capture" for event in caused):
        return "capture", "its CUDA graph was not recorded in the warm-up"
    return "ready", ""
