"""What compilers did and when: compile events, what they could not do, and the eager canary.

torch reports its compiles on one stream, the logger `torch.__trace` that TORCH_TRACE and tlparse read. It costs nothing
while nothing compiles, and 2 to 14 % of a compile: torch builds all records once one is read.

A record belongs to the running step, since the device thread compiles synchronously. What compiles on another thread is
a `background_compile`, unless it began and ended within one step, which may have waited for it.

`install` checks that the stream reports a test compile. Where it does not, or a record cannot be read, `blind_spots`
says so, and torch's public counter of frames shows after each step whether it compiled: an event of the whole step.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import itertools
import json
import logging
import re
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
import torch._dynamo

from tailgate.servers.clock import now_ns
from tailgate.servers.compiler import jit
from tailgate.servers.complaint import named
from tailgate.servers.rpc.telemetry_pb2 import CompileEvent, CompileUnderWay

RAN_EAGERLY = "a step of a compiled arm ran eagerly: no compiled code fits its shape any more"
COUNTED = "counted, not seen: torch's stream of compile events is not read, so the time is that of the whole step"

_STREAM = "torch.__trace"
_RECORDING = "CUDAGraphNode.record"
_FRAMES = ("frames", "total")
_SKIPS = ("inductor", "cudagraph_skips")
# What inductor's own kernels are compiled for. It reports the sum of its tunings in a step, not when each was.
_OF_TORCH = frozenset({"compile", "recompile", "limit_hit", "autotune"})
_INDUCTORS = "inductor "
_MOST_REASONS = 8
_CACHE_STATE = re.compile(r"(fx_graph|aotautograd)_cache_(hit|miss|bypass)")
_DEBUG_CONTEXT = re.compile(r"Developer debug context: (.+)")
# "Encountered graph break when attempting to trace CALL:", before the cause.
_INTRODUCTION = re.compile(r"^.*:\n+")
# mul: "f32[s77, 8]" = torch.ops.aten.mul.Tensor(x, y); y = x[0]; z = linear.relu(); add = x + y
_NODE = re.compile(r"(?m)^ +\w+(?:: \"[^\"]*\")? = (?:(?:torch\.ops\.([\w.]+)|(?:\w+\.)*(\w+))\(|\w+(\[)|\S+ (\S+) \S)")
# | | +- TENSOR_MATCH: check_tensor(L['x'], Tensor, torch.float32, size=[2, 8], stride=[8, 1])  # y = x * 2
_GUARD = re.compile(r"(?m)^[| ]*\+- [A-Z_]+: (?:check_tensor\()?(.+?)(?:  +#.*)?$")
_CONDITION = re.compile(r",\s*(?=[\"A-Za-z_])(?![^\[]*\])")  # what one guard asks of a tensor is several
_STACK_LINE = re.compile(r'File "(.+?)", line (\d+), in (\S+)')


@dataclass(slots=True)
class Trigger:
    """What the device thread is doing since `started_ns`: the step that a compile event belongs to."""

    batch_id: int = -1
    shape: str = ""
    phase: str = "warmup"
    started_ns: int = field(default_factory=now_ns)


@dataclass(slots=True)
class Compile:
    """What the stream has reported of the compile `key` ("0/1") before its end."""

    key: str
    reasons: list[str] = field(default_factory=list)  # why each graph that was tried did not fit
    breaks: list[str] = field(default_factory=list)
    caches: dict[str, str] = field(default_factory=dict)
    graph: str = ""
    guards: str = ""

    def contents(self) -> Counter[str]:
        """Return how often each "node add", "guard 2 <= L['x'].size()[0]" and graph break occurs."""
        found = Counter(f"node {''.join(names).replace('[', 'getitem')}" for names in _NODE.findall(self.graph))
        for guard in _GUARD.findall(re.sub(r"(?<=_builtins_dict___)\d+", "", self.guards)):
            head, *parts = _CONDITION.split(guard)
            found.update([f"guard {head}: {part.removesuffix(')')}" for part in parts] or [f"guard {head}"])
        return found + Counter(f"graph break {text}" for text in self.breaks)


class CompileRecorder:
    """Collects the compile events of this process, on the device thread. `publish` is called with all blind spots when
    there is a new one, `announce` when a compile of this thread begins and when it is over, `show` with its content."""

    def __init__(
        self,
        publish: Callable[[tuple[str, ...]], object] = lambda blind_spots: None,
        announce: Callable[[CompileUnderWay], object] = lambda compile: None,
        show: Callable[[Compile], object] = lambda compile: None,
    ) -> None:
        self.trigger = Trigger()
        self._publish = publish
        self._announce = announce
        self._show = show
        self._under_way: CompileUnderWay | None = None
        self._compiles: dict[int, Compile] = {}  # by thread
        self._events: list[CompileEvent] = []
        self._ids = itertools.count()
        self.cudagraph_skips = 0  # graphs of which no CUDA graph was made since the installation
        self._counts: dict[str, int] = {}  # torch's running counts at the last comparison
        self._fallback_is_open = False
        self._thread = 0
        self._undo: list[Callable[[], object]] = []
        self._is_read = False
        self._blind_spots: list[str] = []
        self._elsewhere: deque[CompileEvent] = deque()  # of other threads: what each is if its step waited for it
        self._drained_ns = 0

    def install(self) -> None:
        """Listen to the compilers that report a test compile. What happened before is not recorded."""
        self._thread = threading.get_ident()
        self._fresh(*_SKIPS)
        self._read_torch()
        if importlib.util.find_spec("triton") is not None:
            self._read_triton()
        self._events.clear()
        self._elsewhere.clear()
        self._compiles.clear()
        self._fresh(*_FRAMES)
        self._undo.append(jit.listen(self._on_kernel))
        if self._blind_spots:
            self._publish(self.blind_spots)

    def remove(self) -> None:
        """Stop listening, in the reverse order of the installation."""
        while self._undo:
            self._undo.pop()()

    @property
    def blind_spots(self) -> tuple[str, ...]:
        """What is not seen at all, in sentences."""
        return tuple(self._blind_spots)

    def drain(self) -> list[CompileEvent]:
        """Return the events since the last call, after each step: oldest first, and last what ran on other threads."""
        self._end()  # nothing is under way after a step
        self.cudagraph_skips += self._fresh(*_SKIPS)
        if not self._is_read and self._fresh(*_FRAMES):
            start_ns = self.trigger.started_ns
            self._add(CompileEvent(kind="compile", start_ns=start_ns, end_ns=now_ns(), reason=COUNTED), self.trigger)
        if any(event.kind in _OF_TORCH for event in self._events):
            self._events = [event for event in self._events if not event.reason.startswith(_INDUCTORS)]
        is_of_step = self.trigger.started_ns >= self._drained_ns  # not of one that ended before the last call
        while self._elsewhere:
            event = self._elsewhere.popleft()
            if is_of_step and event.start_ns >= self.trigger.started_ns:
                self._add(event, self.trigger)
            else:
                event.kind = "background_compile"
                self._add(event, Trigger(phase=self.trigger.phase))
        self._drained_ns = now_ns()
        events, self._events = self._events, []
        # Numbered here: test compiles and dropped events take no number, so that a gap means a lost event.
        for event in events:
            event.event_id = f"{next(self._ids)}"
        return events

    def record_step(self, start_ns: int, end_ns: int, *, compiled: bool) -> None:
        """Note whether a step ran the compiled code that it should: one event per uninterrupted spell that did not."""
        goes_on, self._fallback_is_open = self._fallback_is_open, not compiled
        if goes_on and not compiled and self._events and self._events[-1].kind == "eager_fallback":
            self._events[-1].end_ns = end_ns
        elif not goes_on and not compiled:
            fallback = CompileEvent(kind="eager_fallback", start_ns=start_ns, end_ns=end_ns, reason=RAN_EAGERLY)
            self._add(fallback, self.trigger)

    def record_capture(self, start_ns: int, end_ns: int) -> None:
        """Note that the runner captured a CUDA graph of its own, of the running step."""
        self._add(CompileEvent(kind="graph_capture", start_ns=start_ns, end_ns=end_ns), self.trigger)

    def _read_torch(self) -> None:
        """Listen to torch, and compile a function of one line for two sizes, which takes 0.2 to 0.5 s. A blind spot
        where a compile and a recompile with its reason are not reported."""
        self._is_read, problem = True, ""
        announce, self._announce = self._announce, lambda news: begun.append(news.compile_id)
        begun: list[str] = []
        # A code of its own: the compiler keeps graphs by code, and forgets them with the function.
        code = (lambda values: values + 1).__code__.replace(co_name="self_test")
        function = FunctionType(code, {"__builtins__": builtins})
        try:
            self._listen()
            step = torch.compile(function, backend="eager", dynamic=False)
            for size in (2, 3):
                step(torch.ones(size))
        except Exception as error:  # anything that another version raises
            problem = named(error)
        self._announce, self._under_way = announce, None
        reported = [event for event in self._events if event.frame.endswith(" in self_test")]
        ids = [event.compile_id for event in reported]
        if (
            not self._blind_spots
            and [(event.kind, bool(event.reason)) for event in reported] == [("compile", False), ("recompile", True)]
            and begun == [ids[0], ids[0], ids[1], ids[1]]
        ):
            return
        what = problem or f"{len(begun)} beginnings and ends, {len(self._events)} compiles"
        self._blind_spots.append(
            f"torch {torch.__version__} does not report a test's compile and recompile ({what}): compiles are counted "
            "by its public counter alone"
        )
        self._is_read = False
        self.remove()

    def _listen(self) -> None:
        stream, enabled = logging.getLogger(_STREAM), logging.NullHandler()
        stream.addHandler(enabled)  # torch writes to the stream if it has a handler
        stream.addFilter(self._on_record)
        self._undo += [lambda: stream.removeHandler(enabled), lambda: stream.removeFilter(self._on_record)]

    def _on_record(self, record: logging.LogRecord) -> bool:
        try:
            if self._is_read:
                self._read(record.metadata, record.payload)  # type: ignore[attr-defined]
        except Exception as error:  # the compiler would fail with it
            self._is_read = False  # `drain` counts from here on, this compile included
            self._blind_spots.append(f"a record of torch {torch.__version__} cannot be read ({named(error)})")
            self._publish(self.blind_spots)
        return True

    def _read(self, metadata: Mapping[str, Any], payload: str | None) -> None:
        """Read one record: {its name: its content, "frame_id": 0, "frame_compile_id": 1, …}, and its text."""
        name = next(iter(metadata))
        if name == "dynamo_start":
            self._begin("compile", self._compile_of(metadata).key)
        elif name == "dynamo_output_graph":
            self._compile_of(metadata).graph = payload or ""
        elif name == "dynamo_cpp_guards_str":
            self._compile_of(metadata).guards = payload or ""
        elif name == "artifact" and "frame_id" in metadata:
            self._read_artifact(metadata, payload or "")
        elif name == "chromium_event" and payload is not None and _RECORDING in payload:
            self._read_recording(json.loads(payload))
        elif name == "compilation_metrics":
            compile = self._compiles.pop(threading.get_ident(), None) or Compile("")
            self._end_compile(compile, metadata[name])
        elif name == "compilation_metrics_runtime" and metadata[name]["runtime_triton_autotune_time_us"]:
            end_ns, took_us = now_ns(), metadata[name]["runtime_triton_autotune_time_us"]
            if threading.get_ident() == self._thread:
                compile_id = metadata[name]["compile_id"] or ""
                start_ns = end_ns - took_us * 1000
                tuning = CompileEvent(kind="autotune", start_ns=start_ns, end_ns=end_ns, compile_id=compile_id)
                self._add(tuning, self.trigger)

    def _compile_of(self, metadata: Mapping[str, Any]) -> Compile:
        """Return the compile of this thread that the record belongs to."""
        key, thread = f"{metadata['frame_id']}/{metadata['frame_compile_id']}", threading.get_ident()
        if thread not in self._compiles or self._compiles[thread].key != key:
            self._compiles[thread] = Compile(key)
        return self._compiles[thread]

    def _read_artifact(self, metadata: Mapping[str, Any], text: str) -> None:
        name = metadata["artifact"]["name"]
        if name == "recompile_reasons":
            self._compile_of(metadata).reasons += json.loads(text) if text.startswith("[") else [text]
        elif name == "dynamo_graph_break_reason":
            self._compile_of(metadata).breaks.append(_break(text))
        elif state := _CACHE_STATE.fullmatch(name):
            self._compile_of(metadata).caches[state[1]] = state[2]

    def _end_compile(self, compile: Compile, metrics: Mapping[str, Any]) -> None:
        end_ns, failure = now_ns(), metrics["fail_reason"] or ""
        is_recompile = bool(metrics["recompile_reason"])
        kind = "recompile" if is_recompile else "compile"
        if "recompile limit" in failure.lower():
            kind = "limit_hit"
        elif failure and not metrics["has_guarded_code"]:
            file, line = metrics["fail_user_frame_filename"], metrics["fail_user_frame_lineno"]
            where = (file, line) if file and line else (metrics["co_filename"], metrics["co_firstlineno"])
            text = f"{jit.place(*where, metrics['co_name'])}: the whole frame runs eagerly: {_cause(failure)}"
            compile.breaks.append(text)
        event = CompileEvent(
            kind=kind,
            start_ns=end_ns - (metrics["end_time_us"] - metrics["start_time_us"]) * 1000,
            end_ns=end_ns,
            compile_id=metrics["compile_id"] or "",
            frame=jit.place(metrics["co_filename"], metrics["co_firstlineno"], metrics["co_name"]),
            reason=_joined([metrics["recompile_reason"] or "", *compile.reasons]) or failure,
            dynamic='"Sym(' in compile.graph,  # an input is the symbol that it is dynamic in: s77: "Sym(s77)"
            # The cache of generated code decides where it was asked, as the backend's time goes there. A hit still
            # costs the tracing.
            cache=compile.caches.get("fx_graph") or compile.caches.get("aotautograd", ""),
            backend_ns=(metrics["aot_autograd_cumulative_compile_time_us"] or 0) * 1000,
            breaks=compile.breaks,
        )
        self._show(compile)
        if threading.get_ident() != self._thread:
            self._elsewhere.append(event)
            return
        self._add(event, self.trigger)
        self._end()

    def _read_recording(self, event: Mapping[str, Any]) -> None:
        """Read the begin or the end of a recording of the compiler's graph trees."""
        if event["name"] != _RECORDING or threading.get_ident() != self._thread:
            return
        if event["ph"] == "B":
            self._begin("graph_capture", str((event["args"] or {}).get("compile_id") or ""))
        elif (begun := self._under_way) is not None and begun.kind == "graph_capture":
            self._end()
            start_ns, compile_id = begun.start_ns, begun.compile_id
            recording = CompileEvent(kind="graph_capture", start_ns=start_ns, end_ns=now_ns(), compile_id=compile_id)
            self._add(recording, self.trigger)

    def _begin(self, kind: str, compile_id: str) -> None:
        if threading.get_ident() != self._thread:
            return  # what compiles elsewhere delays no step
        step = self.trigger
        self._under_way = CompileUnderWay(
            kind=kind,
            start_ns=now_ns(),
            compile_id=compile_id,
            shape=step.shape,
            batch_id=step.batch_id,
            phase=step.phase,
        )
        self._announce(self._under_way)

    def _end(self) -> None:
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            over = CompileUnderWay(end_ns=now_ns())
            over.MergeFrom(under_way)  # which its reader may still hold
            self._announce(over)

    def _add(self, event: CompileEvent, step: Trigger) -> None:
        event.shape, event.batch_id, event.phase = step.shape, step.batch_id, step.phase
        self._events.append(event)

    def _read_triton(self) -> None:
        """Listen to Triton, and on a GPU have it compile an empty kernel. A blind spot where that is not reported."""
        listening, problem = len(self._undo), ""
        try:
            self._undo.append(jit.watch_triton(self._on_kernel))
            if torch.cuda.is_available():
                jit.compile_empty_kernel()
                problem = "" if any(event.kind == "jit" for event in self._events) else "nothing was reported"
        except Exception as error:  # anything that another version raises
            problem = named(error)
        if not problem:
            return
        while len(self._undo) > listening:
            self._undo.pop()()
        version = getattr(importlib.import_module("triton"), "__version__", "")
        text = f"triton {version} does not report a test's compile ({problem}): its JIT compiles are not seen"
        self._blind_spots.append(text)

    def _on_kernel(self, event: CompileEvent, tuned: bool) -> None:
        """Add a kernel that this thread compiled, unless it is part of a compile of torch. A tuning replaces those
        that it compiled."""
        if threading.get_ident() != self._thread:
            self._elsewhere.append(event)
            return
        if self._under_way is not None and self._under_way.kind == "compile":
            return
        if tuned:
            self._events = [other for other in self._events if other.kind != "jit" or other.end_ns <= event.start_ns]
        self._add(event, self.trigger)

    def _fresh(self, group: str, name: str) -> int:
        """Return how far one of torch's public counters has moved since the last call."""
        count = int(torch._dynamo.utils.counters[group][name])
        before, self._counts[name] = self._counts.get(name, 0), count
        return count - before if count >= before else count  # the compiler was reset in between


def _cause(text: str) -> str:
    """Return the first line of the compiler's explanation, with its debug context if there is one."""
    first = text.strip().splitlines()[0].strip() if text.strip() else "no reason given"
    context = _DEBUG_CONTEXT.search(text)
    return jit.cut(f"{first} ({context[1].strip()})" if context else first)


def _break(text: str) -> str:
    """Return where a graph broke and why: the last line of the user's stack and the "Graph Break Reason:"."""
    explained, _, _ = text.partition("\nTraceback (most recent call last)")
    reason, _, stack = explained.partition("User code traceback:")
    lines = _STACK_LINE.findall(stack)
    where = jit.place(lines[-1][0], int(lines[-1][1]), lines[-1][2]) if lines else "an unknown place"
    cause = reason.partition("Graph Break Reason:")[2].strip()
    return f"{where}: {_cause(_INTRODUCTION.sub('', cause))}"


def _joined(reasons: list[str]) -> str:
    """Return the distinct guard failures, one a line, in the compiler's order."""
    lines = list(dict.fromkeys(" ".join(text.split()) for text in reasons if text))
    more = len(lines) - _MOST_REASONS
    return "\n".join(lines[:_MOST_REASONS] + ([f"and {more} more"] if more > 0 else []))


@dataclass(slots=True)
class EagerCanary:
    """Counts calls that ran as plain Python. Compiled code never counts: tracing drops the increment."""

    steps: int = 0
    seen: int = field(default=0, repr=False)

    def ran_eagerly(self) -> bool:
        """Return whether any step ran since the last call."""
        ran, self.seen = self.steps != self.seen, self.steps
        return ran
