"""ModelRunner: prefill and decode steps of a causal language model over the slot cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from tailgate.servers.compiler.recorder import CompileRecorder, Trigger
from tailgate.servers.config import GRAPH_TREE_MODES, MOST_PROMPTS, ArmConfig
from tailgate.servers.engine import attention
from tailgate.servers.engine.encoder import EncoderRunner
from tailgate.servers.engine.kv_cache import TILE, SlotCache
from tailgate.servers.engine.model import eos_ids
from tailgate.servers.engine.scheduler import Job, Move, Step
from tailgate.servers.engine.shapes import Kind, StepShape
from tailgate.servers.engine.step_runner import StepRunner, Tensors, filling_step
from tailgate.servers.engine.steps import DecodeStep, PrefillStep

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
        self.eos_ids = eos_ids(self.model)
        attention.prepare(self.device)
        self.cache = SlotCache(
            layers=self.model.config.get_text_config().num_hidden_layers,
            slots=self.cache_rows,
            max_length=engine.max_length,
            static_address=policy.enabled and policy.mode in GRAPH_TREE_MODES,
        )
        self._canary = self.cache.window.canary
        self._context = torch.arange(engine.max_length, device=self.device)
        # the newest token of each row: what the next decode step reads, without a way over the host
        self._newest = torch.randint(self.vocab_size, (self.cache_rows,), device=self.device)
        prefill = PrefillStep(self.model, self.cache)
        # One eager token lets every layer allocate its own cache with the sizes that the model really uses.
        one = torch.zeros((1, 1), dtype=torch.int64, device=self.device)
        prefill(one, one, one[0], one[0], one.new_zeros((1, 4)), one[0] - 1)
        return {"prefill": prefill, "decode": DecodeStep(self.model, self.cache)}

    @property
    def cache_rows(self) -> int:
        """Rows in the cache: the slots, and never fewer than the smallest or the largest batch that is run."""
        return max(self.arm.engine.slots, self.arm.shapes.min_size, *self.arm.shapes.batch_ladder)

    @torch.no_grad()
    def _warm_rest(self) -> None:
        """Compile the decode kernel in every variant that exact shapes may need."""
        if self.shapes.is_closed():
            return  # planned shapes have theirs
        contexts = attention.contexts_to_warm(self.device, self.arm.engine.max_length)
        if not contexts:
            return
        self.recorder.trigger = Trigger(shape="decode kernels")
        with self._timed("decode kernels"):
            for context in contexts:
                shape = self.shapes.decode(1, context)
                varying, fixed = self._inputs(filling_step(shape, self.arm, self.vocab_size), shape)
                with torch.compiler.set_stance("force_eager"):  # type: ignore[no-untyped-call]
                    self._steps["decode"](*varying, *fixed)
        self._ran_compiled()

    def _answer(self, step: Step, shape: StepShape, places: Sequence[int]) -> torch.Tensor:
        logits, greedy = self.run(step, shape)
        tokens = self.choose(logits, greedy, step.jobs, places)
        # `_newest` last: an answer whose step fails before feeds the same token again
        if step.kind == "decode":
            self._newest[: shape.batch].copy_(tokens)
        else:
            rows = self._tensor([job.row for job in step.jobs])
            self._newest.index_copy_(0, rows, tokens[rows])
        return tokens

    def _results(self, results: torch.Tensor, places: Sequence[int]) -> list[int]:
        tokens: list[int] = results.tolist()
        return [tokens[place] for place in places]

    def move(self, move: Move) -> None:
        self.cache.move_row(move.source, move.target, move.positions)
        self._newest[move.target] = self._newest[move.source]

    def _inputs(self, step: Step, shape: StepShape) -> tuple[list[torch.Tensor], tuple[torch.Tensor, ...]]:
        padding = self.cache.window.padding
        if step.kind == "decode":
            positions = [[padding]] * shape.batch
            for job in step.jobs:
                positions[job.row] = [job.context - 2]  # launched counts this step's token, which has no place yet
            varying = [self._newest[: shape.batch, None], self._tensor(positions)]
            return varying, (self._context[: shape.context],)
        shared = step.decoding_rows  # tokens 0 … shared - 1 are those of the cache rows
        ids, places, rows = [0] * shared, [padding] * shared, list(range(shared))
        last, decoding, tiles = [0] * self.cache_rows, [-1] * self.cache_rows, []
        for job in step.decoding:
            places[job.row] = decoding[job.row] = job.context - 2
            last[job.row] = job.row
        for job, (start, stop) in zip(step.prompts, step.chunks, strict=True):
            tiles += [
                (len(ids) + begun - start, min(TILE, stop - begun), begun, job.row)
                for begun in range(start, stop, TILE)
            ]
            ids += job.prompt[start:stop]
            places += range(start, stop)
            rows += [job.row] * (stop - start)
            last[job.row] = len(ids) - 1
        rest = shape.length - len(ids)
        tiles += [(0, 0, 0, 0)] * (-(-self.arm.longest_step // TILE) + MOST_PROMPTS - len(tiles))
        tokens = self._tensor(ids + [0] * rest)
        tokens[:shared] = self._newest[:shared]
        varying = [
            tokens[None],
            self._tensor([places + [padding] * rest]),
            *(self._tensor(item) for item in (rows + [0] * rest, last, tiles, decoding)),
        ]
        return varying, ()

    def _varying(
        self, kind: Kind, varying: list[torch.Tensor], fixed: Tensors
    ) -> Iterable[tuple[torch.Tensor, int, tuple[int, int]]]:
        engine, low = self.arm.engine, max(2, self.arm.shapes.min_size)
        if kind == "prefill":
            tokens, positions, rows, *_ = varying
            for tensor, dimension in ((tokens, 1), (positions, 1), (rows, 0)):
                yield tensor, dimension, (low, self.arm.longest_step)
            return
        for tensor in varying:
            yield tensor, 0, (low, self.cache_rows)
        # The whole cache is a separate size: a mask that is not cut compiles separately from one that is.
        yield fixed[0], 0, (low, engine.longest_context if self.arm.shapes.kind == "exact" else engine.max_length)


def runner_for(arm: ArmConfig, recorder: CompileRecorder) -> ModelRunner | EncoderRunner:
    """Return what loads, warms and runs the arm's model; nothing is loaded yet."""
    return EncoderRunner(arm, recorder) if arm.model.embeds else ModelRunner(arm, recorder)
