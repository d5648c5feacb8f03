from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.traffic import (
    WORKLOADS,
    mixed_lengths,
    mixed_set,
    trace_rows,
)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_mixed_lengths_follow_the_lognormal_law_within_their_limits() -> None:
    work = WORKLOADS["full"]
    drawn = np.concatenate([mixed_lengths(work, rng(seed)) for seed in range(50)])
    assert (drawn.min(), drawn.max()) == (8, 1024)
    assert 230 < np.median(drawn) < 260  # exp(5.5) = 245
    made = mixed_set(work, 259, rng())
    assert len(made) == 96
    assert {request.max_tokens for request in made} == {128}


def test_a_trace_is_clipped_to_what_the_engine_takes(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.0,400,10\n2023-11-16 18:15:47.5,30,900\n"
    )
    found = trace_rows(str(path), max_prompt=64, max_new=48)
    assert found.input_tokens.tolist() == [64, 30]
    assert found.output_tokens.tolist() == [10, 48]
    assert [len(request.prompt) for request in found.requests(259, rng())] == [64, 30]
