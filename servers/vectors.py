"""What an encoder's arm makes of texts, alone and in batches of every size that matters, and what float64 would have.

The part of parity (servers/parity.py) that is about encoders. Nothing is judged here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from servers.clock import now_ns
from servers.compiler.policy import UnforeseenShapeError
from servers.compiler.recorder import CompileRecorder
from servers.config import ArmConfig, Pooling
from servers.engine.borders import batch_borders
from servers.engine.encoder import EncoderRunner, EncodeStep
from servers.engine.engine import REFUSED, Arrivals, Engine
from servers.engine.messages import Submit

Report = Callable[[str, int, int], None]  # what goes on, done, total


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """Which texts stand together: the numbers of the texts of each batch."""

    batches: tuple[tuple[int, ...], ...]

    @property
    def rows(self) -> list[tuple[int, int]]:
        """(text, size of its batch) for each row of the vectors, in order."""
        return [(text, len(batch)) for batch in self.batches for text in batch]


def make_batches(arms: Sequence[ArmConfig], texts: int) -> Batches:
    """Every one of `texts` alone, and then together with others, in batches of every size at which an arm changes its
    shape, until each has been in one."""
    sizes = sorted(frozenset[int]().union(*map(batch_borders, arms)) - {1})
    batches: list[tuple[int, ...]] = [(text,) for text in range(texts)]
    at = turn = 0
    while sizes and (turn < len(sizes) or at < texts):
        size = sizes[turn % len(sizes)]
        batches.append(tuple((at + place) % texts for place in range(size)))
        at, turn = at + size, turn + 1
    return Batches(batches=tuple(batches))


def served_vectors(
    arm: ArmConfig,
    runner: EncoderRunner,
    recorder: CompileRecorder,
    texts: Sequence[Sequence[int]],
    batches: Batches,
    report: Report,
) -> np.ndarray[Any, Any]:
    """The vectors [rows, width] float32 that the engine itself gives. Rows of a text that the model gives no direction
    are no number.

    Raises RuntimeError, with the engine's own words, when a request ends in another way or a batch is torn apart;
    UnforeseenShapeError, once all were asked, when a strict arm refuses any.
    """
    # each batch is handed over at once and leaves at once
    arm = replace(arm, engine=replace(arm.engine, max_wait_ms=0.0))
    engine, arrivals = Engine(arm, runner, recorder.drain), Arrivals()
    vectors: dict[str, bytes] = {}
    refused: list[str] = []
    total, row = len(batches.rows), 0
    for batch in batches.batches:
        for text in batch:
            ids = list(texts[text])
            arrivals.put(Submit(request_id=str(row), prompt=ids, max_tokens=0, recv_ns=now_ns()))
            row += 1
        arrivals.take(engine)
        while not engine.idle:
            outputs, _ = engine.advance(arrivals)
            for output in outputs:
                if output.step is not None and output.step.batch != len(batch):
                    raise RuntimeError(f"the engine made a batch of {output.step.batch} of {len(batch)} texts")
                for finished in output.finished:
                    if finished.status == REFUSED:
                        text, size = batches.rows[int(finished.request_id)]
                        company = "alone" if size == 1 else f"in a batch of {size}"
                        refused.append(f"text {text} ({len(texts[text])} tokens, {company}): {finished.message}")
                        continue
                    if finished.reason != "embedded":
                        raise RuntimeError(f"text {finished.request_id} ended {finished.status}: {finished.message}")
                    vectors[finished.request_id] = finished.vector
        report("embedding", row, total)
    if refused:
        raise UnforeseenShapeError(f"{len(refused)} of {total} vectors are refused, first of {refused[0]}")
    width = max(map(len, vectors.values())) // 4
    unknown = np.full(width, np.nan, dtype=np.float32).tobytes()
    flat = b"".join(vectors[str(number)] or unknown for number in range(total))
    return np.frombuffer(flat, dtype=np.float32).reshape(total, width)


@torch.no_grad()
def reference_vectors(
    model: nn.Module, pooling: Pooling, texts: Sequence[Sequence[int]], exactly: Any, report: Report
) -> np.ndarray[Any, Any]:
    """The vectors [texts, width] float64 of each text alone, without padding. The model's weights are widened.

    Inside of `exactly()` nothing is rounded to float32.
    """
    step = EncodeStep(model.double(), pooling)
    device = next(model.parameters()).device
    rows = []
    for number, text in enumerate(texts):
        ids = torch.tensor([list(text)], device=device)
        with exactly():
            (vector,) = step(ids, torch.ones_like(ids))
        if vector.dtype != torch.float64:
            raise RuntimeError(
                f"the reference came out as {vector.dtype}: the model rounds where it cannot be kept from it"
            )
        rows.append(vector[0].cpu().numpy())
        report("float64", number + 1, len(texts))
    return np.stack(rows)
