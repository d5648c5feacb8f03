from __future__ import annotations

from pathlib import Path

import pytest

from analysis.records.run_records import read_run
from benchmarks.analysis import QUANTILES, comparisons, memory_mb, peer, write_run


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("analysis") / "run"
    write_run(place, requests=20_000, tokens=2, seed=1, seconds=600)
    return place


def test_the_run_holds_the_requests_that_were_asked_for(directory: Path) -> None:
    requests = read_run(directory).requests
    assert requests.num_rows == 20_000
    assert requests.column("token_ns").chunk(0)[0].as_py() != []


def test_both_contestants_speak_of_the_same_ratios(directory: Path) -> None:
    own, other = comparisons(directory), peer(directory, 20)
    assert len(own["ratios"]) == len(other["limits"]) == len(QUANTILES)
    for (low, ratio, high), (least, most) in zip(own["ratios"], other["limits"], strict=True):
        assert low < ratio < high
        assert least - 0.02 < ratio < most + 0.02


def test_memory_counts_the_highest_so_far() -> None:
    assert 0 < memory_mb("VmRSS") <= memory_mb("VmHWM")
