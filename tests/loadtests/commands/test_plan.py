"""Plans of searches, and what a trace will cost."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtests.commands import frontier_plan as planning
from loadtests.commands import trace_forecast
from loadtests.commands.frontier_plan import STANDARD, asks_for_verdicts, frontier_plan
from loadtests.commands.main import main
from loadtests.commands.trace_forecast import forecast, forecast_text
from loadtests.traffic.traces import Trace, read_trace
from servers.complaint import ConfigError
from servers.config import ArmConfig
from tests.fakes.processes import refusal
from tests.loadtests.commands.test_main import refused

LENGTHS = [5, 9, 5, 300, 9, 40, 41, 5, 300, 12]


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    path = tmp_path / "own.csv"
    rows = [f"{second},{length},7" for second, length in enumerate(LENGTHS)]
    path.write_text("\n".join(["time_s,input_tokens,output_tokens", *rows]) + "\n")
    return read_trace(path)


def policy_row(found: dict, policy: str) -> dict:
    return next(item for item in found["policies"] if item["policy"].startswith(policy))


def test_a_policy_without_padding_compiles_and_one_with_padding_does_not(
    trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_forecast, "RECOMPILE_LIMIT", 4)
    found = forecast(trace, graphs=2)
    assert policy_row(found, "static, no limit")["compiles_while_serving"] == len(set(LENGTHS)) == 6
    limited = policy_row(found, "static, each shape")
    assert limited["compiles_while_serving"] == 4
    assert "after 4, 20% of the steps run eagerly" in limited["note"]  # 41 and 12 of ten
    padded = policy_row(found, "one padded shape")
    assert (padded["compiles_while_serving"], padded["graphs_before_serving"]) == (0, 1)
    assert padded["padded_over_true"] == pytest.approx(10 * 300 / sum(LENGTHS))
    assert policy_row(found, "buckets, best 2")["ladder"] == (41, 300)
    automatic = policy_row(found, "automatic")
    assert automatic["compiles_while_serving"] == 2, "one for a shape, one for the dimension that changes"


def test_what_is_over_the_limit_is_left_out_and_counted(trace: Trace) -> None:
    found = forecast(trace, max_prompt_tokens=100)
    assert (found["requests"], found["too_long"]) == (8, 2)
    assert "2 longer than 100 tokens are left out" in forecast_text(found)
    with pytest.raises(ConfigError, match="raise --max-prompt-tokens"):
        forecast(trace, max_prompt_tokens=4)


def test_the_forecast_begins_with_what_was_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "own.jsonl"
    row = '{{"timestamp": {}.0, "input_length": 9, "output_length": 5, "hash_ids": [0]}}\n'
    path.write_text(row.format(0) + row.format(60))
    assert main(["inspect", "--trace", str(path), "--time-unit", "s"]) == 0
    assert capsys.readouterr().out.startswith(f"{path}: 2 requests in 60 s, read as mooncake (times in s)\n")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ladder", "5,x"], '--ladder "5,x" is no list of buckets: give up to 1,024 lengths'),
        (["--ladder", "0,5"], '--ladder "0,5" is no list of buckets'),
        (["--ladder", "5" + ",6" * 1024], "is no list of buckets: give up to 1,024 lengths"),
        (["--graphs", "0"], "'--graphs': '0' is no number: give a whole number from 1 to 1024"),
        (["--ladder", "2"], "no request fits the ladder"),
        (["--arm", "eager"], "--arm has no effect with --trace"),
        (["--set", "compile.mode=default"], "--set has no effect with --trace"),
        (["demo"], 'EXPERIMENT "demo" has no effect with --trace'),
    ],
)
def test_bad_questions_are_one_line(
    flags: list[str], message: str, trace: Trace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capsys, "inspect", "--trace", trace.name, *flags)


def test_flags_of_a_trace_need_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--graphs is for a trace: add --trace" in refused(capsys, "inspect", "--arm", "eager", "--graphs", "2")
    assert "name one with --arm, or a trace with --trace" in refused(capsys, "inspect")


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
        return next(arm for arm in arms if arm.name == "compiled-bucketed").shapes.length_ladder

    short, long = ladder("traffic.length_scale=0.05"), ladder("traffic.length_scale=1")
    assert short[-1] == long[-1] == 512, "whatever comes, the server takes prompts up to here"
    assert all(step % 32 == 0 for step in (*short, *long))
    assert sum(step <= 128 for step in short) > sum(step <= 128 for step in long)


@pytest.mark.parametrize(
    ("settings", "step_s"),
    [
        (["traffic.rate=1.5"], 10 + 47),  # 70 requests, of which one may miss a p99
        (["traffic.rate=1.5", "traffic.settle_s=20"], 20 + 47),
        (["traffic.rate=1.5", "traffic.step_s=25"], 25),
        (["traffic.rate=1.5", "goodput.ttft=500", "goodput.attainment_pct=99.5"], 10 + 93),
        (["traffic.rate=0.2"], 300),  # no step is longer
        (["traffic.rate=1e-307", "traffic.rates=[1,8]"], 300),
        (["traffic.rates=[1,8]", "traffic.rate=0"], 30),
    ],
)
def test_steps_last_until_none_missing_says_something(alone: Path, settings: list[str], step_s: float) -> None:
    traffic = frontier_plan(alone, settings=settings).experiment.traffic
    assert (traffic.step_s, traffic.duration_s) == (step_s, 8 * step_s)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("traffic.design=xyz", ""),
        ("traffic.rampup_s=-1", "traffic.rampup_s is -1"),
        ("traffic.rate=0", "traffic.rate is 0"),
        ("traffic.rate=abc", "traffic.rate is abc"),
        ("traffic.rate=nan", "traffic.rate is nan"),
        ("traffic.step_s=0", "traffic.step_s is 0"),
        ("traffic.step_s=2e6", "traffic."),
        ("traffic.settle_s=-1", "traffic.settle_s is -1"),
        ("traffic.nonsense=1", "traffic.nonsense is unknown"),
        ("trials.count=-5", ""),
        ("model.dtype=float8", 'model.dtype is "float8"'),
        ("gates.margin=-2", "gates.margin is -2"),
    ],
)
def test_what_a_search_uses_is_refused_by_its_own_name(alone: Path, setting: str, said: str) -> None:
    if said:
        assert refusal(ConfigError, frontier_plan, alone, settings=[setting]).startswith(said)
    else:
        frontier_plan(alone, settings=[setting])  # a search has no use for it


@pytest.mark.parametrize(
    "settings",
    [
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


@pytest.mark.parametrize(
    ("unfit", "kept", "said"),
    [
        (("compiled-padded",), ["today", "compiled-bucketed", "compiled-dynamic"], ""),
        (STANDARD, [], "no policy of the standard set fits: compiled-padded was not tried: no C++ compiler"),
        (("today",), [], "no C++ compiler"),
    ],
)
def test_policies_that_do_not_fit_are_left_out_with_their_reason(
    alone: Path, monkeypatch: pytest.MonkeyPatch, unfit: tuple[str, ...], kept: list[str], said: str
) -> None:
    def check(config: ArmConfig) -> None:
        if config.name in unfit:
            raise ConfigError("no C++ compiler")

    monkeypatch.setattr(planning, "check_arm", check)
    if said:
        assert refusal(ConfigError, frontier_plan, alone) == said
        return
    plan = frontier_plan(alone)
    assert [arm.name for arm in plan.experiment.arms] == kept
    assert [(item.arm, item.reason) for item in plan.dropped] == [("compiled-padded", "was not tried: no C++ compiler")]


@pytest.mark.parametrize("removed", ["rate = 4.0", "rate = 4.0|traffic.arrivals=closed|traffic.concurrency=4"])
def test_traffic_without_a_rate_needs_a_range(tmp_path: Path, removed: str) -> None:
    line, *settings = removed.split("|")
    path = tmp_path / "still.toml"
    path.write_text(ALONE.replace(line, ""))
    assert "traffic.rates=[LOWEST,HIGHEST]" in refusal(ConfigError, frontier_plan, path, settings=settings)
    searched = ["traffic.rates=[1,8]"]
    assert frontier_plan(path, settings=searched).experiment.traffic.step_rates == (1.0, 8.0)
    assert "is external" in refusal(ConfigError, frontier_plan, "external", settings=searched)


def test_a_limit_of_a_gate_asks_for_verdicts(alone: Path) -> None:
    assert not asks_for_verdicts(frontier_plan(alone).experiment)
    assert asks_for_verdicts(frontier_plan(alone, settings=["gates.margin=0.2"]).experiment)
    assert not asks_for_verdicts(frontier_plan("frontier-demo").experiment)
