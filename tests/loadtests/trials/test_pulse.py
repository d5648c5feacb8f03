"""Who is told that a replica is gone, and that it is back."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from loadtests.trials import pulse
from loadtests.trials.pulse import Pulse
from tests.fakes.patience import wait_for


def told(monkeypatch: pytest.MonkeyPatch, seen: str) -> list[str]:
    """What is told of a replica that is there (+) or not (-) at each look."""
    looks: Iterator[str] = iter(seen)
    monkeypatch.setattr(pulse, "_EVERY_S", 0.001)
    monkeypatch.setattr(pulse, "arm_channel", lambda *_, **__: SimpleNamespace(close=lambda: None))
    ended = []

    def is_gone(_: object) -> bool:
        look = next(looks, None)
        if look is None:
            ended.append(True)
        return look == "-"

    monkeypatch.setattr(pulse, "is_gone", is_gone)
    heard: list[str] = []
    asked = Pulse(
        {"new-0": "127.0.0.1:1"},
        gone=lambda name: heard.append(f"{name} gone"),
        back=lambda name: heard.append(f"{name} back"),
    )
    wait_for(lambda: ended, every_s=0.005)
    asked.stop()
    return heard


def test_a_connection_that_is_lost_once_is_no_death(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(monkeypatch, "++-+-+") == []


def test_each_death_and_each_return_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(monkeypatch, "+----++--+") == ["new-0 gone", "new-0 back", "new-0 gone", "new-0 back"]
