"""EncoderRunner: whole texts to vectors of unit length, in padded steps on the one device thread.

What is served is one function: the model, the pooling of its tokens' vectors and their normalisation. The compile
policy takes it whole, or takes regions of the model. The shape policy decides the sizes, as it does for generation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from servers.clock import now_ns
from servers.compiler import policy as compiler_policy
from servers.compiler.recorder import CompileRecorder, EagerCanary, Trigger
from servers.compiler.regions import CompiledRegions, leave_eager, select_regions
from servers.config import ArmConfig, Pooling, check_positions
from servers.engine.capture import Tensors
from servers.engine.model import load_model, readable_tokens
from servers.engine.scheduler import LaunchedStep, Step
from servers.engine.shapes import Kind, StepShape
from servers.engine.step_runner import StepRunner
from servers.engine.text_shapes import TextShapes, text_shapes

_NO_LENGTH = 0.5  # a vector shorter than this was not normalised: it is zero


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedStep(LaunchedStep):
    """A launched step, and where its vectors will be once `done` has happened (at once when None)."""

    vectors: torch.Tensor  # [rows, width] float32, on the host
    done: torch.cuda.Event | None


class EncodeStep(nn.Module):
    """The served function: vectors of unit length [B, width] float32, from input_ids and mask [B, T], int64.

    The mask is 1 for a text's own tokens, which stand first, and each row has one at least. `canary` counts the calls
    that began as plain Python.
    """

    def __init__(self, model: nn.Module, pooling: Pooling) -> None:
        super().__init__()
        self.model = model
        self.pooling = pooling
        self.canary = EagerCanary()

    def forward(self, input_ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor]:
        if not torch.compiler.is_compiling():
            self.canary.steps += 1
        hidden = self.model(input_ids=input_ids, attention_mask=mask).last_hidden_state
        return (nn.functional.normalize(pooled(hidden.float(), mask, self.pooling), dim=-1),)


def pooled(hidden: torch.Tensor, mask: torch.Tensor, pooling: Pooling) -> torch.Tensor:
    """One vector [B, width] for each text, from those of its tokens, hidden [B, T, width]: their mean, padding left
    out, or that of the first token."""
    if pooling == "cls":
        return hidden[:, 0]
    own = mask[..., None].to(hidden.dtype)
    return (hidden * own).sum(dim=1) / own.sum(dim=1)


class EncoderRunner(StepRunner):
    """Owns an encoder and its compiled step. Every method belongs to the device thread."""

    def __init__(self, arm: ArmConfig, recorder: CompileRecorder) -> None:
        super().__init__(arm, recorder)
        self.shapes: TextShapes = text_shapes(arm.shapes, arm.engine)

    def _build(self) -> None:
        policy = self.arm.compile
        self.model = load_model(self.arm.model)
        if (positions := readable_tokens(self.model)) is not None:
            check_positions(self.arm.model, self.arm.engine, positions)
        if policy.enabled:
            self._selection = select_regions(self.model, policy)
        config = self.model.config.get_text_config()
        self.device = next(self.model.parameters()).device
        self.overlaps = self.device.type == "cuda"
        self.vocab_size = int(config.vocab_size)
        # Models that count positions by their tokens know padding by its id.
        self._padding = int(getattr(config, "pad_token_id", None) or 0)
        compiler_policy.configure_compiler(
            policy,
            planned_shapes=len(list(self.shapes.planned())),
            closed=self.shapes.is_closed(),
            regions=len(self._selection.compiled) or 1,
        )
        step = EncodeStep(self.model, self.arm.model.pooling)
        self._canary = step.canary
        leave_eager(self._selection)
        compiled: Callable[..., Tensors] = step
        if self._selection.compiled:
            self._regions = CompiledRegions(self.model, self._selection, policy)
        else:
            compiled = compiler_policy.compile_step(step, policy)
        self._steps = {"encode": compiled}

    def _too_large(self, why: str) -> str:
        return f"the model does not fit the device ({why}): take a smaller one, or dtype = bfloat16"

    def shape_of(self, step: Step) -> StepShape:
        return self.shapes.encode(len(step.jobs), max(len(job.prompt) for job in step.jobs))

    def launch(self, step: Step, batch_id: int) -> EncodedStep:
        """`step` is on its way. Errors of the device may show here or in `collect`."""
        shape = self.shape_of(step)
        self.recorder.trigger = Trigger(batch_id=batch_id, shape=str(shape), phase="serving")
        started_ns = now_ns()
        try:
            (vectors,) = self.run(step, shape)
            host, done = self._to_host(vectors[: len(step.jobs)])
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            raise
        return EncodedStep(
            step=step,
            answers=(True,) * len(step.jobs),
            shape=shape,
            real_tokens=sum(len(job.prompt) for job in step.jobs),
            batch_id=batch_id,
            start_ns=started_ns,
            compiled=self._note_canary(shape, started_ns, now_ns()),
            vectors=host,
            done=done,
        )

    def collect(self, launched: EncodedStep) -> list[bytes]:
        """The vector of each job of `launched`, once the device has it, as `Finished.vector` carries it; empty where it
        is no vector of unit length: zero, or no number."""
        if launched.done is not None:
            launched.done.synchronize()
        vectors = launched.vectors.numpy()
        lengths = (vectors * vectors).sum(axis=1)
        return [row.tobytes() if length > _NO_LENGTH else b"" for row, length in zip(vectors, lengths, strict=True)]

    def move(self, move: Any) -> None:
        """Nothing moves: a text is held by its one step alone."""

    def _inputs(self, step: Step, shape: StepShape) -> tuple[list[torch.Tensor], Tensors]:
        ids, mask = [], []
        for job in step.jobs:
            rest = shape.length - len(job.prompt)
            ids.append(job.prompt + [self._padding] * rest)
            mask.append([1] * len(job.prompt) + [0] * rest)
        for _ in range(shape.batch - len(step.jobs)):
            # attention over nothing is no number, so a padding row sees one token
            ids.append([self._padding] * shape.length)
            mask.append([1] + [0] * (shape.length - 1))
        return [self._tensor(ids), self._tensor(mask)], ()

    def _mark(self, kind: Kind, varying: list[torch.Tensor], fixed: Tensors) -> None:
        policy, engine = self.arm.compile, self.arm.engine
        if not policy.mark_dynamic:
            return
        low = max(2, self.arm.shapes.min_size)
        rows, promised = policy.batch_bounds or (low, engine.slots), kind not in self._unpromised
        for tensor in varying:
            compiler_policy.mark_dimension(tensor, 0, rows, promised=promised)
            longest = policy.length_bounds or (low, engine.max_prompt_tokens)
            compiler_policy.mark_dimension(tensor, 1, longest, promised=promised)

    def _ran_compiled(self) -> bool:
        began_eagerly = self._canary.ran_eagerly()
        return self._regions.ran_compiled() if self._regions is not None else not began_eagerly
