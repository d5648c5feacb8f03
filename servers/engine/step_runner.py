"""StepRunner: whatever the model does, its padded steps are loaded, warmed, captured and run on the one device thread.

What a step is, which tensors it takes and what is done with its outputs, a runner of one task says: ModelRunner
(generation) and EncoderRunner (embedding).
"""

from __future__ import annotations

import logging
import resource
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from servers.clock import now_ns
from servers.compiler import artifacts
from servers.compiler import policy as compiler_policy
from servers.compiler.recorder import CompileRecorder, Trigger
from servers.compiler.regions import CompiledRegions, Selection
from servers.config import ArmConfig
from servers.engine.capture import CapturedStep, Tensors
from servers.engine.placement import product_name, resolve_device
from servers.engine.quantisation import weight_bytes
from servers.engine.scheduler import Job, Step
from servers.engine.shapes import Kind, PlannedShapes, StepShape
from servers.engine.warmup import WARMUP_CALLS, warmup_plan
from servers.fields import ConfigError

log = logging.getLogger("tailgate.runner")


class StepRunner(ABC):
    """Owns the model and its compiled steps. Every method belongs to the device thread.

    `_build` sets `model`, `device`, `overlaps` (whether a launch returns before the step is done), `vocab_size` and
    `_steps`.
    """

    shapes: PlannedShapes
    device: torch.device
    overlaps: bool
    vocab_size: int
    eos_ids: frozenset[int] = frozenset()

    def __init__(self, arm: ArmConfig, recorder: CompileRecorder) -> None:
        self.arm = arm
        self.recorder = recorder
        self.model: Any = None
        self.startup_ns: dict[str, int] = {}
        self.loaded: artifacts.Loaded | None = None  # the compiled code that the start began with
        self._steps: dict[str, Callable[..., Tensors]] = {}
        self._seen: set[StepShape] = set()
        self._graphs: dict[StepShape, CapturedStep] = {}
        self._pool: Any = None
        self._unpromised: set[Kind] = set()  # steps whose graphs may fit a part of their bounds
        self._selection = Selection(compiled={}, eager={})
        self._regions: CompiledRegions | None = None

    # what a task says

    @abstractmethod
    def _build(self) -> None:
        """Load the model and make its steps, compiled as the policy wants."""

    @abstractmethod
    def _too_large(self, why: str) -> str:
        """What to say when the device cannot hold what `_build` makes."""

    @abstractmethod
    def shape_of(self, step: Step) -> StepShape:
        """The padded shape that `step` runs at."""

    @abstractmethod
    def _inputs(self, step: Step, shape: StepShape) -> tuple[list[torch.Tensor], Tensors]:
        """(inputs that change from call to call, inputs that belong to the shape), in the order of the step."""

    @abstractmethod
    def _mark(self, kind: Kind, varying: list[torch.Tensor], fixed: Tensors) -> None:
        """Name the dimensions that vary, with their bounds, where the policy asks for it."""

    @abstractmethod
    def _ran_compiled(self) -> bool:
        """Whether what the policy compiles has run as compiled code since the last call."""

    def _warm_rest(self, report: Callable[[str], None]) -> None:  # noqa: B027 (there may be nothing)
        """Warm what the planned shapes do not; nothing by default. `report` is told what goes on."""

    def _held_bytes(self) -> dict[str, int]:
        """Bytes by owner of what the steps hold beside the weights; nothing by default."""
        return {}

    # start-up

    def load(self) -> None:
        """The model and its steps exist; nothing is compiled yet, but for what the arm's artifact brings.

        Raises ConfigError when they do not fit the device, or the artifact was not made for this arm and machine.
        """
        started_ns = now_ns()
        if self.arm.compile.artifact:
            self.loaded = artifacts.load(self.arm, resolve_device(self.arm.model.device))
            self.startup_ns["artifact"] = now_ns() - started_ns
            started_ns = now_ns()
        if self.arm.engine.threads:
            torch.set_num_threads(self.arm.engine.threads)
        # cuDNN's attention builds a plan for every new size, 40 ms and more each time. Exact shapes are new
        # at almost every step, so an eager control would pay for compiles of its own.
        torch.backends.cuda.enable_cudnn_sdp(False)
        try:
            self._build()
        except torch.OutOfMemoryError as error:
            raise ConfigError(self._too_large(str(error).splitlines()[0])) from None
        self._finish()
        self.startup_ns["load"] = now_ns() - started_ns

    def warm_up(self, report: Callable[[int, int, str], None]) -> None:
        """Run every shape that the policy can produce, on this thread, as often as graph capture needs.

        `report(done, total, detail)` is called before each shape and once at the end.
        """
        plan = warmup_plan(self.arm)
        for done, shape in enumerate(plan):
            report(done, len(plan), str(shape))
            started_ns = now_ns()
            self._warm(shape)
            self.startup_ns[str(shape)] = now_ns() - started_ns
            if self.arm.compile.capture:
                self._capture(shape)
        self._warm_rest(lambda detail: report(len(plan), len(plan), detail))
        if self._regions is not None and (uncalled := self._regions.uncalled):
            raise ConfigError(
                f"compile.regions names {uncalled[0]}, which no step of the warm-up called: name a module that the "
                "model calls"
            )
        compiler_policy.settle(self.arm.compile)
        report(len(plan), len(plan), "warm")

    def _warm(self, shape: StepShape) -> None:
        self.recorder.trigger = Trigger(shape=str(shape))
        step = filling_step(shape, self.vocab_size)
        for _ in range(WARMUP_CALLS):
            try:
                self.run(step, shape)
            except compiler_policy.UnprovenBounds as error:
                if shape.kind in self._unpromised or self.arm.compile.has_bounds:
                    raise
                # Conditions with remainders, as padded masks have them, always hold and are still not proven. The
                # warm-up runs both ends of every range: a size that needs its own graph has it before serving.
                self._unpromised.add(shape.kind)
                log.warning("%s: compiled without promised bounds: %s", shape, str(error).partition("\n")[0])
                self.run(step, shape)
            self._note_canary(shape, 0, 0)
        self._finish()

    @torch.no_grad()
    def _capture(self, shape: StepShape) -> None:
        if self.device.type != "cuda":
            self.recorder.capture_skipped(f"a CUDA graph was asked for, but the model runs on {self.device.type}")
            return
        started_ns = now_ns()
        varying, fixed = self._inputs(filling_step(shape, self.vocab_size), shape)
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        self._graphs[shape] = CapturedStep(self._steps[shape.kind], varying, fixed, self._pool)
        self._graphs[shape].compiled = self._ran_compiled()
        self._finish()
        ended_ns = now_ns()
        self.recorder.record_capture(started_ns, ended_ns)
        self.startup_ns[f"capture {shape}"] = ended_ns - started_ns

    # steps

    def is_ready(self, step: Step) -> bool:
        """Whether `step` cannot make the compiler run, so that it may be launched while finished tokens wait."""
        policy = self.arm.compile
        is_marked = policy.mark_dynamic and policy.warmup == "shapes" and not policy.has_bounds
        if not policy.enabled or policy.is_closed_once_warm:
            return True
        if is_marked and step.kind not in self._unpromised:
            return True
        return self.shape_of(step) in self._seen

    @torch.no_grad()
    def run(self, step: Step, shape: StepShape) -> Tensors:
        """Outputs of the step at its padded shape: B = shape.batch rows. Raises UnforeseenShapeError where no graph
        fits and the policy is strict."""
        varying, fixed = self._inputs(step, shape)
        self._seen.add(shape)
        graph = self._graphs.get(shape)
        if graph is not None:
            return graph(varying)
        self._mark(step.kind, varying, fixed)
        compiler_policy.begin_step(self.arm.compile)
        try:
            return self._steps[step.kind](*varying, *fixed)
        except RuntimeError as error:
            reason = compiler_policy.refusal(error) if self.arm.compile.strict else None
            if reason is None:
                raise
            raise compiler_policy.UnforeseenShapeError(
                f"no graph fits {shape} ({reason}), and compile.strict compiles nothing while serving: warm that "
                "shape, or set compile.guarded instead to run it eagerly"
            ) from None

    def device_name(self) -> str:
        """The accelerator's product name, or cpu."""
        return product_name(self.device)

    def dtype_name(self) -> str:
        """The type of the weights, "bfloat16" for example."""
        return str(self.model.dtype).removeprefix("torch.")

    def memory_bytes(self) -> dict[str, int]:
        """Return bytes by owner: weights and those of them that are quantised, what the steps hold apart from them, the
        process's peak on the host, and of a GPU the allocator's peak and what CUDA graphs hold in pools of their own.
        """
        every, quantised = weight_bytes(self.model)
        memory = {"weights": every, "quantised_weights": quantised, **self._held_bytes()}
        memory["process_peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if self.device.type == "cuda":
            memory["device_peak"] = torch.cuda.max_memory_allocated(self.device)
            segments: Any = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
            memory["graph_pools"] = sum(
                item["total_size"] for item in segments if tuple(item.get("segment_pool_id", (0, 0))) != (0, 0)
            )
        return {owner: size for owner, size in memory.items() if size}

    def _tensor(self, values: list[Any], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        if self.device.type != "cuda":
            return torch.tensor(values, dtype=dtype)
        # from pinned memory the copy does not hold this thread up
        return torch.tensor(values, dtype=dtype, pin_memory=True).to(self.device, non_blocking=True)

    def _to_host(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        if self.device.type != "cuda":
            return tokens.clone(), None
        host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
        host.copy_(tokens, non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        return host, done

    def _note_canary(self, shape: StepShape, start_ns: int, end_ns: int) -> bool:
        graph = self._graphs.get(shape)
        compiled = self._ran_compiled() if graph is None else graph.compiled
        if not self.arm.compile.enabled:
            return False
        if compiled:
            self.recorder.record_compiled_step()
        else:
            reason = "a guarded arm runs shapes that were not warmed eagerly" if self.arm.compile.guarded else ""
            self.recorder.record_eager_step(start_ns, end_ns, reason=reason)
        return compiled

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def filling_step(shape: StepShape, vocab_size: int, rng: torch.Generator | None = None) -> Step:
    """A step of fresh random prompts that fills `shape`."""
    # a decode step feeds the first output at the position after the prompt
    size = shape.context - 1 if shape.kind == "decode" else shape.context
    jobs = tuple(
        Job(
            request_id=f"{row}",
            prompt=torch.randint(vocab_size, (size,), generator=rng).tolist(),
            max_tokens=2,
            recv_ns=0,
            row=row,
            launched=2,  # the token that a decode step feeds and the one that it answers
        )
        for row in range(shape.batch)
    )
    chunks = () if shape.kind == "decode" else ((max(0, shape.context - shape.length), shape.context),) * shape.batch
    return Step(shape.kind, jobs, chunks)
