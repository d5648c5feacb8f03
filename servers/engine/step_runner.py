"""StepRunner: padded steps are loaded, warmed, captured and run on the one device thread, whatever the model's task.

Every arm runs the same steps; the shape policy decides their sizes and the compile policy whether they are compiled.
"""

from __future__ import annotations

import gc
import logging
import resource
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from tailgate.servers.clock import now_ns
from tailgate.servers.compiler import artifacts
from tailgate.servers.compiler import policy as compiler_policy
from tailgate.servers.compiler.recorder import CompileRecorder, EagerCanary, Trigger
from tailgate.servers.compiler.regions import CompiledBlocks, repeated_blocks
from tailgate.servers.complaint import ConfigError
from tailgate.servers.config import GRAPH_TREE_MODES, MOST_PROMPTS, ArmConfig
from tailgate.servers.engine.kv_cache import SlotCache
from tailgate.servers.engine.model import join_weights, load_model
from tailgate.servers.engine.placement import product_name, resolve_device
from tailgate.servers.engine.quantisation import weight_bytes
from tailgate.servers.engine.scheduler import Job, LaunchedStep, Step
from tailgate.servers.engine.shapes import WARMUP_CALLS, Kind, StepShape, policy_of, warmup_plan

log = logging.getLogger("tailgate.runner")

Tensors = tuple[torch.Tensor, ...]


@contextmanager
def uncollected() -> Iterator[None]:
    """Collect no garbage inside: what is destroyed may call the driver, which breaks a recording. torch itself has not
    collected before one since 2.9 (github.com/pytorch/pytorch/pull/161037)."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class CapturedStep:
    """`call(*varying, *fixed)` as one CUDA graph, recorded once and replayed with new inputs: neither a guard nor the
    compiler runs while serving. Its outputs are overwritten by the next replay of any graph in the pool.
    """

    def __init__(self, call: Callable[..., Any], varying: Sequence[torch.Tensor], fixed: Tensors, pool: Any) -> None:
        self.compiled = True  # whether what was recorded is compiled code
        self._inputs = [tensor.clone() for tensor in varying]
        self._fixed = fixed  # the graph reads their memory
        self._graph = torch.cuda.CUDAGraph()
        # "thread_local": the threads that move messages may not break a capture
        graph = torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local")
        with uncollected(), graph:
            self._outputs: Tensors = call(*self._inputs, *fixed)

    def __call__(self, varying: Sequence[torch.Tensor]) -> Tensors:
        """Return the outputs for `varying`, which have the shapes of the capture."""
        torch._foreach_copy_(self._inputs, list(varying))
        self._graph.replay()
        return self._outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceStep(LaunchedStep):
    """A launched step, and where its results will be once `done` has happened (at once when None)."""

    places: Sequence[int]  # which row of `results` belongs to each job
    results: torch.Tensor  # on the host: tokens [B], or vectors [B, width]
    done: torch.cuda.Event | None


class StepRunner(ABC):
    """Owns the model and its compiled steps. Every method belongs to the device thread.

    With CUDA graphs (`overlaps`) the next step is launched before the results of the last have come back. Without them
    a launch takes as long as most steps, which a second step in flight would add to the latency of the first.
    """

    device: torch.device
    overlaps: bool
    vocab_size: int
    eos_ids: frozenset[int] = frozenset()

    def __init__(self, arm: ArmConfig, recorder: CompileRecorder) -> None:
        self.arm = arm
        self.recorder = recorder
        self.shapes = policy_of(arm)
        self.model: Any = None
        self.startup_ns: dict[str, int] = {}
        self.loaded: artifacts.Artifact | None = None  # the compiled code that the start began with
        self.cache: SlotCache | None = None
        self._steps: dict[str, Callable[..., Tensors]] = {}
        self._canary = EagerCanary()  # counts what compiled code must not run as plain Python
        self._seen: set[StepShape] = set()
        self._graphs: dict[StepShape, CapturedStep] = {}
        self._pool: Any = None
        self._unpromised: set[Kind] = set()  # steps whose graphs may fit a part of their bounds
        self._blocks: CompiledBlocks | None = None

    @abstractmethod
    def _make_steps(self) -> Mapping[str, Callable[..., Tensors]]:
        """Make the steps of the loaded model by kind, not compiled yet, and set `_canary`."""

    @abstractmethod
    def _inputs(self, step: Step, shape: StepShape) -> tuple[list[torch.Tensor], Tensors]:
        """Return (inputs that change from call to call, inputs that belong to the shape), in the order of the step."""

    @abstractmethod
    def _varying(
        self, kind: Kind, varying: list[torch.Tensor], fixed: Tensors
    ) -> Iterable[tuple[torch.Tensor, int, tuple[int, int]]]:
        """Yield (tensor, dimension, bounds) of what varies between steps of the kind."""

    @abstractmethod
    def _answer(self, step: Step, shape: StepShape, places: Sequence[int]) -> torch.Tensor:
        """Run the step; returns its results on the device, those of a job in the row that `places` says."""

    @abstractmethod
    def _results(self, results: torch.Tensor, places: Sequence[int]) -> list[Any]:
        """Return the result of each job from those on the host."""

    def _warm_rest(self) -> None:  # noqa: B027 (there may be nothing)
        """Warm what the planned shapes do not; nothing by default."""

    def load(self) -> None:
        """Load the model and make its steps; nothing is compiled yet, except for what the arm's artifact brings.

        Raises ConfigError when they do not fit the device, or the artifact was not made for this arm and machine.
        """
        if self.arm.compile.artifact:
            with self._timed("artifact"):
                self.loaded = artifacts.load(self.arm, str(resolve_device(self.arm.model.device)))
        if self.arm.engine.threads:
            torch.set_num_threads(self.arm.engine.threads)
        # cuDNN's attention builds a plan for every new size, 40 ms and more each time. Exact shapes are new
        # at almost every step, so an eager control would pay for compiles of its own.
        torch.backends.cuda.enable_cudnn_sdp(False)
        try:
            with self._timed("load"):
                self._build()
        except torch.OutOfMemoryError as error:
            engine, why = self.arm.engine, str(error).splitlines()[0]
            raise ConfigError(
                f"the model and {engine.slots} slots of {engine.max_length} positions do not fit the device ({why}): "
                "lower engine.slots, max_prompt_tokens or max_new_tokens, or set model.dtype = bfloat16"
            ) from None

    def _build(self) -> None:
        policy = self.arm.compile
        self.model = load_model(self.arm.model)
        self.device = next(self.model.parameters()).device
        has_trees = policy.enabled and policy.mode in GRAPH_TREE_MODES
        self.overlaps = self.device.type == "cuda" and (policy.capture or has_trees)
        self.vocab_size = int(self.model.config.get_text_config().vocab_size)
        if policy.join_projections:
            join_weights(self.model)
        blocks = repeated_blocks(self.model) if policy.regional else ()
        compiler_policy.configure_compiler(
            policy,
            planned_shapes=len(list(self.shapes.planned())),
            closed=self.shapes.is_closed(),
            regions=len(blocks) or 1,
        )
        self._steps = dict(self._make_steps())
        if blocks:
            self._blocks = CompiledBlocks(blocks, policy, cache=self.cache)
        else:
            self._steps = {kind: compiler_policy.compile_step(step, policy) for kind, step in self._steps.items()}
        self._ran_compiled()

    def warm_up(self, report: Callable[[int, int, str], None]) -> None:
        """Run every shape that the policy can produce, on this thread, as often as graph capture needs.

        `report(done, total, detail)` is called before each shape and once at the end.
        """
        plan = warmup_plan(self.arm)
        for done, shape in enumerate(plan):
            report(done, len(plan), str(shape))
            with self._timed(str(shape)):
                self._warm(shape)
            if self.arm.compile.capture:
                self._capture(shape)
        self._warm_rest()
        if self.arm.compile.strict:
            torch.compiler.set_stance("fail_on_recompile")  # `run` reads its errors
        report(len(plan), len(plan), "warm")

    def _warm(self, shape: StepShape) -> None:
        self.recorder.trigger = Trigger(shape=str(shape))
        step = filling_step(shape, self.arm, self.vocab_size)
        for _ in range(WARMUP_CALLS):
            try:
                self.run(step, shape)
            except compiler_policy.UnprovenBounds as error:
                if shape.kind in self._unpromised:
                    raise
                # Conditions with remainders, as padded masks have them, always hold and are still not proven. The
                # warm-up runs both ends of every range: a size that needs its own graph has it before serving.
                self._unpromised.add(shape.kind)
                log.warning("%s: compiled without promised bounds: %s", shape, str(error).partition("\n")[0])
                self.run(step, shape)
            self._note_canary(shape, 0, 0)

    @torch.no_grad()
    def _capture(self, shape: StepShape) -> None:
        if self.device.type != "cuda":
            self.recorder.cudagraph_skips += 1
            return
        started_ns = now_ns()
        with self._timed(f"capture {shape}"):
            varying, fixed = self._inputs(filling_step(shape, self.arm, self.vocab_size), shape)
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            self._graphs[shape] = CapturedStep(self._steps[shape.kind], varying, fixed, self._pool)
            self._graphs[shape].compiled = self._ran_compiled()
        self.recorder.record_capture(started_ns, now_ns())

    def shape_of(self, step: Step) -> StepShape:
        """Return the padded shape that `step` runs at."""
        if step.kind == "decode":
            return self.shapes.decode(step.decoding_rows, max(job.context for job in step.decoding) - 1)
        tokens = [stop - start for start, stop in step.chunks]
        if step.kind == "encode":
            return self.shapes.encode(len(tokens), max(tokens))
        return self.shapes.prefill(step.decoding_rows + sum(tokens))

    def has_graph(self, step: Step) -> bool:
        """Return whether a recorded CUDA graph launches `step` as a whole, fast and without the compiler."""
        shape = self.shape_of(step)
        return shape in self._graphs or (shape in self._seen and not self.arm.compile.capture)

    def launch(self, step: Step, batch_id: int) -> DeviceStep:
        """Start `step`; its jobs' rows are set. Errors of the device may show here or in `collect`."""
        shape = self.shape_of(step)
        self.recorder.trigger = Trigger(batch_id=batch_id, shape=str(shape), phase="serving")
        started_ns = now_ns()
        places = range(len(step.jobs)) if step.kind == "encode" else [job.row for job in step.jobs]
        try:
            host, done = self._to_host(self._answer(step, shape, places))
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            raise
        ends = (stop == len(job.prompt) for job, (_, stop) in zip(step.prompts, step.chunks, strict=True))
        return DeviceStep(
            step=step,
            answers=(*(True for _ in step.decoding), *ends),
            shape=shape,
            real_tokens=len(step.decoding) + sum(stop - start for start, stop in step.chunks),
            batch_id=batch_id,
            start_ns=started_ns,
            compiled=self._note_canary(shape, started_ns, now_ns()),
            places=places,
            results=host,
            done=done,
        )

    def collect(self, launched: DeviceStep) -> list[Any]:
        """Return the result of each job of `launched`, once the device has it."""
        if launched.done is not None:
            launched.done.synchronize()
        return self._results(launched.results, launched.places)

    @torch.no_grad()
    def run(self, step: Step, shape: StepShape) -> Tensors:
        """Return the outputs of the step at its padded shape: B = shape.batch rows. Raises UnforeseenShapeError where
        no graph fits and the policy is strict, ConfigError where the backend fails."""
        varying, fixed = self._inputs(step, shape)
        self._seen.add(shape)
        graph = self._graphs.get(shape)
        if graph is not None:
            return graph(varying)
        if self.arm.compile.mark_dynamic:
            promised = step.kind not in self._unpromised
            for tensor, dimension, bounds in self._varying(step.kind, varying, fixed):
                compiler_policy.mark_dimension(tensor, dimension, bounds, promised=promised)
        if self.arm.compile.enabled and self.arm.compile.mode in GRAPH_TREE_MODES:
            # the outputs of the step before are no longer read
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        try:
            return self._steps[step.kind](*varying, *fixed)
        except compiler_policy.BackendError as error:
            log.exception("%s: the compile failed", shape)
            raise compiler_policy.failure(error, self.arm.name) from None
        except RuntimeError as error:
            reason = compiler_policy.refusal(error) if self.arm.compile.strict else None
            if reason is None:
                raise
            raise compiler_policy.UnforeseenShapeError(
                f"no graph fits {shape} ({reason}), and compile.strict compiles nothing while serving: warm that shape"
            ) from None

    def _ran_compiled(self) -> bool:
        """Return whether what the policy compiles has run as compiled code since the last call."""
        return self._blocks.ran_compiled() if self._blocks is not None else not self._canary.ran_eagerly()

    def _note_canary(self, shape: StepShape, start_ns: int, end_ns: int) -> bool:
        graph = self._graphs.get(shape)
        compiled = self._ran_compiled() if graph is None else graph.compiled
        if not self.arm.compile.enabled:
            return False
        self.recorder.record_step(start_ns, end_ns, compiled=compiled)
        return compiled

    def device_name(self) -> str:
        """Return the accelerator's product name, or cpu."""
        return product_name(self.device)

    def dtype_name(self) -> str:
        return str(self.model.dtype).removeprefix("torch.")

    def memory_bytes(self) -> dict[str, int]:
        """Return bytes by owner: weights and those of them that are quantised, KV cache, the process's peak on the
        host, and of a GPU the allocator's peak and what CUDA graphs hold in pools of their own."""
        every, quantised = weight_bytes(self.model)
        memory = {"weights": every, "quantised_weights": quantised}
        memory["kv_cache"] = self.cache.memory_bytes() if self.cache is not None else 0
        memory["process_peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if self.device.type == "cuda":
            memory["device_peak"] = torch.cuda.max_memory_allocated(self.device)
            segments: Any = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
            memory["graph_pools"] = sum(
                item["total_size"] for item in segments if tuple(item.get("segment_pool_id", (0, 0))) != (0, 0)
            )
        return {owner: size for owner, size in memory.items() if size}

    def _tensor(self, values: Any, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        if self.device.type != "cuda":
            return torch.tensor(values, dtype=dtype)
        # from pinned memory the copy does not delay this thread
        return torch.as_tensor(values, dtype=dtype).pin_memory().to(self.device, non_blocking=True)

    def _to_host(self, results: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        if self.device.type != "cuda":
            return results.clone(), None
        host = torch.empty(results.shape, dtype=results.dtype, pin_memory=True)
        host.copy_(results, non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        return host, done

    @contextmanager
    def _timed(self, item: str) -> Iterator[None]:
        """Add an item to `startup_ns`: the time until the device has done what is started inside."""
        started_ns = now_ns()
        yield
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
        self.startup_ns[item] = now_ns() - started_ns


def filling_step(shape: StepShape, arm: ArmConfig, vocab_size: int, rng: torch.Generator | None = None) -> Step:
    """Return a step of random prompts that fills `shape`, as far as so many prompts can."""
    most = arm.engine.max_prompt_tokens
    if shape.kind == "prefill":
        sizes = [min(most, shape.length - begun) for begun in range(0, shape.length, most)][:MOST_PROMPTS]
    else:  # a decode step feeds the first output at the position after the prompt
        sizes = [shape.context - (shape.kind == "decode")] * shape.batch
    jobs = tuple(
        Job(
            request_id=f"{row}",
            prompt=torch.randint(vocab_size, (size,), generator=rng).tolist(),
            max_tokens=2,
            recv_ns=0,
            row=row,
            launched=2,  # the token that a decode step feeds and the one that it answers
        )
        for row, size in enumerate(sizes)
    )
    return Step("decode", jobs) if shape.kind == "decode" else Step(shape.kind, (), jobs, tuple((0, n) for n in sizes))
