import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from loadtests.page import feed as feed_module
from loadtests.page.feed import Feed, Listener
from loadtests.page.state import RunState
from tests.fakes.patience import PATIENCE_S, wait_for
from tests.fakes.watched import WatchedRun


@pytest.fixture
def run(tmp_path: Path) -> WatchedRun:
    return WatchedRun(folder=tmp_path / "run")


class CountedState(RunState):
    """Counts how often it was read."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir)
        self.reads = 0

    def refresh(self) -> None:
        self.reads += 1
        super().refresh()


def next_of(listener: Listener | None) -> dict[str, Any]:
    assert listener is not None
    message = listener.next(20.0)
    assert message is not None
    assert message.startswith(b"data: ")
    assert message.endswith(b"\n\n")
    assert message.count(b"\n") == 2
    told: dict[str, Any] = json.loads(message[6:])
    return told


def test_a_listener_is_told_all_and_then_what_changed(run: WatchedRun) -> None:
    run.minutes(1)
    feed = Feed(RunState(run.folder), every_s=0.02)
    with feed.listening() as listener:
        first = next_of(listener)
        assert set(first) == {"run", "now", "look", "search", "compiles", "notes", "series", "last"}
        run.second()
        run.status()
        series: dict[str, Any] = {}
        while not {"load", "bed"} <= set(series):
            told = next_of(listener)
            assert "run" not in told
            series |= told["series"]
        assert series["load"][0] == 60
        with feed.listening() as other:
            assert len(next_of(other)["series"]["load"][1]) == 61


def test_nothing_is_read_while_nobody_listens(run: WatchedRun) -> None:
    state = CountedState(run.folder)
    feed = Feed(state, every_s=0.01)
    time.sleep(0.1)
    assert state.reads == 0
    with feed.listening() as listener:
        next_of(listener)
    assert feed.listeners == 0
    reads = state.reads
    time.sleep(0.1)
    assert state.reads <= reads + 1


def test_the_last_state_is_told_and_said_to_be_the_last(run: WatchedRun) -> None:
    feed = Feed(RunState(run.folder), every_s=60.0)
    with feed.listening() as listener:
        assert not next_of(listener)["last"]
        run.end()
        feed.finish()
        told = next_of(listener)
        assert told["last"]
        assert told["now"]["ended"]["report"]
        assert feed.ended.wait(PATIENCE_S)


def test_a_browser_that_falls_behind_is_let_go(run: WatchedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "MOST_LISTENERS", 2)
    feed = Feed(RunState(run.folder), every_s=0.005)
    with feed.listening() as slow, feed.listening() as other, feed.listening() as third:
        assert third is None
        assert slow is not None
        assert other is not None
        wait_for(lambda: slow.lost, sleep=other.next, every_s=0.01)
        assert not other.lost


def test_what_cannot_be_read_ends_no_feed(run: WatchedRun, capsys: pytest.CaptureFixture[str]) -> None:
    class Broken(RunState):
        def refresh(self) -> None:
            raise RuntimeError("no such thing")

    feed = Feed(Broken(run.folder), every_s=0.01)
    with feed.listening() as listener:
        for _ in range(3):
            next_of(listener)
    assert capsys.readouterr().err.count("RuntimeError: no such thing") == 1
    assert threading.active_count() > 1
