"""Pick the next token of each row on the device: greedy, or by temperature and the request's seed.

A draw is one number in [0, 1) for each row, found on the host from the request's seed and the token's index, so an
answer does not depend on which requests shared its batches, and nothing about a draw has to come back from the device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from tailgate.servers.engine.scheduler import Job

_PARTS = 64


def largest(logits: torch.Tensor) -> torch.Tensor:
    """Return the index [B] of the largest of each row's logits [B, vocab], the first of equals.

    On few long rows a GPU's argmax uses few processors; two stages take a fifth of the time.
    """
    batch, size = logits.shape
    if not logits.is_cuda or size % _PARTS:
        return logits.argmax(dim=-1)
    highest, place = logits.reshape(batch, _PARTS, size // _PARTS).max(dim=-1)
    part = highest.argmax(dim=-1, keepdim=True)
    index: torch.Tensor = part * (size // _PARTS) + place.gather(-1, part)
    return index[:, 0]


def is_greedy(jobs: Sequence[Job]) -> bool:
    return all(job.temperature <= 0 for job in jobs)


def draw_table(jobs: Sequence[Job], rows: Sequence[int], batch: int) -> list[list[float]]:
    """Return temperature and draw [2][batch], where `rows[i]` belongs to `jobs[i]`; other rows are greedy (temperature
    0)."""
    table = [[0.0] * batch for _ in range(2)]
    for job, row in zip(jobs, rows, strict=True):
        table[0][row], table[1][row] = job.temperature, uniform(job.seed, job.launched - 1)
    return table


def uniform(seed: int, index: int) -> float:
    """Return a number in [0, 1) for the `index`-th token of an answer with `seed`; 24 bits, exact in float32."""
    key = seed.to_bytes(8, "little", signed=seed < 0)
    digest = hashlib.blake2b(index.to_bytes(8, "little", signed=True), digest_size=8, key=key).digest()
    return (int.from_bytes(digest, "little") >> 40) / (1 << 24)


def choose(logits: torch.Tensor, greedy: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Return token ids [B] from logits [B, vocab], their argmax [B] and a `draw_table` float32 [2, B].

    Rows with a temperature take the token at which the cumulative probability passes the row's draw.
    """
    temperature, numbers = draws
    scaled = logits.float() / temperature.clamp_min(1e-6)[:, None]
    cumulative = scaled.softmax(dim=-1).cumsum(dim=-1)
    target = numbers[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, target, right=True)[:, 0].clamp_max(cumulative.shape[1] - 1)
    return torch.where(temperature > 0, tokens, greedy)
