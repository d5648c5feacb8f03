from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.traffic import (
    WORKLOADS,
    Rows,
    churn_set,
    decode_set,
    first_seconds,
    mixed_lengths,
    mixed_set,
    paced,
    trace_rows,
)
from servers.fields import ConfigError


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def rows(seconds: list[float], outputs: list[int]) -> Rows:
    return Rows(
        offset_ns=np.array([int(item * 1e9) for item in seconds]),
        input_tokens=np.full(len(seconds), 5),
        output_tokens=np.array(outputs),
    )


def test_prompts_are_fresh_random_ids_of_the_vocabulary() -> None:
    first = decode_set(WORKLOADS["full"], 3, 259, rng(1))
    assert [len(request.prompt) for request in first] == [128] * 3
    assert len({tuple(request.prompt) for request in first + decode_set(WORKLOADS["full"], 3, 259, rng(2))}) == 6
    ids = {token for request in first for token in request.prompt}
    assert min(ids) >= 3
    assert max(ids) <= 258
    assert len(ids) > 100


def test_mixed_lengths_follow_the_lognormal_law_within_their_limits() -> None:
    work = WORKLOADS["full"]
    drawn = np.concatenate([mixed_lengths(work, rng(seed)) for seed in range(50)])
    assert (drawn.min(), drawn.max()) == (8, 1024)
    assert 230 < np.median(drawn) < 260  # exp(5.5) = 245
    made = mixed_set(work, 259, rng())
    assert len(made) == 96
    assert {request.max_tokens for request in made} == {128}


def test_churn_reaches_the_limits_of_the_engine() -> None:
    made = churn_set(50, max_prompt=40, max_new=12, vocab_size=259, rng=rng())
    lengths = {len(request.prompt) for request in made}
    assert {min(lengths), max(lengths)} == {1, 40}
    assert {request.max_tokens for request in made} <= set(range(1, 13))


def test_a_paced_trace_asks_the_given_share() -> None:
    trace = rows([0, 1, 2, 4, 8, 9], [10, 10, 10, 10, 10, 10])
    # Half of 8 tokens/s for 10 s is 40 tokens: four requests, whose 4 s become 10.
    kept, scale = paced(trace, tokens_per_s=8, share=0.5, duration_s=10)
    assert scale == pytest.approx(2.5)
    assert kept.offset_ns.tolist() == [0, 2_500_000_000, 5_000_000_000, 10_000_000_000]


@pytest.mark.parametrize(
    ("tokens_per_s", "message"), [(100, "the trace has 6 requests with 60 output tokens"), (1, "hold 1 request at")]
)
def test_a_trace_that_cannot_be_paced_says_why(tokens_per_s: float, message: str) -> None:
    trace = rows([0, 1, 2, 4, 8, 9], [10, 10, 10, 10, 10, 10])
    with pytest.raises(ConfigError, match=message):
        paced(trace, tokens_per_s=tokens_per_s, share=1.0, duration_s=10)


def test_the_first_seconds_are_cut_after_scaling() -> None:
    kept = first_seconds(rows([0, 1, 2, 4], [1, 2, 3, 4]), duration_s=4.0, time_scale=2.0)
    assert kept.offset_ns.tolist() == [0, 2_000_000_000]
    assert kept.output_tokens.tolist() == [1, 2]


def test_a_trace_is_clipped_to_what_the_engine_takes(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.0,400,10\n2023-11-16 18:15:47.5,30,900\n"
    )
    found = trace_rows(str(path), max_prompt=64, max_new=48)
    assert found.input_tokens.tolist() == [64, 30]
    assert found.output_tokens.tolist() == [10, 48]
    assert [len(request.prompt) for request in found.requests(259, rng())] == [64, 30]
