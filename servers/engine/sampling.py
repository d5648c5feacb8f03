"""Pick the next token of each row on the device: greedy, temperature, top-k, top-p, seeded per request.

A draw is one number in [0, 1) for each row, found on the host from the request's seed and the token's index, so an
answer does not depend on which requests shared its batches, and nothing about a draw has to come back from the device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from servers.engine.scheduler import Job

_PARTS = 64


def largest(logits: torch.Tensor) -> torch.Tensor:
    """The index [B] of the largest of each row's logits [B, vocab], the first of equals.

    Few long rows keep a GPU's argmax to few processors; in two stages the same takes a fifth of the time.
    """
    batch, size = logits.shape
    if not logits.is_cuda or size % _PARTS:
        return logits.argmax(dim=-1)
    highest, place = logits.reshape(batch, _PARTS, size // _PARTS).max(dim=-1)
    part = highest.argmax(dim=-1, keepdim=True)
    index: torch.Tensor = part * (size // _PARTS) + place.gather(-1, part)
    return index[:, 0]


def is_greedy(jobs: Sequence[Job]) -> bool:
    """Whether no job draws."""
    return all(job.temperature <= 0 for job in jobs)


def draw_table(jobs: Sequence[Job], rows: Sequence[int], batch: int) -> list[list[float]]:
    """Temperature, top_k, top_p and draw [4][batch], where `rows[i]` belongs to `jobs[i]`; the other rows are greedy.

    Temperature 0 is greedy, top_k and top_p 0 are off.
    """
    table = [[0.0] * batch for _ in range(4)]
    for job, row in zip(jobs, rows, strict=True):
        values = (job.temperature, float(job.top_k), job.top_p, uniform(job.seed, job.launched - 1))
        for column, value in zip(table, values, strict=True):
            column[row] = value
    return table


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) that belongs to the `index`-th token of an answer with `seed`; 24 bits, exact in float32."""
    key = seed.to_bytes(8, "little", signed=seed < 0)
    digest = hashlib.blake2b(index.to_bytes(8, "little", signed=True), digest_size=8, key=key).digest()
    return (int.from_bytes(digest, "little") >> 40) / (1 << 24)


def choose(logits: torch.Tensor, greedy: torch.Tensor, draws: torch.Tensor, *, ranked: bool) -> torch.Tensor:
    """Return token ids [B] from logits [B, vocab], their argmax [B] and a `draw_table` float32 [4, B].

    Rows with a temperature take the token at which the cumulative probability passes the row's draw. `ranked` says
    that some row has a top_k or top_p, which needs the vocabulary in order of probability: the top_k first, of those
    the smallest set that holds top_p.
    """
    temperature, top_k, top_p, numbers = draws
    scaled = logits.float() / temperature.clamp_min(1e-6)[:, None]
    if not ranked:
        tokens = _first_above(scaled.softmax(dim=-1).cumsum(dim=-1), numbers)
        return torch.where(temperature > 0, tokens, greedy)
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(ordered.shape[1], device=ordered.device)
    limit = torch.where(top_k > 0, top_k, float(ordered.shape[1]))[:, None]
    probabilities = ordered.masked_fill(rank >= limit, -torch.inf).softmax(dim=-1)
    mass = torch.where((top_p > 0) & (top_p < 1), top_p, 2.0)[:, None]
    # a token stays while the mass before it is below top_p, so the first always stays
    kept = probabilities.masked_fill(probabilities.cumsum(dim=-1) - probabilities >= mass, 0.0)
    place = torch.minimum(_first_above(kept.cumsum(dim=-1), numbers), (kept > 0).sum(dim=-1) - 1)
    tokens = order.gather(1, place[:, None])[:, 0]
    return torch.where(temperature > 0, tokens, greedy)


def _first_above(cumulative: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Return the index [B] of the first entry above `uniform` × the row's total, for rising rows [B, n]."""
    target = uniform[:, None] * cumulative[:, -1:]
    chosen = torch.searchsorted(cumulative, target, right=True)[:, 0]
    return chosen.clamp_max(cumulative.shape[1] - 1)
