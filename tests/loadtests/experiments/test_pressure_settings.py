"""The [pressure] table: what it means, and what is refused in one line."""

import os
import tomllib
from dataclasses import replace
from typing import Any

import pytest

from loadtests.experiments.model import Experiment
from loadtests.experiments.pressure import PressurePhase
from loadtests.experiments.reading import from_table, load
from loadtests.experiments.writing import to_toml
from loadtests.trials import preflight
from servers.fields import ConfigError


def experiment(pressure: dict[str, Any], **more: Any) -> Experiment:
    arms = [{"preset": "eager", "control": True}, {"preset": "eager-padded"}]
    return from_table(
        {"name": "p", "arms": arms, "traffic": {"rate": 1, "duration_s": 100}, "pressure": pressure, **more}
    )


def test_without_it_there_is_no_phase() -> None:
    assert experiment({}).pressure.phases == ()
    assert load("demo").pressure.phases == ()


def test_weights_of_the_table_itself_are_one_phase_over_the_whole_traffic() -> None:
    assert experiment({"memory_share": 0.3, "cpus": 1}).pressure.phases == (PressurePhase(memory_share=0.3, cpus=1.0),)


def test_a_schedule_is_its_phases_in_order_and_reads_back_equal() -> None:
    schedule = [{"end_s": 10, "tenant_rps": 2}, {"start_s": 10, "end_s": 20, "compute_share": 0.5}]
    what = experiment({"schedule": [*schedule, {"start_s": 30, "memory_share": 0.1}]})
    assert [phase.start_s for phase in what.pressure.phases] == [0.0, 10.0, 30.0]
    assert from_table(tomllib.loads(to_toml(what))) == what


@pytest.mark.parametrize(
    ("pressure", "words"),
    [
        ({"memory_share": 1.0}, "pressure.memory_share is 1.0: give a value from 0 to 0.95"),
        ({"compute_share": 1.5}, "pressure.compute_share is 1.5: give a value from 0 to 1"),
        ({"share": 1}, "pressure.share is unknown: pressure takes start_s, end_s, memory_share"),
        ({"memory_share": 0.1, "start_s": 9, "end_s": 9}, "pressure.end_s is 9 but start_s is 9: give a later end"),
        ({"start_s": 9}, "[pressure] has times and nothing that weighs: give memory_share,"),
        ({"memory_share": 0.1, "end_s": 101}, "pressure.end_s is 101 but traffic.duration_s is 100"),
        ({"memory_share": 0.1, "start_s": 100}, "pressure.start_s is 100 but traffic.duration_s is 100"),
        ({"schedule": [{"end_s": 5}]}, "the pressure.schedule from 0 s on has no weight"),
        ({"cpus": 1, "schedule": [{"memory_share": 0.1}]}, "pressure.cpus is 1 beside [[pressure.schedule]]"),
        (
            {"schedule": [{"cpus": 1}, {"start_s": 5, "cpus": 2}]},
            "the pressure.schedule from 0 s on has no end_s and the next starts at 5 s",
        ),
        (
            {"schedule": [{"cpus": 1, "end_s": 6}, {"start_s": 5, "cpus": 2}]},
            "from 0 s on ends at 6 s and the next starts at 5 s: let each end before the next starts",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(pressure: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        experiment(pressure)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_machines_of_others_cannot_be_pressed_alike() -> None:
    external = {"name": "vllm", "kind": "openai", "address": "http://127.0.0.1:9", "model_name": "m"}
    arms = [{"preset": "eager", "control": True}, external]
    with pytest.raises(ConfigError, match='arm "vllm" is external: put the same pressure on all arms by hand'):
        experiment({"memory_share": 0.1}, arms=arms, compare_models=True)


def test_a_limit_that_limits_nothing_is_refused_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    what = experiment({"cpus": 3})
    what = replace(what, traffic=replace(what.traffic, direct=True))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    preflight.check_experiment(what)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    with pytest.raises(ConfigError, match=r"pressure.cpus is 3 but 3 processors are usable: give fewer"):
        preflight.check_experiment(what)
    monkeypatch.delattr(os, "sched_setaffinity")
    with pytest.raises(ConfigError, match="limits no processes: run on Linux"):
        preflight.check_experiment(what)
