"""Compile policy, compile events and the eager canary. The only file that touches torch._dynamo and torch._inductor.

The compiler tells what it does through `CompilationMetrics` (start, end, guard reason, cache) and through callbacks
around CUDA-graph recording; both are private interfaces, read in torch 2.11 to 2.13. The recorder joins them to the
step that was running, which is the step that triggered them: the device thread compiles synchronously.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch._dynamo
import torch._dynamo.callback
import torch._dynamo.utils
import torch._inductor.config
from torch import nn

from servers.clock import now_ns
from servers.config import CompileConfig
from servers.messages import CompileEvent
from servers.shapes import ShapePolicy, StepShape

# Each shape runs this often in a warm-up: under CUDA graphs the first call compiles, the second warms the memory
# pool, the third records.
WARMUP_CALLS = 3


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


def configure_compiler(policy: CompileConfig, shapes: ShapePolicy) -> None:
    """Set the process-wide compiler options that the policy needs."""
    if not policy.enabled:
        return
    known = 2 * (len(list(shapes.every_prefill())) + len(list(shapes.every_decode())))
    if policy.recompile_limit:
        torch._dynamo.config.recompile_limit = policy.recompile_limit
    elif shapes.is_closed():
        # a bucket is a graph; the limit guards against unplanned shapes, not against the ladder
        torch._dynamo.config.recompile_limit = max(8, known)
    torch._dynamo.config.accumulated_recompile_limit = max(256, known, policy.recompile_limit)
    if policy.mark_dynamic:
        # Two dimensions that happen to be equal in the first batch are not one dimension.
        torch.fx.experimental._config.use_duck_shape = False  # type: ignore[attr-defined]


def compile_step(step: nn.Module, policy: CompileConfig) -> Callable[..., torch.Tensor]:
    """`step` as the policy wants it: itself when compiling is off, otherwise under torch.compile."""
    if not policy.enabled:
        return step
    # torch refuses mode together with a backend other than inductor
    mode = policy.mode if policy.backend == "inductor" and policy.mode != "default" else None
    if policy.regional:
        for block in repeated_blocks(step):
            block.compile(mode=mode, dynamic=policy.dynamic, fullgraph=policy.fullgraph, backend=policy.backend)
        return step
    compiled: Callable[..., torch.Tensor] = torch.compile(
        step, mode=mode, dynamic=policy.dynamic, fullgraph=policy.fullgraph, backend=policy.backend
    )
    return compiled


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """The layers of the longest list of like modules: a transformer's repeated blocks."""
    lists = [list(item) for item in module.modules() if isinstance(item, nn.ModuleList)]
    return max(lists, key=len, default=[])


def mark_dimension(tensor: torch.Tensor, dimension: int, *, low: int, high: int) -> None:
    """Tell the compiler that this dimension varies within low … high. A single possible size stays static."""
    if low < high and tensor.shape[dimension] >= low:
        torch._dynamo.mark_dynamic(tensor, dimension, min=low, max=high)


@contextmanager
def step_boundary(policy: CompileConfig) -> Iterator[None]:
    """Around each step: tells CUDA-graph trees that the outputs of the previous step are no longer read."""
    if policy.enabled and policy.mode in ("reduce-overhead", "max-autotune"):
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
    yield


def warmup_shapes(policy: CompileConfig, shapes: ShapePolicy) -> tuple[list[StepShape], list[StepShape]]:
    """(prefill, decode) shapes to run before serving.

    `minimal` is what an unsuspecting deployment does: one short request, then open the doors.
    """
    if policy.warmup == "minimal":
        first = shapes.prefill(1, min(5, max(shape.length for shape in shapes.every_prefill())))
        return [first], [shapes.decode(1, first.context + 1)]
    return list(shapes.every_prefill()), list(shapes.every_decode())
