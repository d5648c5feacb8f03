"""What is written down of weights that change while a run goes on: the real Envoy, and changes of every origin."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from analysis.records.weight_journal import BY_HAND, WeightChange, append, read_weights
from loadtests.trials import weight_watch
from loadtests.trials.weight_watch import WeightWatch, in_words
from servers.clock import now_ns
from servers.splitter.weights import Shares, reshare
from tests.servers.splitter.house import House, Loop

CONFIGURED = Shares(weights={"eager": 9, "compiled": 1, "dark": 0}, shadows={"dark": 25.0})


@pytest.fixture(scope="module")
def loop() -> Iterator[Loop]:
    running = Loop()
    yield running
    running.close()


@pytest.fixture
def house(loop: Loop, tmp_path: Path) -> Iterator[House]:
    weights, shadows = CONFIGURED.weights, CONFIGURED.shadows
    built = House(loop, tmp_path / "house", dict.fromkeys(weights, 1), weights=weights, shadows=shadows)
    built.envoy.wait_ready(20)
    yield built
    built.close()


@pytest.fixture
def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WeightWatch:
    monkeypatch.setattr(weight_watch, "_EVERY_NS", 0)
    return WeightWatch(tmp_path, trial=2, configured=CONFIGURED)


def test_a_change_by_hand_is_written_down_once_with_what_was_before(
    house: House, watch: WeightWatch, tmp_path: Path
) -> None:
    admin = house.envoy.admin
    assert watch.poll(admin) is None
    assert read_weights(tmp_path) == ()
    before_ns = now_ns()
    reshare(admin, weights={"compiled": 9})
    change = watch.poll(admin)
    assert change is not None
    assert watch.poll(admin) is None
    start, written = read_weights(tmp_path)
    assert written == change
    assert (start.weights, start.shadows, start.action) == (CONFIGURED.weights, CONFIGURED.shadows, "start")
    assert (change.weights, change.action, change.step, change.trial) == (
        {"eager": 9, "compiled": 9, "dark": 0},
        BY_HAND,
        None,
        2,
    )
    assert change.why == "it was eager=9, compiled=1, dark=0, copies of 25 % to dark"
    assert change.done_ns is not None
    assert start.at_ns < change.at_ns <= before_ns < change.done_ns


def test_copies_that_somebody_ends_are_written_down(house: House, watch: WeightWatch) -> None:
    reshare(house.envoy.admin, shadows={"dark": 0})
    change = watch.poll(house.envoy.admin)
    assert change is not None
    assert in_words(change) == "eager=9, compiled=1, dark=0"


def test_what_the_run_wrote_down_or_announced_is_its_own(house: House, watch: WeightWatch, tmp_path: Path) -> None:
    admin = house.envoy.admin
    own = {"eager": 5, "compiled": 5, "dark": 0}
    append(tmp_path, WeightChange(at_ns=now_ns(), weights=own, why="step 2", action="advance", step=1, trial=2))
    assert watch.poll(admin) is None  # the splitter was not told yet
    reshare(admin, weights=own)
    assert watch.poll(admin) is None
    watch.expect({"dark": 0.0})
    reshare(admin, shadows={"dark": 0})
    assert watch.poll(admin) is None
    assert len(read_weights(tmp_path)) == 1
    # What somebody sets next is not earlier than the run's own change.
    reshare(admin, weights={"compiled": 0})
    change = watch.poll(admin)
    assert change is not None
    assert change.at_ns > read_weights(tmp_path)[0].at_ns


def test_a_splitter_that_is_gone_changes_nothing(house: House, watch: WeightWatch, tmp_path: Path) -> None:
    house.envoy.stop(grace_s=0)
    assert watch.poll(house.envoy.admin) is None
    assert read_weights(tmp_path) == ()
