"""What is planted is there, in the arm that is meant and in no other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.planted_arm import plant, planted_in
from servers.engine.engine import Engine
from servers.engine.runner import ModelRunner


class Clock:
    """Time that passes when somebody waits for it, and a millisecond at every look."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def perf_counter(self) -> float:
        self._now_s += 0.001
        return self._now_s

    def sleep(self, seconds: float) -> None:
        self._now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of an engine whose steps take 10 ms, which plant() changes until the test is over."""
    clock = Clock()

    def advance(engine: Any, arrivals: Any) -> Any:
        clock.sleep(0.01)
        return (["a token"],)

    monkeypatch.setattr("benchmarks.planted_arm.time", clock)
    monkeypatch.setattr(Engine, "advance", advance)
    monkeypatch.setattr(ModelRunner, "memory_bytes", lambda runner: {})
    return clock


def step_s(clock: Clock) -> float:
    began_s = clock.perf_counter()
    Engine.advance(None, [])  # type: ignore[arg-type]
    return clock.perf_counter() - began_s


def test_an_arm_has_the_faults_that_are_planted_in_it() -> None:
    words = ["serve", "--replica", "decode-plus-5-1", "--port", "0"]
    assert planted_in("slow:decode=2;decode-plus-5:decode=1.05,memory=1.3", words) == {"decode": 1.05, "memory": 1.3}
    assert planted_in("slow:decode=2", words) == {}
    assert planted_in("slow:decode=2", ["serve"]) == {}
    assert planted_in("decode=1.1", words) == planted_in("decode=1.1", ["serve"]) == {"decode": 1.1}
    assert planted_in("", words) == {}


def test_steps_last_as_much_longer_as_planted(clock: Clock) -> None:
    plant({"decode": 3.0})
    assert step_s(clock) == pytest.approx(0.036, abs=0.005)


def test_the_engine_stops_once_in_a_while(clock: Clock) -> None:
    plant({"stall_s": 2.0, "every_s": 300.0})
    assert step_s(clock) < 0.1
    clock.sleep(300.0)
    assert step_s(clock) == pytest.approx(2.0, abs=0.1)
    assert step_s(clock) < 0.1


@pytest.mark.usefixtures("clock")
def test_memory_is_held_once_and_only_where_it_is_planted(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[float] = []
    monkeypatch.setattr("benchmarks.planted_arm._weight", lambda runner, times: made.append(times))
    runner: Any = SimpleNamespace(device=torch.device("cpu"))
    plant({"decode": 1.1})
    ModelRunner.memory_bytes(runner)
    assert made == []
    plant({"memory": 1.3})
    ModelRunner.memory_bytes(runner)
    ModelRunner.memory_bytes(runner)
    assert made == [1.3]
