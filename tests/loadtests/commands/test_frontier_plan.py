"""Which experiment `tailgate frontier` makes of a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtests.commands import frontier_plan as planning
from loadtests.commands.frontier_plan import STANDARD, asks_for_verdicts, frontier_plan
from servers.config import ArmConfig
from servers.fields import ConfigError

ALONE = """
name = "alone"
[model]
device = "cpu"
dtype = "float32"
[engine]
max_prompt_tokens = 512
[[arms]]
name = "today"
preset = "eager"
control = true
[traffic]
rate = 4.0
[slo]
p99_ttft_ms = 500
"""


@pytest.fixture
def alone(tmp_path: Path) -> Path:
    path = tmp_path / "alone.toml"
    path.write_text(ALONE)
    return path


@pytest.fixture(autouse=True)
def everything_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "check_arm", lambda config: None)


def test_the_control_alone_gets_the_standard_set_beside_it(alone: Path) -> None:
    plan = frontier_plan(alone)
    assert [arm.name for arm in plan.experiment.arms] == ["today", *STANDARD]
    assert plan.experiment.control.name == "today"
    assert plan.dropped == ()


def test_the_buckets_are_those_that_pad_the_traffic_least(alone: Path) -> None:
    def ladder(*settings: str) -> tuple[int, ...]:
        arms = frontier_plan(alone, settings=settings).experiment.own_arms
        return next(arm for arm in arms if arm.name == "compiled-bucketed").config.shapes.length_ladder

    short, long = ladder("traffic.length_scale=0.05"), ladder("traffic.length_scale=1")
    assert short[-1] == long[-1] == 512, "whatever comes, the server takes prompts up to here"
    assert all(step % 32 == 0 for step in (*short, *long))
    assert sum(step <= 128 for step in short) > sum(step <= 128 for step in long)


def test_what_does_not_fit_is_left_out_with_its_reason(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(config: ArmConfig) -> None:
        if config.name == "compiled-padded":
            raise ConfigError("no C++ compiler is here")

    monkeypatch.setattr(planning, "check_arm", check)
    plan = frontier_plan(alone)
    assert [arm.name for arm in plan.experiment.arms] == ["today", "compiled-bucketed", "compiled-dynamic"]
    assert [(item.arm, item.reason) for item in plan.dropped] == [("compiled-padded", "no C++ compiler is here")]


def test_where_nothing_fits_the_reason_is_an_error(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(config: ArmConfig) -> None:
        raise ConfigError("no C++ compiler is here")

    monkeypatch.setattr(planning, "check_arm", check)
    with pytest.raises(ConfigError, match=r"^no policy of the standard set fits: no C\+\+ compiler is here$"):
        frontier_plan(alone)


def test_arms_of_the_file_are_kept_unless_the_standard_set_is_asked_for() -> None:
    assert [arm.name for arm in frontier_plan("demo").experiment.arms] == ["eager", "compiled-padded", "compiled-naive"]
    assert [arm.name for arm in frontier_plan("demo", standard=True).experiment.arms] == ["eager", *STANDARD]


def test_a_rate_becomes_steps_around_it(alone: Path) -> None:
    traffic = frontier_plan(alone).experiment.traffic
    assert traffic.arrivals == "saturation"
    assert traffic.step_rates == (1.0, 32.0)
    assert (traffic.saturation_steps, traffic.step_s) == (8, 30.0)
    own = frontier_plan(alone, settings=["traffic.rates=[2,64]", "traffic.step_s=20"]).experiment.traffic
    assert (own.step_rates, own.saturation_steps, own.step_s) == ((2.0, 64.0), 8, 20.0)


@pytest.mark.parametrize(
    ("settings", "step_s"),
    [
        (["traffic.rate=1.5"], 10 + 47),  # 70 requests, of which one may miss a p99
        (["traffic.rate=1.5", "traffic.settle_s=20"], 20 + 47),
        (["traffic.rate=1.5", "traffic.step_s=25"], 25),
        (["traffic.rate=1.5", "goodput.ttft=500", "goodput.attainment_pct=99.5"], 10 + 93),
        (["traffic.rate=0.2"], 300),  # no step is longer
        (["traffic.rate=1e-307", "traffic.rates=[1,8]"], 300),
        (["traffic.rates=[1,8]", "traffic.rate=0", "traffic.arrivals=steps"], 30),
    ],
)
def test_steps_last_until_none_missing_says_something(alone: Path, settings: list[str], step_s: float) -> None:
    traffic = frontier_plan(alone, settings=settings).experiment.traffic
    assert (traffic.step_s, traffic.duration_s) == (step_s, 8 * step_s)


@pytest.mark.parametrize("key", ["step_s", "settle_s", "rampup_s"])
@pytest.mark.parametrize("given", ["soon", "nan", "inf"])
def test_what_is_no_number_of_seconds_is_refused(alone: Path, key: str, given: str) -> None:
    with pytest.raises(ConfigError, match=rf"traffic\.{key} is '?{given}"):
        frontier_plan(alone, settings=[f"traffic.{key}={given}"])


def test_traffic_without_a_rate_needs_a_range(alone: Path) -> None:
    with pytest.raises(ConfigError, match=r"give --set traffic.rates=\[LOWEST,HIGHEST\] in requests/s$"):
        frontier_plan(alone, settings=["traffic.arrivals=closed", "traffic.concurrency=4", "traffic.rate=0"])


def test_one_start_a_trial_whatever_the_file_says(alone: Path) -> None:
    assert frontier_plan(alone, settings=["trials.count=6"]).experiment.trials.count == 1


def test_external_arms_are_refused() -> None:
    with pytest.raises(ConfigError, match="is external"):
        frontier_plan("external", settings=["traffic.rates=[1,8]"])


def test_a_limit_of_a_gate_asks_for_verdicts(alone: Path) -> None:
    assert not asks_for_verdicts(frontier_plan(alone).experiment)
    assert asks_for_verdicts(frontier_plan(alone, settings=["gates.margin=0.2"]).experiment)
    assert not asks_for_verdicts(frontier_plan("frontier-demo").experiment)


def test_encoders_have_another_metric_without_anybody_asking(tmp_path: Path) -> None:
    path = tmp_path / "encoder.toml"
    encoder = ALONE.replace("[model]", '[model]\nid = "random:bert-tiny"\ntask = "embed"').replace("ttft", "e2e")
    path.write_text(encoder.replace("rate = 4.0", 'rate = 4.0\nworkload = "sentences"'))
    assert not asks_for_verdicts(frontier_plan(path).experiment)
    assert asks_for_verdicts(frontier_plan(path, settings=["gates.margin=0.2"]).experiment)
