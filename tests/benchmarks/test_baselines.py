from __future__ import annotations

import pytest

from benchmarks.baselines import KINDS, Runs, load_plain
from servers.config import ModelConfig

PROMPTS = [[5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 15, 16]]


@pytest.fixture(scope="module")
def runs() -> Runs:
    return Runs(load_plain(ModelConfig(device="cpu")))


@pytest.mark.parametrize("kind", KINDS)
def test_every_baseline_produces_all_its_tokens(kind: str, runs: Runs) -> None:
    """A run that gives fewer tokens than were asked raises."""
    assert runs.run(kind, PROMPTS, 8) > 0
