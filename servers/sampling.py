"""Pick the next token of each row from its logits: greedy, temperature, top-k, top-p, seeded per request."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from servers.scheduler import Job


def sample(logits: torch.Tensor, jobs: Sequence[Job], generators: dict[str, torch.Generator]) -> list[int]:
    """One token id for each job from logits [B, vocab] (rows beyond the jobs are padding).

    A job with temperature 0 takes the largest logit. Others draw from their own generator, seeded by the request, so
    an answer does not depend on which requests shared its batches.
    """
    rows = logits[: len(jobs)]
    tokens: list[int] = rows.argmax(dim=-1).tolist()
    for index, job in enumerate(jobs):
        if job.temperature > 0:
            tokens[index] = _draw(rows[index], job, generators)
    return tokens


def _draw(logits: torch.Tensor, job: Job, generators: dict[str, torch.Generator]) -> int:
    generator = generators.get(job.request_id)
    if generator is None:
        generator = torch.Generator(device=logits.device)
        generator.manual_seed(job.seed & (2**63 - 1))
        generators[job.request_id] = generator
    probabilities = allowed_probabilities(logits, temperature=job.temperature, top_k=job.top_k, top_p=job.top_p)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def allowed_probabilities(logits: torch.Tensor, *, temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    """Probabilities [vocab] after temperature, then the top_k largest, then the smallest set that holds top_p."""
    scaled = logits.float() / temperature
    if 0 < top_k < scaled.numel():
        threshold = scaled.topk(top_k).values[-1]
        scaled = scaled.masked_fill(scaled < threshold, -torch.inf)
    probabilities = scaled.softmax(dim=-1)
    if 0.0 < top_p < 1.0:
        ordered, order = probabilities.sort(descending=True)
        # a token stays while the mass before it is below top_p, so the first always stays
        dropped = order[ordered.cumsum(dim=-1) - ordered >= top_p]
        probabilities = probabilities.index_fill(0, dropped, 0.0)
    return probabilities
