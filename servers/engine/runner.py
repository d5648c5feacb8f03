"""ModelRunner: padded prefill and decode steps on the one device thread.

Every arm runs the same steps over the same cache; the shape policy decides their sizes and the compile policy whether
they are compiled. A step is launched and collected apart: on a GPU the next step can be launched before the tokens of
the last have come back, because the newest token of every row stays on the device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from servers.clock import now_ns
from servers.compiler import artifacts
from servers.compiler import policy as compiler_policy
from servers.compiler.recorder import CompileRecorder, Trigger
from servers.compiler.regions import CompiledRegions, Selection, leave_eager, select_regions
from servers.config import GRAPH_TREE_MODES, ArmConfig
from servers.engine import attention, sampling
from servers.engine.capture import CapturedStep
from servers.engine.kv_cache import SlotCache
from servers.engine.model import eos_ids, join_weights, load_model
from servers.engine.placement import product_name, resolve_device
from servers.engine.quantisation import weight_bytes
from servers.engine.scheduler import Job, LaunchedStep, Move, Step
from servers.engine.shapes import Kind, StepShape, shape_policy
from servers.engine.startup import memory_peaks
from servers.engine.steps import DecodeStep, ExtendStep, Outputs, PrefillStep
from servers.engine.warmup import WARMUP_CALLS, warmup_plan
from servers.fields import ConfigError

log = logging.getLogger("tailgate.runner")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceStep(LaunchedStep):
    """A launched step, and where its tokens will be once `done` has happened (at once when None)."""

    places: tuple[int, ...]  # where each job's token stands in `tokens`
    tokens: torch.Tensor  # on the host
    done: torch.cuda.Event | None


class ModelRunner:
    """Owns model, cache and compiled steps. Every method belongs to the device thread."""

    def __init__(self, arm: ArmConfig, recorder: CompileRecorder) -> None:
        self.arm = arm
        self.recorder = recorder
        self.shapes = shape_policy(arm.shapes, arm.engine)
        self.model: Any = None
        self.startup_ns: dict[str, int] = {}
        self.loaded: artifacts.Loaded | None = None  # the compiled code that the start began with
        self._seen: set[StepShape] = set()
        self._graphs: dict[StepShape, CapturedStep] = {}
        self._pool: Any = None
        self._unpromised: set[Kind] = set()  # steps whose graphs may fit a part of their bounds
        self._selection = Selection(compiled={}, eager={})
        self._regions: CompiledRegions | None = None

    # start-up

    def load(self) -> None:
        """Model, cache and steps exist; nothing is compiled yet, but for what the arm's artifact brings.

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
            engine = self.arm.engine
            raise ConfigError(
                f"model and KV cache do not fit the device with {engine.slots} slots of {engine.max_length} positions "
                f"({str(error).splitlines()[0]}): lower engine.slots, max_prompt_tokens or max_new_tokens"
            ) from None
        self._finish()
        self.startup_ns["load"] = now_ns() - started_ns

    def _build(self) -> None:
        policy, engine = self.arm.compile, self.arm.engine
        planned = list(self.shapes.planned())
        self.model = load_model(self.arm.model)
        if policy.join_projections:
            join_weights(self.model)
        if policy.enabled:
            self._selection = select_regions(self.model, policy)
        text_config = self.model.config.get_text_config()
        self.device = next(self.model.parameters()).device
        self.overlaps = self.device.type == "cuda"
        self.vocab_size = int(text_config.vocab_size)
        self.eos_ids = eos_ids(self.model)
        attention.prepare(self.device)
        # what a later chunk of a prompt may be padded to
        extends = [shape.length for shape in planned if shape.kind == "extend"]
        self.cache = SlotCache(
            layers=text_config.num_hidden_layers,
            slots=self.cache_rows,
            max_length=engine.max_length,
            spare=max(engine.prefill_tokens, *extends) if extends else 0,
            static_address=policy.enabled and policy.mode in GRAPH_TREE_MODES,
        )
        self._rows = torch.arange(self.cache_rows, device=self.device)
        self._context = torch.arange(engine.max_length, device=self.device)
        # the newest token of each row: what the next decode step reads, without a way over the host
        self._newest = torch.randint(self.vocab_size, (self.cache_rows,), device=self.device)
        compiler_policy.configure_compiler(
            policy,
            planned_shapes=len(planned),
            closed=self.shapes.is_closed(),
            regions=len(self._selection.compiled) or 1,
        )
        # a bucket may be longer than any prompt
        widest = max(engine.max_length, *(shape.length for shape in planned))
        steps = {
            "prefill": PrefillStep(self.model, self.cache, widest),
            "extend": ExtendStep(self.model, self.cache, widest),
            "decode": DecodeStep(self.model, self.cache, widest),
        }
        self._allocate(steps["prefill"])
        leave_eager(self._selection)
        if self._selection.compiled:
            self._regions = CompiledRegions(self.model, self.cache, self._selection, policy)
            self._steps: dict[str, Callable[..., Outputs]] = dict(steps)
        else:
            self._steps = {kind: compiler_policy.compile_step(step, policy) for kind, step in steps.items()}
        self._ran_compiled()

    @property
    def cache_rows(self) -> int:
        """Rows in the cache: the slots, and never fewer than the smallest or the largest batch that is run."""
        return max(self.arm.engine.slots, self.arm.shapes.min_size, *self.arm.shapes.batch_ladder)

    @torch.no_grad()
    def _allocate(self, prefill: nn.Module) -> None:
        # One eager token lets every layer allocate its own cache with the sizes that the model really uses.
        one = torch.zeros((1, 1), dtype=torch.int64, device=self.device)
        prefill(one, one, one[0], one[0])

    def warm_up(self, report: Callable[[int, int, str], None]) -> None:
        """Run every shape that the policy can produce, on this thread, as often as graph capture needs.

        `report(done, total, detail)` is called before each shape and once at the end.
        """
        plan = warmup_plan(self.arm, self.shapes)
        for done, shape in enumerate(plan):
            report(done, len(plan), str(shape))
            started_ns = now_ns()
            self._warm(shape)
            self.startup_ns[str(shape)] = now_ns() - started_ns
            if self.arm.compile.capture:
                self._capture(shape)
        if not self.shapes.is_closed():  # planned shapes have theirs
            report(len(plan), len(plan), "decode kernels")
            self._warm_kernels()
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
            except compiler_policy.UnknownSize as error:
                if not self.arm.compile.unbacked:
                    raise
                raise ConfigError(
                    f"compile.unbacked is {list(self.arm.compile.unbacked)} but the model asks for such a size "
                    f"({str(error).strip().partition(chr(10))[0]}): leave it out"
                ) from None
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
    def _warm_kernels(self) -> None:
        """The decode kernel is compiled in every variant that exact shapes may need."""
        contexts = attention.contexts_to_warm(self.model, self.device, self.arm.engine.max_length)
        self.recorder.trigger = Trigger(shape="decode kernels")
        started_ns = now_ns()
        for context in contexts:
            shape = self.shapes.decode(1, context)
            varying, fixed = self._inputs(filling_step(shape, self.vocab_size), shape)
            with torch.compiler.set_stance("force_eager"):  # type: ignore[no-untyped-call]
                self._steps["decode"](*varying, *fixed)
        self._finish()
        self._ran_compiled()
        if contexts:
            self.startup_ns["decode kernels"] = now_ns() - started_ns

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

    def shape_of(self, step: Step) -> StepShape:
        """The padded shape that `step` runs at."""
        if step.kind == "decode":
            return self.shapes.decode(max(job.row for job in step.jobs) + 1, max(job.context for job in step.jobs) - 1)
        length = max(stop - start for start, stop in step.chunks)
        if step.kind == "prefill":
            return self.shapes.prefill(len(step.jobs), length)
        return self.shapes.extend(len(step.jobs), length, max(stop for _, stop in step.chunks))

    def is_ready(self, step: Step) -> bool:
        """Whether `step` cannot make the compiler run, so that it may be launched while finished tokens wait."""
        policy = self.arm.compile
        is_marked = policy.mark_dynamic and policy.warmup == "shapes" and not policy.has_bounds
        if not policy.enabled or policy.is_closed_once_warm or is_marked:
            return True
        return self.shape_of(step) in self._seen

    def launch(self, step: Step, batch_id: int) -> DeviceStep:
        """`step` is on its way; its jobs' rows are set. Errors of the device may show here or in `collect`."""
        shape = self.shape_of(step)
        self.recorder.trigger = Trigger(batch_id=batch_id, shape=str(shape), phase="serving")
        started_ns = now_ns()
        jobs = step.jobs
        answers = tuple(stop == len(job.prompt) for job, (_, stop) in zip(jobs, step.chunks, strict=False))
        try:
            logits, greedy = self.run(step, shape)
            places = [job.row for job in jobs] if step.kind == "decode" else list(range(len(jobs)))
            tokens = greedy if sampling.is_greedy(jobs) else self._draw(logits, greedy, jobs, places)
            if step.kind == "decode":
                self._newest[: shape.batch].copy_(tokens)
            else:
                rows = self._tensor([job.row for job in jobs])
                self._newest.index_copy_(0, rows, tokens[: len(jobs)])
            host, done = self._to_host(tokens)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            raise
        return DeviceStep(
            step=step,
            answers=answers or (True,) * len(jobs),
            shape=shape,
            real_tokens=sum(stop - start for start, stop in step.chunks) or len(jobs),
            batch_id=batch_id,
            start_ns=started_ns,
            compiled=self._note_canary(shape, started_ns, now_ns()),
            places=tuple(places),
            tokens=host,
            done=done,
        )

    def collect(self, launched: DeviceStep) -> list[int]:
        """The token sampled for each job of `launched`, once the device has it."""
        if launched.done is not None:
            launched.done.synchronize()
        tokens: list[int] = launched.tokens.tolist()
        return [tokens[place] for place in launched.places]

    @torch.no_grad()
    def logits(self, step: Step) -> torch.Tensor:
        """Logits [len(step.jobs), vocab] float32, nothing sampled: decode feeds each job's last output, whoever chose
        it (teacher forcing)."""
        places = list(range(len(step.jobs)))
        if step.kind == "decode":
            places = [job.row for job in step.jobs]
            self._newest[self._tensor(places)] = self._tensor([job.output[-1] for job in step.jobs])
        logits, _ = self.run(step, self.shape_of(step))
        return logits[places].float()

    def move(self, move: Move) -> None:
        """Carry out the scheduler's row move."""
        self.cache.move_row(move.source, move.target, move.positions)
        self._newest[move.target] = self._newest[move.source]

    def device_name(self) -> str:
        """The accelerator's product name, or cpu."""
        return product_name(self.device)

    def dtype_name(self) -> str:
        """The type of the weights, "bfloat16" for example."""
        return str(self.model.dtype).removeprefix("torch.")

    def memory_bytes(self) -> dict[str, int]:
        """Bytes by owner: weights and those of them that are quantised, KV cache, the allocator's peak on a GPU, and
        what `memory_peaks` sees."""
        every, quantised = weight_bytes(self.model)
        memory = {
            "weights": every,
            **({"quantised_weights": quantised} if quantised else {}),
            "kv_cache": self.cache.memory_bytes(),
        }
        segments: Any = ()
        if self.device.type == "cuda":
            memory["device_peak"] = torch.cuda.max_memory_allocated(self.device)
            memory["device_reserved"] = torch.cuda.memory_reserved(self.device)
            segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        return {**memory, **memory_peaks(segments)}

    @torch.no_grad()
    def run(self, step: Step, shape: StepShape) -> Outputs:
        """Outputs of the step at its padded shape: B = shape.batch rows. Raises UnforeseenShapeError where no graph
        fits and the policy is strict."""
        varying, fixed = self._inputs(step, shape)
        self._seen.add(shape)
        graph = self._graphs.get(shape)
        if graph is not None:
            logits, greedy = graph(varying)
            return logits, greedy
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

    def _inputs(self, step: Step, shape: StepShape) -> tuple[list[torch.Tensor], tuple[torch.Tensor, ...]]:
        """(inputs that change from call to call, inputs that belong to the shape), in the order of the step."""
        padding = self.cache.max_length
        if step.kind == "decode":
            positions = [[padding]] * shape.batch
            for job in step.jobs:
                positions[job.row] = [job.context - 2]  # launched counts this step's token, which has no place yet
            varying = [self._newest[: shape.batch, None], self._tensor(positions)]
            return varying, (self._rows[: shape.batch], self._context[: shape.context])
        ids, places, rows, last = [], [], [], []
        for job, (start, stop) in zip(step.jobs, step.chunks, strict=True):
            rest = shape.length - (stop - start)
            ids.append(job.prompt[start:stop] + [0] * rest)
            places.append([*range(start, stop), *[padding] * rest])
            rows.append(job.row)
            last.append(stop - start - 1)
        for _ in range(shape.batch - len(step.jobs)):
            # a padding row writes nowhere but the padding position, so any row may lend its place
            ids.append([0] * shape.length)
            places.append([padding] * shape.length)
            rows.append(rows[0])
            last.append(0)
        varying = [self._tensor(item) for item in (ids, places, rows, last)]
        return varying, () if step.kind == "prefill" else (self._context[: shape.context],)

    def _draw(
        self, logits: torch.Tensor, greedy: torch.Tensor, jobs: Sequence[Job], places: Sequence[int]
    ) -> torch.Tensor:
        table = sampling.draw_table(jobs, places, logits.shape[0])
        ranked = any(job.top_k > 0 or 0 < job.top_p < 1 for job in jobs if job.temperature > 0)
        return sampling.choose(logits, greedy, self._tensor(table, torch.float32), ranked=ranked)

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

    def _mark(self, kind: Kind, varying: list[torch.Tensor], fixed: tuple[torch.Tensor, ...]) -> None:
        """Name the dimensions that vary, with their bounds, where the policy asks for it."""
        policy, engine = self.arm.compile, self.arm.engine
        if not policy.mark_dynamic:
            return
        promised = kind not in self._unpromised

        def mark(tensor: torch.Tensor, dimension: int, bounds: tuple[int, ...], name: str) -> None:
            if name in policy.unbacked:
                compiler_policy.hide_dimension(tensor, dimension, bounds, name)
            else:
                compiler_policy.mark_dimension(tensor, dimension, bounds, promised=promised)

        low = max(2, self.arm.shapes.min_size)
        rows = self.cache_rows if kind == "decode" else engine.prefill_batch
        for tensor in varying if kind != "decode" else (*varying, fixed[0]):
            mark(tensor, 0, policy.batch_bounds or (low, rows), "batch")
        if kind != "decode":
            for tensor in varying[:2]:
                mark(tensor, 1, policy.length_bounds or (low, engine.prefill_tokens), "length")
        if kind != "prefill":
            longest = engine.max_prompt_tokens
            if kind == "decode":
                # The whole of the cache is a size of its own: a mask that is not cut compiles apart from one that is.
                longest = engine.longest_context if self.arm.shapes.kind == "exact" else engine.max_length
            mark(fixed[-1], 0, policy.context_bounds or (low, longest), "context")

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

    def _ran_compiled(self) -> bool:
        """Whether what the policy compiles has run as compiled code since the last call."""
        window = self.cache.window
        if self._regions is not None:
            return self._regions.ran_compiled()
        wrote_eagerly, began_eagerly = window.canary.ran_eagerly(), window.begun.ran_eagerly()
        # modules that are left eager may be those that write to the cache
        return not (began_eagerly if self._selection.eager else wrote_eagerly)

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
