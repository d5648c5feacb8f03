from __future__ import annotations

import os
import signal
from concurrent.futures.process import BrokenProcessPool

import pytest

from benchmarks.baselines import KINDS, Baselines, Runs, load_plain
from servers.config import ModelConfig

PROMPTS = [[5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 15, 16]]


@pytest.fixture(scope="module")
def runs() -> Runs:
    return Runs(load_plain(ModelConfig(device="cpu")))


@pytest.mark.parametrize("kind", KINDS)
def test_every_baseline_produces_all_its_tokens(kind: str, runs: Runs) -> None:
    """A run that gives fewer tokens than were asked raises."""
    assert runs.run(kind, PROMPTS, 8) > 0


def test_the_plain_model_runs_without_our_attention(runs: Runs) -> None:
    assert runs.model.config._attn_implementation == "sdpa"


def test_a_run_that_fails_says_why_and_leaves_the_next_one_to_be_measured(runs: Runs) -> None:
    plain = Baselines(ModelConfig(device="cpu"), threads=1)
    try:
        assert plain.vocab_size == runs.model.config.vocab_size
        with pytest.raises(ValueError, match="max_new_tokens"):
            plain.tokens_per_s("continuous", [[5]], 0)
        assert plain.tokens_per_s("eager", PROMPTS, 8) > 0
        os.kill(plain.pid, signal.SIGKILL)
        with pytest.raises(BrokenProcessPool):
            plain.tokens_per_s("eager", PROMPTS, 8)
    finally:
        plain.close()


def test_a_baseline_that_cannot_start_says_why() -> None:
    plain = Baselines(ModelConfig(id="/nowhere/at/all", device="cpu"))
    try:
        with pytest.raises(Exception, match="/nowhere/at/all"):
            _ = plain.vocab_size
    finally:
        plain.close()
