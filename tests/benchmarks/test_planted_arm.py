"""What is planted is there, in the arm that is meant and in no other."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.planted_arm import is_meant, plant, planted
from servers.engine.engine import Engine
from servers.engine.runner import ModelRunner


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine whose steps take 10 ms, which plant() changes until the test is over."""

    def advance(engine: Any, arrivals: Any) -> Any:
        time.sleep(0.01)
        return (["a token"],)

    monkeypatch.setattr(Engine, "advance", advance)
    monkeypatch.setattr(ModelRunner, "memory_bytes", lambda runner: {})


def step_s() -> float:
    began_s = time.perf_counter()
    Engine.advance(None, [])  # type: ignore[arg-type]
    return time.perf_counter() - began_s


def test_faults_are_read_by_name() -> None:
    assert planted("stall_s=2,every_s=300") == {"stall_s": 2.0, "every_s": 300.0}
    assert planted("") == {}


def test_only_replicas_of_the_arm_are_meant() -> None:
    words = ["serve", "--replica", "eager-twin-1", "--port", "0"]
    assert is_meant("eager-twin", words)
    assert is_meant("", words)
    assert not is_meant("eager", words)
    assert not is_meant("eager", ["serve"])


@pytest.mark.usefixtures("quick")
def test_steps_last_as_much_longer_as_planted() -> None:
    plant({"decode": 3.0})
    assert step_s() >= 0.03


@pytest.mark.usefixtures("quick")
def test_the_engine_stops_once_in_a_while() -> None:
    plant({"stall_s": 0.2, "every_s": 1.0})
    time.sleep(1.01)
    assert step_s() >= 0.2
    assert step_s() < 0.2


@pytest.mark.usefixtures("quick")
def test_memory_is_held_once_and_only_where_it_is_planted(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[float] = []
    monkeypatch.setattr("benchmarks.planted_arm._weight", lambda runner, times: made.append(times))
    runner: Any = SimpleNamespace(device=torch.device("cpu"))
    plant({"memory": 1.3})
    ModelRunner.memory_bytes(runner)
    ModelRunner.memory_bytes(runner)
    assert made == [1.3]
