"""Arms change devices over trials: every arm has every device once in each group, by the seed alone."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtests.experiments.model import Experiment
from loadtests.experiments.reading import from_table
from loadtests.trials.device_rotation import devices_of, in_trial


def experiment(devices: list[str], *, seed: int = 1, swap: bool = True) -> Experiment:
    presets = ["eager", "compiled-padded", "compiled-naive", "compiled-dynamic"]
    arms = [
        {"name": f"a{index}", "preset": presets[index], "control": index == 0, "device": device}
        for index, device in enumerate(devices)
    ]
    return from_table(
        {
            "name": "x",
            "seed": seed,
            "compare_models": True,
            "arms": arms,
            "traffic": {"rate": 1.0},
            "trials": {"count": 4, "swap_devices": swap},
        }
    )


@settings(max_examples=25)
@given(seed=st.integers(0, 2**40), count=st.integers(2, 4), group=st.integers(0, 5))
def test_every_arm_has_every_device_once_in_a_group(seed: int, count: int, group: int) -> None:
    what = experiment([f"cuda:{number}" for number in range(count)], seed=seed)
    trials = [devices_of(what, trial) for trial in range(group * count + 1, (group + 1) * count + 1)]
    for given_devices in trials:
        assert len(set(given_devices.values())) == count
    for arm in trials[0]:
        assert len({given_devices[arm] for given_devices in trials}) == count
    assert trials == [devices_of(what, trial) for trial in range(group * count + 1, (group + 1) * count + 1)]


def test_the_first_trial_has_either_order_as_often() -> None:
    firsts = Counter(devices_of(experiment(["cuda:0", "cuda:1"], seed=seed), 1)["a0"] for seed in range(100))
    assert 30 < firsts["cuda:0"] < 70


def test_only_devices_of_one_kind_change_places() -> None:
    what = experiment(["cpu", "cuda:0", "cuda:1"])
    seen = [devices_of(what, trial) for trial in (1, 2)]
    assert [row["a0"] for row in seen] == ["cpu", "cpu"]
    assert {row["a1"] for row in seen} == {"cuda:0", "cuda:1"}


def test_arms_on_one_device_stay_together() -> None:
    for trial in (1, 2):
        given_devices = devices_of(experiment(["cuda:0", "cuda:0", "cuda:1"]), trial)
        assert given_devices["a0"] == given_devices["a1"] != given_devices["a2"]


@pytest.mark.parametrize(("devices", "swap"), [(["cuda:0", "cuda:1"], False), (["cpu", "cpu"], True)])
def test_nothing_moves_where_it_is_off_or_all_are_alike(devices: list[str], swap: bool) -> None:
    what = experiment(devices, swap=swap)
    assert [in_trial(what, trial) for trial in (1, 2)] == [what, what]


def test_a_trial_has_its_arms_on_their_devices() -> None:
    what = experiment(["cuda:0", "cuda:1"])
    for trial in (1, 2):
        moved = in_trial(what, trial)
        assert {arm.name: arm.config.model.device for arm in moved.arms} == devices_of(what, trial)
        assert [arm.config.compile for arm in moved.arms] == [arm.config.compile for arm in what.arms]


def test_a_card_without_a_number_is_the_first() -> None:
    what = experiment(["cuda", "cuda:0", "cuda:1"])
    rows = [devices_of(what, trial) for trial in (1, 2)]
    assert all(row["a0"] == row["a1"] != row["a2"] for row in rows)
    assert {row["a0"] for row in rows} == {"cuda", "cuda:1"}
