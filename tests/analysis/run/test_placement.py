"""Which arm had which device, by the experiment, the watcher and the replica."""

from __future__ import annotations

from typing import Any

import pytest

from analysis.run.placement import alone_on, devices_of
from analysis.run.trials import Trial


def trial(**info: Any) -> Trial:
    return Trial(number=1, info=info, start_ns=0, first_ns=0, seconds=60.0, blocks=2, first_block=0)


CARDS = {"devices": {"cuda:0": {"host": "run"}, "cuda:1": {"host": "run"}}}
ON_CARD = {"startup": {"a": {"device": "NVIDIA H200"}}}


@pytest.mark.parametrize(
    ("info", "device"),
    [
        ({"devices": {"a": "cuda:1"}}, "cuda:1"),
        ({"devices": {"a": "cuda"}}, "cuda:0"),
        ({"devices": {"a": "cuda"}, "bed": {"devices": {"cuda:1": {}}}}, "cuda:1"),
        ({"devices": {"a": "auto"}}, "cpu"),
        ({"devices": {"a": "auto"}, "bed": CARDS}, "cuda:0"),
        ({"devices": {"a": "auto"}, **ON_CARD}, "cuda:0"),
        ({"devices": {"a": "auto"}, "bed": CARDS, "startup": {"a": {"device": "cpu"}}}, "cpu"),
        ({"devices": {"a": "cuda"}, "bed": CARDS | {"arms": {"a": "cuda:1"}}}, "cuda:1"),
        ({"devices": {"a": "auto"}, "bed": {"devices": {"cuda:0": {"host": "worker-1"}}}}, "cpu"),
    ],
)
def test_the_replica_the_monitor_and_the_experiment_decide_the_device_in_this_order(
    info: dict[str, Any], device: str
) -> None:
    assert devices_of(trial(**info)) == {"a": device}


def test_two_names_of_one_card_are_one_card() -> None:
    assert alone_on(trial(devices={"a": "cuda", "b": "cuda:0"}), "a") is None
    assert alone_on(trial(devices={"a": "cuda", "b": "cuda:1"}), "a") == "cuda:0"
    assert alone_on(trial(devices={"a": "cpu", "b": "cuda:1"}), "a") is None
