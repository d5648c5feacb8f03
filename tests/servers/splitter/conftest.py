"""Splitters for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.patience import PATIENCE_S
from tests.servers.splitter.house import Build, House, Loop


@pytest.fixture(scope="module")
def loop() -> Iterator[Loop]:
    running = Loop()
    yield running
    running.close()


@pytest.fixture
def build(loop: Loop, tmp_path: Path) -> Iterator[Build]:
    houses: list[House] = []

    def make(replicas: dict[str, int], *, ready: bool = True, **settings: Any) -> House:
        house = House(loop, tmp_path / str(len(houses)), replicas, **settings)
        houses.append(house)
        if ready:
            house.envoy.wait_ready(PATIENCE_S)
        return house

    yield make
    for house in houses:
        house.close()


@pytest.fixture(scope="module")
def shared(loop: Loop, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """Two arms of weights 3 and 1, and one of weight 0. Tests leave it as they found it."""
    house = House(
        loop,
        tmp_path_factory.mktemp("shared"),
        {"eager": 2, "compiled-padded": 1, "idle.arm": 1},
        weights={"eager": 3, "compiled-padded": 1, "idle.arm": 0},
    )
    house.envoy.wait_ready(PATIENCE_S)
    yield house
    house.close()
