"""What the compiler did and when: compile events and the eager canary.

The compiler tells what it does through `CompilationMetrics` (start, end, guard reason, cache) and through callbacks
around CUDA-graph recording; both are private interfaces, read in torch 2.11 to 2.13. The recorder joins them to the
step that was running, which is the step that triggered them: the device thread compiles synchronously.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch._dynamo.callback
import torch._dynamo.utils

from servers.clock import now_ns
from servers.messages import CompileEvent


@dataclass(slots=True)
class Trigger:
    """What the device thread is doing: the step that a compile event belongs to."""

    batch_id: int = -1
    shape: str = ""
    phase: str = "warmup"


class CompileRecorder:
    """Collects the compile events of this process. Install once; everything happens on the device thread."""

    def __init__(self) -> None:
        self.trigger = Trigger()
        self._events: list[CompileEvent] = []
        self._ids = itertools.count()
        self._capture_start_ns = 0
        self._fallback_is_open = False
        self._taps: list[tuple[Any, Any]] = []

    def install(self) -> None:
        """Tap the compiler's metrics and callbacks."""
        for context in (
            torch._dynamo.utils.get_metrics_context(),
            torch._dynamo.utils.get_runtime_metrics_context(),
        ):
            self._taps.append((context, context._on_exit))
            context._on_exit = self._after(context._on_exit)
        torch._dynamo.callback.on_compile_start(self._on_start)
        torch._dynamo.callback.on_compile_end(self._on_end)

    def remove(self) -> None:
        """Take the taps out again, in the reverse order of their installation."""
        for context, original in self._taps:
            context._on_exit = original
        self._taps.clear()
        torch._dynamo.callback.callback_handler.remove_start_callback(self._on_start)
        torch._dynamo.callback.callback_handler.remove_end_callback(self._on_end)

    def drain(self) -> list[CompileEvent]:
        """The events since the last call, oldest first."""
        events, self._events = self._events, []
        return events

    def record_eager_step(self, start_ns: int, end_ns: int) -> None:
        """Note that a step which should have run compiled code ran plain Python: one event per uninterrupted spell."""
        if self._fallback_is_open and self._events and self._events[-1].kind == "eager_fallback":
            self._events[-1] = replace(self._events[-1], end_ns=end_ns)
            return
        if not self._fallback_is_open:
            reason = "a step of a compiled arm ran eagerly: no compiled code fits its shape any more"
            self._add("eager_fallback", start_ns, end_ns, reason=reason)
        self._fallback_is_open = True

    def record_compiled_step(self) -> None:
        """Note that a step ran compiled code, which ends a spell of eager fallback."""
        self._fallback_is_open = False

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

    def _after(self, original: Callable[..., None]) -> Callable[..., None]:
        def on_exit(start_ns: int, end_ns: int, *rest: Any) -> None:
            original(start_ns, end_ns, *rest)
            recorded = torch._dynamo.utils.get_compilation_metrics()
            if recorded:
                self._on_metrics(end_ns - start_ns, recorded[-1])

        return on_exit

    def _on_metrics(self, duration_ns: int, metrics: Any) -> None:
        end_ns = now_ns()
        reason = metrics.recompile_reason or ""
        if metrics.is_runtime:
            autotune_us = metrics.runtime_triton_autotune_time_us
            if not autotune_us:
                return  # CUDA-graph bookkeeping; captures are recorded by the callbacks
            kind, duration_ns = "autotune", autotune_us * 1000
        elif "recompile limit" in (metrics.fail_reason or "").lower():
            kind = "limit_hit"
        elif reason:
            kind = "recompile"
        else:
            kind = "compile"
        self._add(
            kind,
            end_ns - duration_ns,
            end_ns,
            compile_id=str(metrics.compile_id or ""),
            frame=f"{metrics.co_name or ''}",
            reason=reason or metrics.fail_reason or "",
            dynamic=bool(metrics.shape_env_guard_count),
            cache=_cache_state(metrics),
            backend_ns=(metrics.aot_autograd_cumulative_compile_time_us or 0) * 1000,
        )

    def _on_start(self, args: torch._dynamo.callback.CallbackArgs) -> None:
        if args.callback_trigger is torch._dynamo.callback.CallbackTrigger.CUDAGRAPH_RECORDING:
            self._capture_start_ns = now_ns()

    def _on_end(self, args: torch._dynamo.callback.CallbackArgs) -> None:
        if args.callback_trigger is torch._dynamo.callback.CallbackTrigger.CUDAGRAPH_RECORDING:
            self._add("graph_capture", self._capture_start_ns, now_ns(), compile_id=args.compile_id)


def _cache_state(metrics: Any) -> str:
    """Whether the compiler's disk caches served the compile. A hit still costs the tracing."""
    hits = (metrics.inductor_fx_local_cache_hit_count or 0) + (metrics.aotautograd_local_cache_hit_count or 0)
    misses = (metrics.inductor_fx_local_cache_miss_count or 0) + (metrics.aotautograd_local_cache_miss_count or 0)
    if hits and not misses:
        return "hit"
    return "miss" if misses else ""


@dataclass(slots=True)
class EagerCanary:
    """Counts the steps that ran as plain Python. A compiled frame never counts: tracing drops the increment."""

    steps: int = 0
    seen: int = field(default=0, repr=False)

    def ran_eagerly(self) -> bool:
        """Whether a step ran as plain Python since the last call."""
        ran, self.seen = self.steps != self.seen, self.steps
        return ran
