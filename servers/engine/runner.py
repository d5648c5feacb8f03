"""ModelRunner: prefill, extend and decode steps of a causal language model over the slot cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from tailgate.servers.compiler.recorder import CompileRecorder, Trigger
from tailgate.servers.config import GRAPH_TREE_MODES, ArmConfig
from tailgate.servers.engine import attention
from tailgate.servers.engine.encoder import EncoderRunner
from tailgate.servers.engine.kv_cache import SlotCache
from tailgate.servers.engine.model import eos_ids
from tailgate.servers.engine.scheduler import Job, Move, Step
from tailgate.servers.engine.shapes import Kind, StepShape
from tailgate.servers.engine.step_runner import StepRunner, Tensors, filling_step
from tailgate.servers.engine.steps import DecodeStep, ExtendStep, PrefillStep, gather_last

# The next tokens [B] from logits [B, vocab], their argmax [B], the jobs, and the row of each job. Parity feeds its own.
Choose = Callable[[torch.Tensor, torch.Tensor, Sequence[Job], Sequence[int]], torch.Tensor]


class ModelRunner(StepRunner):
    cache: SlotCache

    def __init__(self, arm: ArmConfig, recorder: CompileRecorder) -> None:
        super().__init__(arm, recorder)
        self.choose: Choose = lambda logits, greedy, jobs, places: greedy

    @torch.no_grad()
    def _make_steps(self) -> Mapping[str, Callable[..., Tensors]]:
        policy, engine = self.arm.compile, self.arm.engine
        planned = list(self.shapes.planned())
        self.eos_ids = eos_ids(self.model)
        attention.prepare(self.device)
        # what a later chunk of a prompt may be padded to
        extends = [shape.length for shape in planned if shape.kind == "extend"]
        self.cache = SlotCache(
            layers=self.model.config.get_text_config().num_hidden_layers,
            slots=self.cache_rows,
            max_length=engine.max_length,
            spare=max(engine.prefill_tokens, *extends) if extends else 0,
            static_address=policy.enabled and policy.mode in GRAPH_TREE_MODES,
        )
        self._canary = self.cache.window.canary
        gather_last(self.model, self.cache.window)
        self._rows = torch.arange(self.cache_rows, device=self.device)
        self._context = torch.arange(engine.max_length, device=self.device)
        # the newest token of each row: what the next decode step reads, without a way over the host
        self._newest = torch.randint(self.vocab_size, (self.cache_rows,), device=self.device)
        # a bucket may be longer than any prompt
        widest = max(engine.max_length, *(shape.length for shape in planned))
        prefill = PrefillStep(self.model, self.cache, widest)
        # One eager token lets every layer allocate its own cache with the sizes that the model really uses.
        one = torch.zeros((1, 1), dtype=torch.int64, device=self.device)
        prefill(one, one, one[0], one[0])
        return {
            "prefill": prefill,
            "extend": ExtendStep(self.model, self.cache, widest),
            "decode": DecodeStep(self.model, self.cache, widest),
        }

    @property
    def cache_rows(self) -> int:
        """Rows in the cache: the slots, and never fewer than the smallest or the largest batch that is run."""
        return max(self.arm.engine.slots, self.arm.shapes.min_size, *self.arm.shapes.batch_ladder)

    @torch.no_grad()
    def _warm_rest(self) -> None:
        """Compile the decode kernel in every variant that exact shapes may need."""
        if self.shapes.is_closed():
            return  # planned shapes have theirs
        contexts = attention.contexts_to_warm(self.model, self.device, self.arm.engine.max_length)
        if not contexts:
            return
        self.recorder.trigger = Trigger(shape="decode kernels")
        with self._timed("decode kernels"):
            for context in contexts:
                shape = self.shapes.decode(1, context)
                varying, fixed = self._inputs(filling_step(shape, self.vocab_size), shape)
                with torch.compiler.set_stance("force_eager"):  # type: ignore[no-untyped-call]
                    self._steps["decode"](*varying, *fixed)
        self._ran_compiled()

    def _answer(self, step: Step, shape: StepShape, places: Sequence[int]) -> torch.Tensor:
        logits, greedy = self.run(step, shape)
        tokens = self.choose(logits, greedy, step.jobs, places)
        if step.kind == "decode":
            self._newest[: shape.batch].copy_(tokens)
        else:
            rows = self._tensor([job.row for job in step.jobs])
            self._newest.index_copy_(0, rows, tokens[: len(step.jobs)])
        return tokens

    def _results(self, results: torch.Tensor, places: Sequence[int]) -> list[int]:
        tokens: list[int] = results.tolist()
        return [tokens[place] for place in places]

    def move(self, move: Move) -> None:
        self.cache.move_row(move.source, move.target, move.positions)
        self._newest[move.target] = self._newest[move.source]

    def _inputs(self, step: Step, shape: StepShape) -> tuple[list[torch.Tensor], tuple[torch.Tensor, ...]]:
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

    def _varying(
        self, kind: Kind, varying: list[torch.Tensor], fixed: Tensors
    ) -> Iterable[tuple[torch.Tensor, int, tuple[int, int]]]:
        engine, low = self.arm.engine, max(2, self.arm.shapes.min_size)
        rows = self.cache_rows if kind == "decode" else engine.prefill_batch
        for tensor in varying if kind != "decode" else (*varying, fixed[0]):
            yield tensor, 0, (low, rows)
        if kind != "decode":
            for tensor in varying[:2]:
                yield tensor, 1, (low, engine.prefill_tokens)
        if kind != "prefill":
            longest = engine.max_prompt_tokens
            if kind == "decode":
                # The whole cache is a separate size: a mask that is not cut compiles separately from one that is.
                longest = engine.longest_context if self.arm.shapes.kind == "exact" else engine.max_length
            yield fixed[-1], 0, (low, longest)


def runner_for(arm: ArmConfig, recorder: CompileRecorder) -> ModelRunner | EncoderRunner:
    """Return what loads, warms and runs the arm's model; nothing is loaded yet."""
    return EncoderRunner(arm, recorder) if arm.model.embeds else ModelRunner(arm, recorder)
