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
        if config.compile.enabled:
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


TWO = ALONE.replace(
    "[traffic]", '[[arms]]\nname = "padded"\npreset = "compiled-padded"\n[traffic]\ndesign = "mirrored"'
)


@pytest.mark.parametrize("arms", ["one", "two"])
@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("traffic.design=xyz", "traffic.design is 'xyz': use one of mirrored, split, switchback"),
        ("traffic.arrivals=xyz", "traffic.arrivals is 'xyz': use one of poisson, gamma"),
        ("traffic.burstiness=-1", "traffic.burstiness is -1"),
        ("traffic.burstiness=2", 'traffic.burstiness is 2.0 but arrivals = "poisson" does not use it'),
        ("traffic.duration_s=-1", "traffic.duration_s is -1"),
        ("traffic.rampup_s=-1", "traffic.rampup_s is -1"),
        ("traffic.rate=0", "traffic.rate is 0.0: give requests/s above 0"),
        ("traffic.rate=-3", "traffic.rate is -3.0: give a value from 0 to"),
        ("traffic.rate=abc", "traffic.rate is 'abc': expected float"),
        ("traffic.rate=nan", "traffic.rate is nan"),
        ("traffic.rate=inf", "traffic.rate is inf"),
        ("traffic.step_s=0", "traffic.step_s is 0"),
        ("traffic.step_s=-3", "traffic.step_s is -3"),
        ("traffic.step_s=1e-5", "traffic.step_s is 1e-05"),
        ("traffic.step_s=2e6", "traffic.step_s is 2e+06, and a start of 8 such steps takes 1.6e+07 s; the limit is"),
        ("traffic.settle_s=-1", "traffic.settle_s is -1"),
        ("traffic.nonsense=1", "traffic.nonsense is unknown"),
        ("trials.count=-5", "trials.count is -5"),
        ("model.dtype=float8", "model.dtype is 'float8'"),
        ("gates.margin=-2", "gates.margin is -2"),
    ],
)
@pytest.mark.parametrize("rates", [(), ("traffic.rates=[1,8]",)])
def test_what_a_run_refuses_is_refused_by_its_own_name(
    tmp_path: Path, arms: str, setting: str, said: str, rates: tuple[str, ...]
) -> None:
    path = tmp_path / "some.toml"
    path.write_text(ALONE if arms == "one" else TWO)
    with pytest.raises(ConfigError) as refused:
        frontier_plan(path, settings=[setting, *rates])
    assert str(refused.value).startswith(said)


@pytest.mark.parametrize(
    "settings",
    [
        ["traffic.arrivals=piecewise", "traffic.rate=0", "traffic.rates=[1,8]"],
        ["traffic.arrivals=closed", "traffic.rate=0", "traffic.concurrency=4", "traffic.rates=[1,8]"],
        ["traffic.arrivals=gamma", "traffic.burstiness=2"],
        ["traffic.design=split", "traffic.duration_s=600"],
        ["traffic.rampup_s=90"],
        ["traffic.rate=1e9", "traffic.rates=[1,8]"],
    ],
)
def test_what_only_another_traffic_has_is_left_to_the_run(alone: Path, settings: list[str]) -> None:
    traffic = frontier_plan(alone, settings=settings).experiment.traffic
    assert (traffic.arrivals, traffic.design, traffic.rate) == ("saturation", "mirrored", 0)


def test_no_rate_at_all_asks_for_a_range(tmp_path: Path) -> None:
    path = tmp_path / "still.toml"
    path.write_text(ALONE.replace("rate = 4.0", ""))
    with pytest.raises(ConfigError, match=r"^neither traffic.rate nor traffic.rates is given .*\[LOWEST,HIGHEST\]"):
        frontier_plan(path)
    assert frontier_plan(path, settings=["traffic.rates=[1,8]"]).experiment.traffic.step_rates == (1.0, 8.0)


def test_what_is_wrong_with_the_control_is_no_fault_of_the_policies(
    alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(config: ArmConfig) -> None:
        raise ConfigError(f"{config.name} finds no GPU")

    monkeypatch.setattr(planning, "check_arm", check)
    with pytest.raises(ConfigError, match=r"^today finds no GPU$"):
        frontier_plan(alone)


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
