"""What compilers did and when: compile events, what they could not do, and the eager canary.

torch tells of its compiles through metrics, counters, callbacks and a log, Triton through a listener, and other JITs
through `jit_compile`; `internals` reads them. The recorder joins what they tell to the step that was running, which is
the step that triggered it: the device thread compiles synchronously. What compiles on another thread delays no step and
is a `background_compile`, unless it began and ended within one step: then that step may have waited for it.

Where torch's compiler cannot be read, its public counters still show after each step whether it made a graph. Such an
event covers the whole step, and `facts.blind_spots` says what else is not seen.
"""

from __future__ import annotations

import itertools
import re
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import Any

import torch

from servers.clock import now_ns
from servers.compiler import internals, jit
from servers.compiler.events import CompileEvent, CompilerFacts, CompileUnderWay

RAN_EAGERLY = "a step of a compiled arm ran eagerly: no compiled code fits its shape any more"
COUNTED = "counted, not seen: this torch's compiler is not read, so the time is that of the whole step"

# What inductor's own kernels are compiled for. It reports the sum of its tunings in a step, not when each was.
_OF_TORCH = frozenset({"compile", "recompile", "limit_hit", "autotune"})
# What has the kernels that were compiled in it among its own. An eager step, a recording and a tuning have not.
_ENCLOSING = frozenset({"compile", "recompile", "limit_hit"})
_LONGEST_VARIANT = 400
_MOST_REASONS = 8
_SKIP = re.compile(r"^((skipping|disabling) cudagraphs? (for backward )?due to )+")
_STACK_LINE = re.compile(r'File "(.+?)", line (\d+), in (\S+)')


@dataclass(slots=True)
class Trigger:
    """What the device thread is doing since `started_ns`: the step that a compile event belongs to."""

    batch_id: int = -1
    shape: str = ""
    phase: str = "warmup"
    started_ns: int = field(default_factory=now_ns)


class CompileRecorder:
    """Collects the compile events of this process. Install once, on the device thread, where all else happens too.

    `publish` is called with all facts whenever one has changed, at the end of the compile that changed it. `announce`
    is called before each compile of the device thread begins, and when it is over.
    """

    def __init__(
        self,
        publish: Callable[[CompilerFacts], object] | None = None,
        announce: Callable[[CompileUnderWay], object] | None = None,
    ) -> None:
        self.trigger = Trigger()
        self._publish = publish
        self._announce = announce
        self._under_way: CompileUnderWay | None = None
        self._events: list[CompileEvent] = []
        self._ids = itertools.count()
        self._graph_breaks: Counter[str] = Counter()
        self._cudagraph_skips: Counter[str] = Counter()
        self._reported = 0
        self._counts: dict[str, int] = {}  # the compiler's own running counts at the last look
        self._last_break: Any = None
        self._seen_failures: dict[CodeType, tuple[list[str], int]] = {}
        self._skip_texts: list[str] = []
        self._capture_start_ns = 0
        self._fallback_is_open = False
        self._thread = 0
        self._taps = internals.Taps()
        self._is_read = False
        self._blind_spots: tuple[str, ...] = ()
        # Filled on any thread, emptied by `drain`.
        self._kernels: deque[tuple[jit.JitCompile, Trigger]] = deque()
        self._elsewhere: deque[tuple[str, dict[str, Any]]] = deque()  # what each is if its step waited for it
        self._drained_ns = 0

    def install(self) -> None:
        """Tap the compilers that a test compile is heard of. What happened before is not recorded."""
        self._thread = threading.get_ident()
        torch_spots = internals.torch_blind_spots() or internals.hear_torch()
        triton_spots = internals.triton_blind_spots() or internals.hear_triton()
        self._blind_spots = (*torch_spots, *triton_spots)
        self._is_read = not torch_spots
        self._look_at_counters()
        self._fresh_graphs()
        self._fresh_skips()
        if self._is_read:
            self._fresh_breaks()
            self._fresh_guard_failures()
            self._taps.compiles(self._on_compiled)
            self._taps.recordings(self._on_recording, self._on_recorded)
            self._taps.skipped_graphs(self._read_skip, self._count_skip)
            if self._announce is not None:
                self._taps.under_way(self._on_begin, self._on_over)
        if not triton_spots and internals.has_triton():
            self._taps.triton(self._on_kernel)
        jit.listen(self._on_kernel)
        if self._blind_spots and self._publish is not None:
            self._publish(self.facts)

    def remove(self) -> None:
        """Take the taps out again, in the reverse order of their installation."""
        jit.stop_listening(self._on_kernel)
        self._taps.remove()
        self._taps = internals.Taps()

    @property
    def facts(self) -> CompilerFacts:
        """Graph breaks and CUDA-graph skips since the installation, and what is not seen at all."""
        return CompilerFacts(
            graph_breaks=dict(self._graph_breaks),
            cudagraph_skips=dict(self._cudagraph_skips),
            blind_spots=self._blind_spots,
        )

    def drain(self) -> list[CompileEvent]:
        """The events since the last call, oldest first; to be called after each step. What ran on other threads comes
        last, without a step unless it began and ended within the one that has just run."""
        self._note_skips()  # graph trees also give up while compiled code runs, outside of any compile
        self._publish_changes()
        if not self._is_read and self._fresh_graphs():
            self._add("compile", self.trigger.started_ns, now_ns(), reason=COUNTED)
        self._add_kernels()
        is_of_step = self.trigger.started_ns >= self._drained_ns  # not of one that ended before the last call
        while self._elsewhere:
            kind, details = self._elsewhere.popleft()
            if is_of_step and details["start_ns"] >= self.trigger.started_ns:
                self._add(kind, **details)
            else:
                self._add("background_compile", trigger=Trigger(phase=self.trigger.phase), **details)
        self._drained_ns = now_ns()
        events, self._events = self._events, []
        return events

    # what the runner reports

    def record_eager_step(self, start_ns: int, end_ns: int, *, reason: str = "") -> None:
        """Note that a step which should have run compiled code ran plain Python: one event per uninterrupted spell."""
        if self._fallback_is_open and self._events and self._events[-1].kind == "eager_fallback":
            self._events[-1] = replace(self._events[-1], end_ns=end_ns)
            return
        if not self._fallback_is_open:
            self._add("eager_fallback", start_ns, end_ns, reason=reason or RAN_EAGERLY)
        self._fallback_is_open = True

    def record_compiled_step(self) -> None:
        """Note that a step ran compiled code, which ends a spell of eager fallback."""
        self._fallback_is_open = False

    def record_capture(self, start_ns: int, end_ns: int) -> None:
        """Note that the runner captured a CUDA graph of its own, of the running step."""
        self._add("graph_capture", start_ns, end_ns)

    def capture_skipped(self, reason: str) -> None:
        """Note that a CUDA graph was to be captured and could not be."""
        self._count_skip(reason)
        self._publish_changes()

    # what compilers report

    def _add(self, kind: str, start_ns: int, end_ns: int, *, trigger: Trigger | None = None, **details: Any) -> None:
        step = trigger or self.trigger
        self._events.append(
            CompileEvent(
                event_id=f"{next(self._ids)}",
                kind=kind,
                start_ns=start_ns,
                end_ns=end_ns,
                shape=step.shape,
                batch_id=step.batch_id,
                phase=step.phase,
                **details,
            )
        )

    def _on_compiled(self, compiled: internals.Compiled, duration_ns: int) -> None:
        end_ns = now_ns()
        if threading.get_ident() != self._thread:
            if not compiled.at_run:
                reason = compiled.reason or compiled.failure
                told = {"compile_id": compiled.compile_id, "frame": compiled.frame, "cache": compiled.cache}
                span = {"start_ns": end_ns - duration_ns, "end_ns": end_ns}
                kind = "limit_hit" if compiled.hit_limit else "recompile" if compiled.reason else "compile"
                self._elsewhere.append((kind, {**span, **told, "reason": reason, "backend_ns": compiled.backend_ns}))
            return
        kernels, bypassed = self._look_at_counters()
        breaks, reasons = self._fresh_breaks(), self._fresh_guard_failures()
        if compiled.at_run:
            if not compiled.tuning_ns:
                return  # CUDA-graph bookkeeping; captures are recorded by the callbacks
            kind, duration_ns = "autotune", compiled.tuning_ns
        elif compiled.hit_limit:
            kind = "limit_hit"
        else:
            if compiled.skipped:
                breaks.append(f"{compiled.skipped}: the whole frame runs eagerly: {internals.cause(compiled.failure)}")
            kind = "recompile" if compiled.reason else "compile"
        self._add(
            kind,
            end_ns - duration_ns,
            end_ns,
            compile_id=compiled.compile_id,
            frame=compiled.frame,
            reason=_joined(compiled.reason, reasons) or compiled.failure,
            dynamic=compiled.dynamic,
            cache=compiled.cache or ("bypass" if bypassed else ""),
            backend_ns=compiled.backend_ns,
            autotune_ns=0 if compiled.at_run else compiled.tuning_ns,
            guards=compiled.guards,
            nodes=compiled.nodes,
            kernels=kernels,
            breaks=tuple(breaks),
        )
        self._graph_breaks.update(breaks)
        self._note_skips()
        self._publish_changes()

    def _on_begin(self, compile_id: str, is_recording: bool) -> None:
        if self._announce is None or threading.get_ident() != self._thread:
            return  # what compiles elsewhere holds no step up
        step = self.trigger
        self._under_way = CompileUnderWay(
            kind="graph_capture" if is_recording else "compile",
            start_ns=now_ns(),
            compile_id=compile_id,
            shape=step.shape,
            batch_id=step.batch_id,
            phase=step.phase,
        )
        self._announce(self._under_way)

    def _on_over(self) -> None:
        # on whichever thread ended last: torch tells of the last of several that overlap alone
        under_way, self._under_way = self._under_way, None
        if self._announce is not None and under_way is not None:
            self._announce(replace(under_way, end_ns=now_ns()))

    def _on_kernel(self, compiled: jit.JitCompile) -> None:
        self._kernels.append((compiled, self.trigger))

    def _add_kernels(self) -> None:
        """The kernels that were compiled become events, but for those that a compile of torch made on its way."""
        if not self._kernels:
            return
        compiles = [self._kernels.popleft() for _ in range(len(self._kernels))]
        triggers = {(compiled.thread, compiled.start_ns): trigger for compiled, trigger in compiles}
        for item in jit.outermost(compiled for compiled, _ in compiles):
            middle_ns = (item.start_ns + item.end_ns) // 2
            details: dict[str, Any] = {
                "start_ns": item.start_ns,
                "end_ns": item.end_ns,
                "frame": item.place or item.kernel,
                "reason": _variant(item),
                "cache": item.cache,
                "backend_ns": item.compile_ns,
                "autotune_ns": item.end_ns - item.start_ns - item.compile_ns if item.tuned else 0,
                "kernels": item.kernels,
            }
            if item.thread != self._thread:
                self._elsewhere.append(("jit", details))
            elif not any(
                (event.kind in _ENCLOSING and event.start_ns <= middle_ns < event.end_ns)
                or (item.compiler == "inductor" and event.kind in _OF_TORCH)
                for event in self._events
            ):
                self._add("jit", trigger=triggers[item.thread, item.start_ns], **details)

    def _look_at_counters(self) -> tuple[int, int]:
        """Kernels made and caches bypassed since the last look. Kernels are generated ones and calls of libraries."""
        now = internals.counts()
        kernels = self._fresh("generated", now.kernels) + self._fresh("extern", now.library_calls)
        bypassed = self._fresh("code bypass", now.bypasses) + self._fresh("graph bypass", now.graph_bypasses)
        return kernels, bypassed

    def _fresh_graphs(self) -> int:
        """Graphs made and frames looked at since the last look."""
        return self._fresh("graphs", internals.graphs_made())

    def _fresh(self, name: str, count: int) -> int:
        """How far a running count of the compiler has moved since the last look."""
        before, self._counts[name] = self._counts.get(name, 0), count
        return count - before if count >= before else count  # the compiler was reset in between

    def _fresh_breaks(self) -> list[str]:
        """Graph breaks since the last look, as place and cause."""
        breaks = internals.graph_breaks()
        fresh = list(itertools.takewhile(lambda item: item is not self._last_break, reversed(breaks)))[::-1]
        self._last_break = breaks[-1] if breaks else None
        return [internals.break_text(item) for item in fresh]

    def _fresh_guard_failures(self) -> list[str]:
        """Why each graph that was tried since the last look did not fit. The metrics name the first alone."""
        texts: list[str] = []
        for code, failures in internals.guard_failures().items():
            before, seen = self._seen_failures.get(code, (failures, 0))
            texts += failures[seen if before is failures else 0 :]  # a reset of the compiler starts a new list
            self._seen_failures[code] = (failures, len(failures))
        return texts

    def _read_skip(self, text: str) -> None:
        if _SKIP.match(text):  # the log also warns of graphs that are captured
            self._skip_texts.append(text)

    def _note_skips(self) -> None:
        """Count the CUDA graphs that the compiler gave up on: by what its log said, or silently."""
        texts, self._skip_texts = self._skip_texts, []
        silent = self._fresh_skips() - len(texts)
        for text in texts:
            self._count_skip(_skip_cause(text))
        for _ in range(silent):
            self._count_skip("no CUDA device" if not torch.cuda.is_available() else "the graph is not on a CUDA device")

    def _fresh_skips(self) -> int:
        return self._fresh("skips", internals.cudagraph_skips())

    def _count_skip(self, reason: str) -> None:
        self._cudagraph_skips[internals.cause(reason)] += 1

    def _publish_changes(self) -> None:
        total = self._graph_breaks.total() + self._cudagraph_skips.total()
        if total != self._reported and self._publish is not None:
            self._publish(self.facts)
        self._reported = total

    def _on_recording(self) -> None:
        self._capture_start_ns = now_ns()

    def _on_recorded(self, compile_id: str) -> None:
        self._add("graph_capture", self._capture_start_ns, now_ns(), compile_id=compile_id)


def _skip_cause(text: str) -> str:
    """Why a CUDA graph was not captured, and where the compiler found the cause if it says so."""
    cause = _SKIP.sub("", text).split(". Found from")[0]
    lines = _STACK_LINE.findall(text)
    return f"{cause} at {internals.place(lines[-1][0], int(lines[-1][1]), lines[-1][2])}" if lines else cause


def _joined(reason: str, reasons: list[str]) -> str:
    """The guard failures one a line, each once, the one that the metrics name first."""
    lines = list(dict.fromkeys(" ".join(text.split()) for text in ([reason] if reason else []) + reasons if text))
    more = len(lines) - _MOST_REASONS
    return "\n".join(lines[:_MOST_REASONS] + ([f"and {more} more"] if more > 0 else []))


def _variant(item: jit.JitCompile) -> str:
    """ "triton compiled _decode for SPLITS=8, BLOCK_N=64": who compiled what, and what this variant is for."""
    done = "tuned" if item.tuned else "compiled"
    text = f"{item.compiler} {done} {item.kernel}{f' for {item.variant}' if item.variant else ''}"
    return text if len(text) <= _LONGEST_VARIANT else text[: _LONGEST_VARIANT - 1] + "…"


@dataclass(slots=True)
class EagerCanary:
    """Counts calls that ran as plain Python. Compiled code never counts: tracing drops the increment."""

    steps: int = 0
    seen: int = field(default=0, repr=False)

    def ran_eagerly(self) -> bool:
        """Whether any did since the last call."""
        ran, self.seen = self.steps != self.seen, self.steps
        return ran
