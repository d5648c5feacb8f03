"""What an encoder's arm makes of texts, alone and in batches of every size that matters, and what float64 would make.

The part of parity (servers/parity.py) that is about encoders. Nothing is judged here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from servers.clock import now_ns
from servers.compiler.policy import UnforeseenShapeError
from servers.config import Pooling
from servers.engine.encoder import EncoderRunner, EncodeStep
from servers.engine.engine import REFUSED, Engine, serve
from servers.engine.messages import StepOutput, Submit
from servers.engine.scheduler import Batcher

Report = Callable[[str, int, int], None]  # what goes on, done, total
Batches = Sequence[tuple[int, ...]]  # the numbers of the texts of each batch


def make_batches(slots: int, texts: int) -> Batches:
    """Put each of `texts` alone, then with others, in batches of each power of two, one more, and all `slots`."""
    powers = [1 << power for power in range(slots.bit_length())]
    sizes = sorted({slots, *powers, *(size + 1 for size in powers if size < slots)} - {1})
    batches: list[tuple[int, ...]] = [(text,) for text in range(texts)]
    at = turn = 0
    while sizes and (turn < len(sizes) or at < texts):
        size = sizes[turn % len(sizes)]
        batches.append(tuple((at + place) % texts for place in range(size)))
        at, turn = at + size, turn + 1
    return batches


def rows_of(batches: Batches) -> list[tuple[int, int]]:
    """Return (text, size of its batch) for each row of the vectors, in order."""
    return [(text, len(batch)) for batch in batches for text in batch]


def served_vectors(
    runner: EncoderRunner, texts: Sequence[Sequence[int]], batches: Batches, report: Report
) -> np.ndarray[Any, Any]:
    """Return the vectors [rows, width] float32 that the serving engine gives; NaN where a vector has no direction.

    Raises RuntimeError, with the engine's own words, when a request ends in another way or a batch is split;
    UnforeseenShapeError, once all were asked, when a strict arm refuses any.
    """
    # each batch arrives at once and leaves at once
    engine = Engine(Batcher(runner.arm.engine.replace(max_wait_ms=0.0)), runner, runner.recorder.drain)
    vectors: list[bytes] = []
    refused: list[str] = []
    total = len(rows_of(batches))
    for batch in batches:
        own: dict[str, bytes] = dict.fromkeys(map(str, range(len(batch))), b"")
        requests = [
            Submit(request_id=name, prompt=list(texts[text]), max_tokens=0, recv_ns=now_ns())
            for name, text in zip(own, batch, strict=True)
        ]
        for output in serve(engine, requests):
            if not isinstance(output, StepOutput):
                continue
            if output.step is not None and output.step.batch != len(batch):
                raise RuntimeError(f"the engine made a batch of {output.step.batch} of {len(batch)} texts")
            for finished in output.finished:
                text = batch[int(finished.request_id)]
                if finished.status == REFUSED:
                    company = "alone" if len(batch) == 1 else f"in a batch of {len(batch)}"
                    refused.append(f"text {text} ({len(texts[text])} tokens, {company}): {finished.message}")
                elif finished.reason != "embedded":
                    raise RuntimeError(f"text {text} ended {finished.status}: {finished.message}")
                own[finished.request_id] = finished.vector
        vectors += own.values()
        report("embedding", len(vectors), total)
    if refused:
        raise UnforeseenShapeError(f"{len(refused)} of {total} vectors are refused, first of {refused[0]}")
    width = max(map(len, vectors)) // 4
    unknown = np.full(width, np.nan, dtype=np.float32).tobytes()
    return np.frombuffer(b"".join(vector or unknown for vector in vectors), dtype=np.float32).reshape(total, width)


@torch.no_grad()
def reference_vectors(
    model: nn.Module, pooling: Pooling, texts: Sequence[Sequence[int]], report: Report
) -> np.ndarray[Any, Any]:
    """Return the vectors [texts, width] float64 of each text alone, without padding. The model's weights are widened.

    Call it where nothing is rounded to float32.
    """
    step = EncodeStep(model.double(), pooling)
    device = next(model.parameters()).device
    rows = []
    for number, text in enumerate(texts):
        ids = torch.tensor([list(text)], device=device)
        (vector,) = step(ids, torch.ones_like(ids))
        rows.append(in_float64(vector[0]))
        report("float64", number + 1, len(texts))
    return np.stack(rows)


def in_float64(values: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return `values` as an array. Raises RuntimeError when a model has rounded them."""
    if values.dtype != torch.float64:
        raise RuntimeError(
            f"the reference came out as {values.dtype}: the model rounds where it cannot be prevented from it"
        )
    return values.cpu().numpy()
