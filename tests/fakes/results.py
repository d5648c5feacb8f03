"""Result files of vLLM's benchmark, of made-up requests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

COUNTER_S = 5_000.25  # what a performance counter shows


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """One request: when it was due, and its waits to be sent, for its first token, and between tokens; seconds."""

    due_s: float
    late_s: float = 0.0002
    first_s: float = 0.1
    gaps_s: Sequence[float] = (0.02, 0.02, 0.02)
    prompt_tokens: int = 24
    error: str = ""

    @property
    def sent_s(self) -> float:
        return self.due_s + self.late_s

    @property
    def took_s(self) -> float:
        return self.first_s + sum(self.gaps_s)

    @property
    def tokens(self) -> int:
        return 0 if self.error else 1 + len(self.gaps_s)


def traffic(
    seconds: float = 660.0, *, rate: float = 4.0, seed: int = 1, slower: float = 1.0, tokens: int = 4
) -> list[Sent]:
    """Return Poisson arrivals of a few tokens whose latency is lognormal."""
    rng = np.random.default_rng(seed)
    due = np.cumsum(rng.exponential(1.0 / rate, int(seconds * rate)))
    first = slower * rng.lognormal(np.log(0.1), 0.2, due.size)
    gaps = slower * rng.lognormal(np.log(0.02), 0.1, (due.size, tokens - 1))
    return [
        Sent(due_s=float(at), first_s=float(one), gaps_s=own.tolist(), prompt_tokens=20 + place % 9)
        for place, (at, one, own) in enumerate(zip(due, first, gaps, strict=True))
    ]


def in_turn(requests: Sequence[Sent]) -> list[Sent]:
    """Return the same requests as two users send them who wait for their answers."""
    free = [0.0, 0.0]
    sent = []
    for request in requests:
        user = int(np.argmin(free))
        sent.append(replace(request, due_s=free[user], late_s=0.0))
        free[user] += request.took_s + 0.0005
    return sent


def vllm(requests: Sequence[Sent], **changes: Any) -> dict[str, Any]:
    """Return what `vllm bench serve --save-result --save-detailed` of vLLM 0.32 writes."""
    failed = sum(bool(request.error) for request in requests)
    return {
        **{"date": "20260102-030405", "endpoint_type": "openai", "backend": "openai", "label": None},
        **{"model_id": "tiny", "tokenizer_id": "tiny", "num_prompts": len(requests)},
        **{"request_rate": 4.0, "burstiness": 1.0, "max_concurrency": None, "request_throughput": 4.0},
        **{"completed": len(requests) - failed, "failed": failed, "mean_ttft_ms": 1.0},
        "duration": max(request.sent_s + request.took_s for request in requests),
        "input_lens": [request.prompt_tokens for request in requests],
        "output_lens": [request.tokens for request in requests],
        "ttfts": [0.0 if request.error else request.first_s for request in requests],
        "itls": [[] if request.error else list(request.gaps_s) for request in requests],
        "latencies": [0.0 if request.error else request.took_s for request in requests],
        "start_times": [COUNTER_S + request.sent_s for request in requests],
        "queue_times": [request.late_s for request in requests],
        "generated_texts": ["word " * request.tokens for request in requests],
        "errors": [request.error for request in requests],
    } | changes


def write(path: Path, content: Any) -> Path:
    """Write the content as JSON, or as a line of JSON for each item into a .jsonl file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = content if path.suffix == ".jsonl" else [content]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
