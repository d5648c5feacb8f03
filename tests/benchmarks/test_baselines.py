from __future__ import annotations

import multiprocessing

import pytest

from benchmarks.baselines import KINDS, Runs, answer, load_plain, questions
from servers.config import ModelConfig

PROMPTS = [[5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 15, 16]]


@pytest.fixture(scope="module")
def runs() -> Runs:
    return Runs(load_plain(ModelConfig(device="cpu")))


@pytest.mark.parametrize("kind", KINDS)
def test_every_baseline_produces_all_its_tokens(kind: str, runs: Runs) -> None:
    """A run that gives fewer tokens than were asked raises."""
    assert runs.run(questions(kind, PROMPTS, new_tokens=8)) > 0


def test_the_plain_model_runs_without_our_attention(runs: Runs) -> None:
    assert runs.model.config._attn_implementation == "sdpa"


def test_a_baseline_that_cannot_start_says_why() -> None:
    ours, theirs = multiprocessing.Pipe()
    answer(theirs, ModelConfig(id="/nowhere/at/all", device="cpu"), 0)
    assert "/nowhere/at/all" in ours.recv()


def test_a_question_that_fails_leaves_the_next_one_answered(runs: Runs) -> None:
    ours, theirs = multiprocessing.Pipe()
    ours.send(questions("continuous", [[5]], new_tokens=0))
    ours.send(questions("eager", PROMPTS, new_tokens=8))
    ours.send(None)
    answer(theirs, ModelConfig(device="cpu"), 0)
    assert ours.recv() == runs.model.config.vocab_size
    assert isinstance(ours.recv(), str)
    assert ours.recv() > 0
