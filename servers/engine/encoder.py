"""EncoderRunner: whole texts to vectors of unit length, by one function of model, pooling and normalisation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, repeat
from typing import Any

import numpy as np
import torch
from torch import nn

from tailgate.servers.compiler.recorder import EagerCanary
from tailgate.servers.config import Pooling, check_positions
from tailgate.servers.engine.model import readable_tokens
from tailgate.servers.engine.scheduler import Step
from tailgate.servers.engine.shapes import Kind, StepShape
from tailgate.servers.engine.step_runner import StepRunner, Tensors

_NO_LENGTH = 0.5  # a vector shorter than this was not normalised: it is zero


class EncodeStep(nn.Module):
    """The served function: vectors of unit length [B, width] float32, from ids [B, T], int64: the tokens of a text, one
    at least, then -1. The model reads `padding` there. `canary` counts the calls that began as plain Python."""

    def __init__(self, model: nn.Module, pooling: Pooling, padding: int = 0) -> None:
        super().__init__()
        self.model = model
        self.pooling = pooling
        self.padding = padding
        self.canary = EagerCanary()

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor]:
        if not torch.compiler.is_compiling():
            self.canary.steps += 1
        is_own = ids >= 0
        output = self.model(input_ids=ids.where(is_own, self.padding), attention_mask=is_own.to(ids.dtype))
        hidden = output.last_hidden_state.float()
        if self.pooling == "cls":
            vectors = hidden[:, 0]
        else:  # the mean without padding
            own = is_own[..., None].to(hidden.dtype)
            vectors = (hidden * own).sum(dim=1) / own.sum(dim=1)
        return (nn.functional.normalize(vectors, dim=-1),)


class EncoderRunner(StepRunner):
    def _make_steps(self) -> Mapping[str, Callable[..., Tensors]]:
        if (positions := readable_tokens(self.model)) is not None:
            check_positions(self.arm.model, self.arm.engine, positions)
        # Models that count positions by their tokens know padding by its id.
        self._padding = int(getattr(self.model.config.get_text_config(), "pad_token_id", None) or 0)
        step = EncodeStep(self.model, self.arm.model.pooling, self._padding)
        self._canary = step.canary
        return {"encode": step}

    def _answer(self, step: Step, shape: StepShape, places: Sequence[int]) -> torch.Tensor:
        return self.run(step, shape)[0][: len(step.jobs)]

    def _results(self, results: torch.Tensor, places: Sequence[int]) -> list[bytes]:
        """Return vectors as `Finished.vector` carries them; empty where one has no unit length: zero, or no number."""
        vectors = results.numpy()
        lengths = (vectors * vectors).sum(axis=1)
        return [row.tobytes() if length > _NO_LENGTH else b"" for row, length in zip(vectors, lengths, strict=True)]

    def move(self, move: Any) -> None:
        """Do nothing: a text is held by its one step alone."""

    def _inputs(self, step: Step, shape: StepShape) -> tuple[list[torch.Tensor], Tensors]:
        texts = [job.prompt for job in step.jobs]
        # attention over nothing is no number, so a padding row sees one token
        texts += repeat([self._padding], shape.batch - len(texts))
        ids = np.full((shape.batch, shape.length), -1)
        lengths = np.array([len(text) for text in texts])
        ids[np.arange(shape.length) < lengths[:, None]] = np.fromiter(chain.from_iterable(texts), np.int64)
        return [self._tensor(ids)], ()

    def _varying(
        self, kind: Kind, varying: list[torch.Tensor], fixed: Tensors
    ) -> Iterable[tuple[torch.Tensor, int, tuple[int, int]]]:
        engine, low = self.arm.engine, max(2, self.arm.shapes.min_size)
        (ids,) = varying
        yield ids, 0, (low, engine.slots)
        yield ids, 1, (low, engine.max_prompt_tokens)
