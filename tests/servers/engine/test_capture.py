from __future__ import annotations

import gc

import pytest

from servers.engine.capture import uncollected


class Cycle:
    """Garbage that only a collection finds."""

    def __init__(self, destroyed: list[str]) -> None:
        self.itself = self
        self.destroyed = destroyed

    def __del__(self) -> None:
        self.destroyed.append("destroyed")


def make_garbage() -> list[list[int]]:
    """More containers than a collection waits for."""
    return [[number] for number in range(10 * gc.get_threshold()[0])]


def test_nothing_is_destroyed_while_a_graph_is_recorded() -> None:
    destroyed: list[str] = []
    with uncollected():
        Cycle(destroyed)
        make_garbage()
        assert destroyed == []
    gc.collect()
    assert destroyed == ["destroyed"]


def test_collecting_goes_on_after_a_recording_that_failed() -> None:
    with pytest.raises(ValueError, match="broke"), uncollected():
        raise ValueError("the recording broke")
    assert gc.isenabled()


def test_a_process_that_collects_nothing_stays_so() -> None:
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
