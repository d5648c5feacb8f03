from __future__ import annotations

from contextlib import ExitStack

import pytest

from benchmarks.releases import Lanes, main


def test_runs_side_by_side_share_no_processor() -> None:
    lanes = Lanes(3, [0, 1, 2, 4, 5, 6, 7])
    with ExitStack() as held:
        taken = [held.enter_context(lanes.one()) for _ in range(3)]
    assert [len(lane) for lane in taken] == [2, 2, 2]
    assert len(frozenset[int]().union(*taken)) == 6


def test_a_lane_is_free_again_after_its_run() -> None:
    lanes = Lanes(1, [0, 1])
    for _ in range(2):
        with lanes.one() as lane:
            assert lane == {0, 1}


def test_more_lanes_than_processors_are_an_error_before_anything_runs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--lanes", "100000"])
    assert "100000 lanes on" in capsys.readouterr().err
