"""The flags of serving benchmarks become settings with the meaning that they have there."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from loadtests.experiments.field_names import FieldFlags, long_enough, parse_goodput_flag
from loadtests.experiments.reading import from_table
from loadtests.traffic import arrivals
from servers.fields import ConfigError


def changed(traffic: dict[str, Any], **flags: Any) -> dict[str, Any]:
    table: dict[str, Any] = {
        "name": "x",
        "arms": [{"preset": "eager", "control": True}, {"preset": "compiled-naive"}],
        "traffic": dict(traffic),
    }
    FieldFlags(**flags).change(table)
    from_table(table)  # it is an experiment
    return table


def test_no_flag_changes_nothing() -> None:
    table: dict[str, Any] = {"traffic": {"rate": 3.0}}
    FieldFlags().change(table)
    assert table == {"traffic": {"rate": 3.0}}


def test_a_rate_replaces_other_arrivals() -> None:
    traffic = changed({"arrivals": "steps", "rates": [1.0, 2.0], "duration_s": 30}, request_rate=8.0)["traffic"]
    assert traffic == {"arrivals": "poisson", "rate": 8.0, "duration_s": 30}
    traffic = changed({"rate": 3.0}, request_rate=8.0, burstiness=0.5)["traffic"]
    assert (traffic["arrivals"], traffic["burstiness"]) == ("gamma", 0.5)


def test_burstiness_alone_keeps_the_rate() -> None:
    assert changed({"rate": 3.0}, burstiness=2.0)["traffic"] == {"rate": 3.0, "arrivals": "gamma", "burstiness": 2.0}


def test_an_infinite_rate_is_a_closed_loop() -> None:
    traffic = changed({"rate": 3.0}, request_rate=math.inf, max_concurrency=8)["traffic"]
    assert traffic == {"arrivals": "closed", "concurrency": 8}
    traffic = changed({"rate": 3.0}, request_rate=math.inf, max_concurrency=8, num_prompts=100)["traffic"]
    assert traffic == {"arrivals": "closed", "concurrency": 8, "num_prompts": 100}
    traffic = changed({"rate": 3.0}, request_rate=math.inf, num_prompts=100)["traffic"]
    assert traffic == {"arrivals": "closed", "concurrency": 100, "num_prompts": 100}
    with pytest.raises(ConfigError, match="--num-prompts"):
        changed({"rate": 3.0}, request_rate=math.inf)


def test_a_cap_is_a_cap() -> None:
    assert changed({"rate": 3.0}, max_concurrency=4)["traffic"] == {"rate": 3.0, "max_concurrency": 4}


@pytest.mark.parametrize("burstiness", [0.1, 1.0, 10.0])
def test_the_trial_lasts_until_all_prompts_came(burstiness: float) -> None:
    for seed in range(20):
        seconds = long_enough(200, 5.0, burstiness)
        profile = np.array([[0.0, seconds, 5.0, 5.0]])
        came = arrivals.renewals(profile, burstiness=burstiness, rng=np.random.default_rng(seed))
        assert len(came) >= 200
    table = changed({"rate": 3.0}, request_rate=5.0, num_prompts=200)
    assert table["traffic"]["num_prompts"] == 200
    assert 40 < table["traffic"]["duration_s"] < 80


def test_goodput_limits_replace_those_of_the_experiment() -> None:
    table = changed({"rate": 3.0}, goodput=("ttft:200", "tpot:50"))
    assert table["goodput"] == {"ttft": 200.0, "tpot": 50.0}


@pytest.mark.parametrize("text", ["ttft", "ttft:", "ttft:-1", "ttft:inf", "ttft:nan", "speed:3", "ttft=3", ":5"])
def test_bad_goodput_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="NAME:MS"):
        parse_goodput_flag([text])


def test_two_limits_on_one_metric_are_refused() -> None:
    with pytest.raises(ConfigError, match="each name once"):
        parse_goodput_flag(["ttft:1", "ttft:2"])
    with pytest.raises(ConfigError, match="the same"):
        parse_goodput_flag(["e2e:1", "e2el:2"])
