"""What the compiler did and when: compile events, what it could not do, and the eager canary.

The compiler shows what it does through `CompilationMetrics` (start, end, guard reason, cache, sizes), through counters
and lists (guard failures, graph breaks, CUDA-graph skips), and through callbacks around CUDA-graph recording. All are
private interfaces, read in torch 2.11 to 2.13. The recorder joins them to the step that was running, which is the step
that triggered them: the device thread compiles synchronously.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from types import CodeType
from typing import Any

import torch
from torch._dynamo import callback, utils
from torch._inductor import cudagraph_utils, output_code
from torch._inductor import metrics as inductor_metrics

from servers.clock import now_ns
from servers.compiler.events import CompileEvent, CompilerFacts

RAN_EAGERLY = "a step of a compiled arm ran eagerly: no compiled code fits its shape any more"

_LONGEST_CAUSE = 240
_MOST_REASONS = 8
# A symbol among the sizes of a traced graph is quoted, a number is not: {'x': ['s77', 8]}.
_SYMBOLIC_SIZE = re.compile(r"\[[^\]]*'")
_DEBUG_CONTEXT = re.compile(r"Developer debug context: (.+)")
_SKIP = re.compile(r"^((skipping|disabling) cudagraphs? (for backward )?due to )+")
_STACK_LINE = re.compile(r'File "(.+?)", line (\d+), in (\S+)')


@dataclass(slots=True)
class Trigger:
    """What the device thread is doing: the step that a compile event belongs to."""

    batch_id: int = -1
    shape: str = ""
    phase: str = "warmup"


class CompileRecorder:
    """Collects the compile events of this process. Install once; everything happens on the device thread.

    `publish` is called with all facts whenever one has changed, at the end of the compile that changed it.
    """

    def __init__(self, publish: Callable[[CompilerFacts], object] | None = None) -> None:
        self.trigger = Trigger()
        self._publish = publish
        self._events: list[CompileEvent] = []
        self._ids = itertools.count()
        self._graph_breaks: Counter[str] = Counter()
        self._cudagraph_skips: Counter[str] = Counter()
        self._reported = 0
        self._counts: dict[str, int] = {}  # the compiler's own running counts at the last look
        self._last_metrics: Any = None
        self._last_break: Any = None
        self._seen_failures: dict[CodeType, tuple[list[str], int]] = {}
        self._skip_texts: list[str] = []
        self._capture_start_ns = 0
        self._fallback_is_open = False
        self._taps: list[tuple[Any, str, Any]] = []

    def install(self) -> None:
        """Tap the compiler's metrics, callbacks and log of skipped graphs. What happened before is not recorded."""
        self._look_at_counters()
        self._fresh_breaks()
        self._fresh_guard_failures()
        self._fresh_skips()
        for context in (utils.get_metrics_context(), utils.get_runtime_metrics_context()):
            self._tap(context, "_on_exit", self._after_metrics(context._on_exit))
        partition = getattr(output_code, "cudagraph_partition_post_compile", None)
        if partition is not None:
            self._tap(output_code, "cudagraph_partition_post_compile", self._after_partition(partition))
        cudagraph_utils.cudagraphs_log.addFilter(self._read_skip)
        callback.on_compile_start(self._on_start)
        callback.on_compile_end(self._on_end)

    def remove(self) -> None:
        """Take the taps out again, in the reverse order of their installation."""
        while self._taps:
            owner, name, original = self._taps.pop()
            setattr(owner, name, original)
        cudagraph_utils.cudagraphs_log.removeFilter(self._read_skip)
        callbacks = callback.callback_handler
        with contextlib.suppress(ValueError):  # a reset of the compiler has dropped them
            callbacks.remove_start_callback(self._on_start)
            callbacks.remove_end_callback(self._on_end)

    @property
    def facts(self) -> CompilerFacts:
        """Graph breaks and CUDA-graph skips since the installation."""
        return CompilerFacts(graph_breaks=dict(self._graph_breaks), cudagraph_skips=dict(self._cudagraph_skips))

    def drain(self) -> list[CompileEvent]:
        """The events since the last call, oldest first."""
        self._note_skips()  # graph trees also give up while compiled code runs, outside of any compile
        self._publish_changes()
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

    # what the compiler reports

    def _add(self, kind: str, start_ns: int, end_ns: int, **details: Any) -> None:
        self._events.append(
            CompileEvent(
                event_id=f"{next(self._ids)}",
                kind=kind,
                start_ns=start_ns,
                end_ns=end_ns,
                shape=self.trigger.shape,
                batch_id=self.trigger.batch_id,
                phase=self.trigger.phase,
                **details,
            )
        )

    def _tap(self, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
        self._taps.append((owner, name, getattr(owner, name)))
        setattr(owner, name, replacement)

    def _after_metrics(self, original: Callable[..., None]) -> Callable[..., None]:
        def on_exit(start_ns: int, end_ns: int, *rest: Any) -> None:
            original(start_ns, end_ns, *rest)
            recorded = utils.get_compilation_metrics()
            if recorded and recorded[-1] is not self._last_metrics:
                self._last_metrics = recorded[-1]
                self._on_metrics(end_ns - start_ns, recorded[-1])

        return on_exit

    def _after_partition(self, original: Callable[..., None]) -> Callable[..., None]:
        def partition(example_inputs: Any, compiled_graph: Any, *rest: Any, **options: Any) -> None:
            original(example_inputs, compiled_graph, *rest, **options)
            # This path gives up without a word and without counting.
            causes = compiled_graph.cudagraph_info.cudagraph_fail_reasons
            if causes:
                self._count_skip("; ".join(causes))
            elif not compiled_graph.partition_maps:
                self._count_skip("no part of the graph can be captured")

        return partition

    def _on_metrics(self, duration_ns: int, metrics: Any) -> None:
        end_ns = now_ns()
        kernels, bypassed = self._look_at_counters()
        breaks, reasons = self._fresh_breaks(), self._fresh_guard_failures()
        reason = metrics.recompile_reason or ""
        if metrics.is_runtime:
            autotune_us = metrics.runtime_triton_autotune_time_us
            if not autotune_us:
                return  # CUDA-graph bookkeeping; captures are recorded by the callbacks
            kind, duration_ns = "autotune", autotune_us * 1000
        elif "recompile limit" in (metrics.fail_reason or "").lower():
            kind = "limit_hit"
        else:
            if metrics.fail_reason and not metrics.has_guarded_code:
                breaks.append(_skipped_frame(metrics))
            kind = "recompile" if reason else "compile"
        self._add(
            kind,
            end_ns - duration_ns,
            end_ns,
            compile_id=str(metrics.compile_id or ""),
            frame=_place(metrics.co_filename, metrics.co_firstlineno, metrics.co_name),
            reason=_joined(reason, reasons) or metrics.fail_reason or "",
            dynamic=_is_dynamic(metrics),
            cache=_cache_state(metrics, bypassed),
            backend_ns=(metrics.aot_autograd_cumulative_compile_time_us or 0) * 1000,
            autotune_ns=(metrics.compile_time_autotune_time_us or 0) * 1000,
            guards=metrics.guard_count or 0,
            nodes=metrics.graph_node_count or 0,
            kernels=kernels,
            breaks=tuple(breaks),
        )
        self._graph_breaks.update(breaks)
        self._note_skips()
        self._publish_changes()

    def _look_at_counters(self) -> tuple[int, int]:
        """Kernels made and caches bypassed since the last look. Kernels are generated ones and calls of libraries."""
        counters = utils.counters
        kernels = self._fresh("generated", inductor_metrics.generated_kernel_count)
        kernels += self._fresh("extern", counters["inductor"]["extern_calls"])
        bypassed = self._fresh("code bypass", counters["inductor"]["fxgraph_cache_bypass"])
        bypassed += self._fresh("graph bypass", counters["aot_autograd"]["autograd_cache_bypass"])
        return kernels, bypassed

    def _fresh(self, name: str, count: int) -> int:
        """How far a running count of the compiler has moved since the last look."""
        before, self._counts[name] = self._counts.get(name, 0), count
        return count - before if count >= before else count  # the compiler was reset in between

    def _fresh_breaks(self) -> list[str]:
        """Graph breaks since the last look, as place and cause."""
        breaks = utils.graph_break_reasons
        fresh = list(itertools.takewhile(lambda item: item is not self._last_break, reversed(breaks)))[::-1]
        self._last_break = breaks[-1] if breaks else None
        texts = []
        for item in fresh:
            where = item.user_stack[-1] if item.user_stack else None
            place = _place(where.filename, where.lineno, where.name) if where is not None else "an unknown place"
            texts.append(f"{place}: {_cause(item.reason)}")
        return texts

    def _fresh_guard_failures(self) -> list[str]:
        """Why each graph that was tried since the last look did not fit. The metrics name the first alone."""
        texts: list[str] = []
        for code, failures in utils.guard_failures.items():
            before, seen = self._seen_failures.get(code, (failures, 0))
            texts += failures[seen if before is failures else 0 :]  # a reset of the compiler starts a new list
            self._seen_failures[code] = (failures, len(failures))
        return texts

    def _read_skip(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if _SKIP.match(text):  # the log also warns of graphs that are captured
            self._skip_texts.append(text)
        return True

    def _note_skips(self) -> None:
        """Count the CUDA graphs that the compiler gave up on: by what its log said, or silently."""
        texts, self._skip_texts = self._skip_texts, []
        silent = self._fresh_skips() - len(texts)
        for text in texts:
            self._count_skip(_skip_cause(text))
        for _ in range(silent):
            self._count_skip("no CUDA device" if not torch.cuda.is_available() else "the graph is not on a CUDA device")

    def _fresh_skips(self) -> int:
        return self._fresh("skips", utils.counters["inductor"]["cudagraph_skips"])

    def _count_skip(self, reason: str) -> None:
        self._cudagraph_skips[_cause(reason)] += 1

    def _publish_changes(self) -> None:
        total = self._graph_breaks.total() + self._cudagraph_skips.total()
        if total != self._reported and self._publish is not None:
            self._publish(self.facts)
        self._reported = total

    def _on_start(self, args: callback.CallbackArgs) -> None:
        if args.callback_trigger is callback.CallbackTrigger.CUDAGRAPH_RECORDING:
            self._capture_start_ns = now_ns()

    def _on_end(self, args: callback.CallbackArgs) -> None:
        if args.callback_trigger is callback.CallbackTrigger.CUDAGRAPH_RECORDING:
            self._add("graph_capture", self._capture_start_ns, now_ns(), compile_id=args.compile_id)


def _place(filename: str | None, line: int | None, function: str | None) -> str:
    """ "models/llama/modeling_llama.py:300 in forward": the path below site-packages, or its last two parts."""
    if not filename:
        return f"an unknown place in {function}" if function else ""
    _, packages, inside = filename.rpartition("site-packages/")
    shown = inside if packages else "/".join(PurePath(filename).parts[-2:])
    return f"{shown}:{line} in {function}"


def _cause(text: str) -> str:
    """The first line of the compiler's explanation, with what it was about where the explanation says so."""
    first = text.strip().splitlines()[0].strip() if text.strip() else "no reason given"
    context = _DEBUG_CONTEXT.search(text)
    shown = f"{first} ({context[1].strip()})" if context else first
    return shown if len(shown) <= _LONGEST_CAUSE else shown[: _LONGEST_CAUSE - 1] + "…"


def _skip_cause(text: str) -> str:
    """Why a CUDA graph was not captured, and where the compiler found the cause if it says so."""
    cause = _SKIP.sub("", text).split(". Found from")[0]
    lines = _STACK_LINE.findall(text)
    return f"{cause} at {_place(lines[-1][0], int(lines[-1][1]), lines[-1][2])}" if lines else cause


def _skipped_frame(metrics: Any) -> str:
    place = _place(
        metrics.fail_user_frame_filename or metrics.co_filename,
        metrics.fail_user_frame_lineno or metrics.co_firstlineno,
        metrics.co_name,
    )
    return f"{place}: the whole frame runs eagerly: {_cause(metrics.fail_reason)}"


def _joined(reason: str, reasons: list[str]) -> str:
    """The guard failures one a line, each once, the one that the metrics name first."""
    lines = list(dict.fromkeys(" ".join(text.split()) for text in ([reason] if reason else []) + reasons if text))
    more = len(lines) - _MOST_REASONS
    return "\n".join(lines[:_MOST_REASONS] + ([f"and {more} more"] if more > 0 else []))


def _is_dynamic(metrics: Any) -> bool:
    """Whether a size of the graph is a symbol. A dynamic graph need not have a guard on one."""
    if metrics.graph_node_shapes:
        return _SYMBOLIC_SIZE.search(metrics.graph_node_shapes) is not None
    return bool(metrics.shape_env_guard_count)


def _cache_state(metrics: Any, bypassed: int) -> str:
    """Whether the disk caches served the compile; empty where none was consulted. A hit still costs the tracing.

    The cache of generated code decides where it was consulted, as the backend's time goes there.
    """
    for cache in ("inductor_fx_local_cache", "aotautograd_local_cache"):
        if getattr(metrics, f"{cache}_miss_count", 0):
            return "miss"
        if getattr(metrics, f"{cache}_hit_count", 0):
            return "hit"
    return "bypass" if bypassed else ""


@dataclass(slots=True)
class EagerCanary:
    """Counts calls that ran as plain Python. Compiled code never counts: tracing drops the increment."""

    steps: int = 0
    seen: int = field(default=0, repr=False)

    def ran_eagerly(self) -> bool:
        """Whether any did since the last call."""
        ran, self.seen = self.steps != self.seen, self.steps
        return ran
