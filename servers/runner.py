"""ModelRunner: padded prefill and decode steps on the one device thread.

Every arm runs the same two steps over the same cache; the shape policy decides their sizes and the compile policy
whether they are compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from servers import compilation, sampling
from servers.clock import now_ns
from servers.compile_events import CompileRecorder, EagerCanary, Trigger
from servers.config import ArmConfig
from servers.kv_cache import SlotCache
from servers.model import eos_ids, load_model
from servers.scheduler import Job, Move
from servers.shapes import StepShape, shape_policy


class _Step(nn.Module):
    """The model over the slot cache. Inputs of a step, all int64 on the device:

    input_ids, positions: [B, T]; rows: [B] cache rows; context: [L] = 0 … L-1.
    """

    def __init__(self, model: nn.Module, cache: SlotCache, canary: EagerCanary) -> None:
        super().__init__()
        self.model = model
        self.cache = cache
        self.canary = canary
        config: Any = model.config
        self.layer_types = frozenset(getattr(config, "layer_types", None) or ())
        self.sliding_window = getattr(config, "sliding_window", None) or 0

    def logits(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        context: torch.Tensor,
        *,
        gather: bool,
        keep: int | torch.Tensor,
    ) -> torch.Tensor:
        """Logits [B, kept positions, vocab]; the cache holds the new tokens afterwards."""
        if not torch.compiler.is_compiling():
            self.canary.steps += 1
        window = self.cache.window
        window.rows, window.positions, window.context, window.gather = rows, positions, context.shape[0], gather
        output = self.model(
            input_ids=input_ids,
            position_ids=positions,
            attention_mask=self._mask(positions, context),
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=keep,
        )
        window.rows = window.positions = None
        window.context = 0
        logits: torch.Tensor = output.logits
        return logits

    def _mask(self, positions: torch.Tensor, context: torch.Tensor) -> torch.Tensor | dict[str, torch.Tensor]:
        """[B, 1, T, L], true where a token sees a cache position; a mask per layer type where layers differ."""
        distance = positions[:, None, :, None] - context[None, None, None, :]
        causal = distance >= 0
        if not self.sliding_window:
            return causal
        sliding = causal & (distance < self.sliding_window)
        if not self.layer_types:
            return sliding
        return {kind: sliding if kind == "sliding_attention" else causal for kind in sorted(self.layer_types)}


class PrefillStep(_Step):
    """Whole prompts into their rows; answers the logits [B, vocab] at each prompt's last token."""

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        context: torch.Tensor,
        last: torch.Tensor,
    ) -> torch.Tensor:
        logits = self.logits(input_ids, positions, rows, context, gather=True, keep=last)
        # Each row was kept at every row's last position (a model takes one list of positions for all rows), so its
        # own stands on the diagonal.
        return logits.diagonal(dim1=0, dim2=1).transpose(0, 1)


class DecodeStep(_Step):
    """One token on the first B rows; answers their logits [B, vocab]."""

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, context: torch.Tensor
    ) -> torch.Tensor:
        return self.logits(input_ids, positions, rows, context, gather=False, keep=0)[:, -1]


class ModelRunner:
    """Owns model, cache and compiled steps. Every method belongs to the device thread."""

    def __init__(self, arm: ArmConfig, recorder: CompileRecorder) -> None:
        self.arm = arm
        self.recorder = recorder
        self.shapes = shape_policy(arm.shapes, arm.engine)
        self.canary = EagerCanary()
        self.model: Any = None
        self.startup_ns: dict[str, int] = {}
        self._generators: dict[str, torch.Generator] = {}

    def load(self) -> None:
        """Model, cache and steps exist; nothing is compiled yet."""
        started_ns = now_ns()
        if self.arm.engine.threads:
            torch.set_num_threads(self.arm.engine.threads)
        # cuDNN's attention builds a plan for every size it has not met, 40 ms and more each time. Exact shapes are new
        # at almost every step, so an eager control would pay for compiles of its own.
        torch.backends.cuda.enable_cudnn_sdp(False)
        engine = self.arm.engine
        self.model = load_model(self.arm.model)
        text_config = self.model.config.get_text_config()
        self.device = next(self.model.parameters()).device
        self.vocab_size = int(text_config.vocab_size)
        self.eos_ids = eos_ids(self.model)
        self.cache = SlotCache(
            layers=text_config.num_hidden_layers,
            slots=self.cache_rows,
            max_length=engine.max_length,
        )
        self._rows = torch.arange(self.cache_rows, device=self.device)
        self._context = torch.arange(engine.max_length, device=self.device)
        compilation.configure_compiler(self.arm.compile, self.shapes)
        prefill = PrefillStep(self.model, self.cache, self.canary)
        decode = DecodeStep(self.model, self.cache, self.canary)
        self._allocate(prefill)
        self._prefill: Callable[..., torch.Tensor] = compilation.compile_step(prefill, self.arm.compile)
        self._decode: Callable[..., torch.Tensor] = compilation.compile_step(decode, self.arm.compile)
        self.canary.ran_eagerly()
        self._finish()
        self.startup_ns["load"] = now_ns() - started_ns

    @property
    def cache_rows(self) -> int:
        """Rows in the cache: the slots, and never fewer than the smallest batch."""
        return max(self.arm.engine.slots, self.arm.shapes.min_size)

    @torch.no_grad()
    def _allocate(self, prefill: PrefillStep) -> None:
        # One eager token lets every layer allocate its own cache with the sizes that the model really uses.
        one = torch.zeros((1, 1), dtype=torch.int64, device=self.device)
        prefill(one, one, one[0], self._context[:1], one[0])

    def warm_up(self, report: Callable[[int, int, str], None]) -> None:
        """Run every shape that the policy can produce, on this thread, as often as graph capture needs.

        `report(done, total, detail)` is called before each shape and once at the end.
        """
        prefills, decodes = compilation.warmup_shapes(self.arm.compile, self.shapes)
        plan = [("prefill", shape) for shape in prefills] + [("decode", shape) for shape in decodes]
        for done, (kind, shape) in enumerate(plan):
            report(done, len(plan), f"{kind} {shape}")
            started_ns = now_ns()
            for _ in range(compilation.WARMUP_CALLS):
                self._warm(kind, shape)
            self._finish()
            self.startup_ns[f"{kind} {shape}"] = now_ns() - started_ns
        report(len(plan), len(plan), "warm")

    def _warm(self, kind: str, shape: StepShape) -> None:
        self.recorder.trigger = Trigger(shape=f"{kind} {shape}")
        prompt = torch.randint(3, self.vocab_size, (shape.length,)).tolist()
        jobs = [Job(request_id="", prompt=prompt, max_tokens=1, recv_ns=0, row=row) for row in range(shape.batch)]
        if kind == "prefill":
            self._run_prefill(jobs, shape)
        else:
            for job in jobs:
                job.prompt = [3] * (shape.context - 1)
                job.output = [3]
            self._run_decode(jobs, shape)
        self._note_canary(0, 0)

    def step(self, kind: str, jobs: Sequence[Job], batch_id: int) -> tuple[list[int], StepShape, bool]:
        """Run one step for `jobs` (rows set; decode takes them in row order).

        Returns the token sampled for each job, the shape that ran and whether compiled code ran it.
        """
        if kind == "prefill":
            shape = self.shapes.prefill(len(jobs), max(len(job.prompt) for job in jobs))
        else:
            shape = self.shapes.decode(len(jobs), max(job.context for job in jobs))
        self.recorder.trigger = Trigger(batch_id=batch_id, shape=f"{kind} {shape}", phase="serving")
        started_ns = now_ns()
        logits = self._run_prefill(jobs, shape) if kind == "prefill" else self._run_decode(jobs, shape)
        tokens = sampling.sample(logits, jobs, self._generators)
        return tokens, shape, self._note_canary(started_ns, now_ns())

    def move(self, move: Move) -> None:
        """Carry out the scheduler's row move."""
        self.cache.move_row(move.source, move.target)

    def forget(self, request_id: str) -> None:
        """Drop what is kept for a request that has ended."""
        self._generators.pop(request_id, None)

    def device_name(self) -> str:
        """The accelerator's product name, or cpu."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type

    def memory_bytes(self) -> dict[str, int]:
        """Bytes by owner: weights, KV cache, and the allocator's peak on a GPU."""
        found = {
            "weights": sum(item.numel() * item.element_size() for item in self.model.parameters()),
            "kv_cache": self.cache.memory_bytes(),
        }
        if self.device.type == "cuda":
            found["device_peak"] = torch.cuda.max_memory_allocated(self.device)
            found["device_reserved"] = torch.cuda.memory_reserved(self.device)
        return found

    @torch.no_grad()
    def _run_prefill(self, jobs: Sequence[Job], shape: StepShape) -> torch.Tensor:
        ids = [job.prompt + [0] * (shape.length - len(job.prompt)) for job in jobs]
        positions = [
            [*range(len(job.prompt)), *[self.cache.padding_position] * (shape.length - len(job.prompt))] for job in jobs
        ]
        rows = [job.row for job in jobs]
        last = [len(job.prompt) - 1 for job in jobs]
        for _ in range(shape.batch - len(jobs)):
            # a padding row writes nowhere but the padding position, so any row may lend its place
            ids.append([0] * shape.length)
            positions.append([self.cache.padding_position] * shape.length)
            rows.append(rows[0])
            last.append(0)
        inputs = [self._tensor(item) for item in (ids, positions, rows)]
        inputs += [self._context[: shape.context], self._tensor(last)]
        self._mark(inputs, length=True)
        with compilation.step_boundary(self.arm.compile):
            return self._prefill(*inputs)

    @torch.no_grad()
    def _run_decode(self, jobs: Sequence[Job], shape: StepShape) -> torch.Tensor:
        padding = shape.batch - len(jobs)
        ids = [[job.output[-1]] for job in jobs] + [[0]] * padding
        # rows beyond the active ones are free: what padding writes there is overwritten by the next prompt
        positions = [[job.context - 1] for job in jobs] + [[0]] * padding
        inputs = [self._tensor(ids), self._tensor(positions), self._rows[: shape.batch], self._context[: shape.context]]
        self._mark(inputs, length=False)
        with compilation.step_boundary(self.arm.compile):
            return self._decode(*inputs)

    def _tensor(self, values: list[Any]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self.device, non_blocking=True)

    def _mark(self, inputs: list[torch.Tensor], *, length: bool) -> None:
        """Name the dimensions that vary, with their bounds, where the policy asks for it."""
        if not self.arm.compile.mark_dynamic:
            return
        low = max(2, self.arm.shapes.min_size)
        batch = self.arm.engine.prefill_batch if length else self.cache_rows
        ids, positions, rows, context, *last = inputs
        for tensor in (ids, positions, rows, *last):
            compilation.mark_dimension(tensor, 0, low=low, high=batch)
        if length:
            for tensor in (ids, positions):
                compilation.mark_dimension(tensor, 1, low=low, high=self.arm.engine.max_prompt_tokens)
        high = self.arm.engine.max_prompt_tokens if length else self.arm.engine.max_length
        compilation.mark_dimension(context, 0, low=low, high=high)

    def _note_canary(self, start_ns: int, end_ns: int) -> bool:
        ran_eagerly = self.canary.ran_eagerly()
        if not self.arm.compile.enabled or self.arm.compile.regional:
            return self.arm.compile.enabled
        if ran_eagerly:
            self.recorder.record_eager_step(start_ns, end_ns)
        else:
            self.recorder.record_compiled_step()
        return not ran_eagerly

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
