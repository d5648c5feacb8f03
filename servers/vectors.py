"""What an engine answers; what an encoder makes of texts alone, in batches of every size that matters, and in float64.

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
from servers.engine.messages import Finished, StepOutput, Submit
from servers.engine.runner import ModelRunner
from servers.engine.scheduler import scheduler_for

Report = Callable[[str, int, int], None]  # what goes on, done, total
Batches = Sequence[tuple[int, ...]]  # the numbers of the texts of each batch


def ask(
    runner: ModelRunner | EncoderRunner, requests: Sequence[Submit], *, slots: int = 0
) -> tuple[dict[str, list[int]], dict[str, Finished]]:
    """Return the tokens of each request and how it ended, as the serving engine answers them; `slots` as for `serve`.

    A batch of texts arrives at once and leaves at once. Raises RuntimeError, with the engine's own words, when a
    request fails; one that a strict arm refuses has ended so.
    """
    arm = runner.arm.replace(engine=runner.arm.engine.replace(max_wait_ms=0.0))
    engine = Engine(scheduler_for(arm), runner, runner.recorder.drain)
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    ended: dict[str, Finished] = {}
    for output in serve(engine, requests, slots=slots):
        if isinstance(output, StepOutput):
            for name, token in output.tokens:
                tokens[name].append(token)
            ended |= {finished.request_id: finished for finished in output.finished}
    for name, finished in ended.items():
        if finished.status not in ("OK", REFUSED) and finished.reason != "embedded":
            raise RuntimeError(f"request {name} ended {finished.status}: {finished.message}")
    return tokens, ended


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

    Raises RuntimeError when a request fails or a batch is split; UnforeseenShapeError, once all were asked, when a
    strict arm refuses any.
    """
    vectors: list[bytes] = []
    refused: list[str] = []
    total = len(rows_of(batches))
    for batch in batches:
        requests = [
            Submit(request_id=str(place), prompt=list(texts[text]), max_tokens=0, recv_ns=now_ns())
            for place, text in enumerate(batch)
        ]
        _, ended = ask(runner, requests)
        for place, text in enumerate(batch):
            finished = ended[str(place)]
            if finished.status == REFUSED:
                company = "alone" if len(batch) == 1 else f"in a batch of {len(batch)}"
                refused.append(f"text {text} ({len(texts[text])} tokens, {company}): {finished.message}")
            elif finished.timing.batch_size != len(batch):
                raise RuntimeError(f"the engine made a batch of {finished.timing.batch_size} of {len(batch)} texts")
            vectors.append(finished.vector)
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
