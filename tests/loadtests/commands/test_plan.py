"""Plans of searches."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailgate.analysis.settings.gate_limits import asks_for_verdicts
from tailgate.loadtests.commands.frontier_plan import frontier_plan
from tailgate.servers.complaint import ConfigError
from tests.fakes.processes import refusal

TWO = """
name = "two"
[model]
device = "cpu"
dtype = "float32"
[engine]
max_prompt_tokens = 512
[[arms]]
name = "today"
preset = "eager"
control = true
[[arms]]
preset = "eager-padded"
[traffic]
rate = 4.0
[slo]
p99_ttft_ms = 500
"""


@pytest.fixture
def two(tmp_path: Path) -> Path:
    path = tmp_path / "two.toml"
    path.write_text(TWO)
    return path


@pytest.mark.parametrize(
    ("settings", "step_s"),
    [
        (["traffic.rate=1.5"], 10 + 47),  # 70 requests, of which one may miss a p99
        (["traffic.rate=1.5", "traffic.settle_s=20"], 20 + 47),
        (["traffic.rate=1.5", "traffic.step_s=25"], 25),
        (["traffic.rate=1.5", "slo.p99_5_ttft_ms=500"], 10 + 93),
        (["traffic.rate=0.2"], 300),  # no step is longer
        (["traffic.rate=1e-307", "traffic.rates=[1,8]"], 300),
        (["traffic.rates=[1,8]", "traffic.rate=0"], 30),
    ],
)
def test_steps_last_until_none_missing_says_something(two: Path, settings: list[str], step_s: float) -> None:
    traffic = frontier_plan(two, settings=settings).traffic
    assert (traffic.step_s, traffic.duration_s) == (step_s, 8 * step_s)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("traffic.design=xyz", ""),
        ("traffic.rate=0", "traffic.rate is 0"),
        ("traffic.rate=abc", "traffic.rate is abc"),
        ("traffic.rate=nan", "traffic.rate is nan"),
        ("traffic.step_s=0", "traffic.step_s is 0"),
        ("traffic.step_s=2e6", "traffic."),
        ("trials.count=-5", ""),
    ],
)
def test_what_a_search_uses_is_refused_by_its_own_name(two: Path, setting: str, said: str) -> None:
    if said:
        assert refusal(ConfigError, frontier_plan, two, settings=[setting]).startswith(said)
    else:
        frontier_plan(two, settings=[setting])  # a search has no use for it


@pytest.mark.parametrize(
    "settings",
    [
        ["traffic.arrivals=gamma", "traffic.burstiness=2"],
        ["traffic.design=split", "traffic.duration_s=600"],
        ["traffic.rampup_s=90"],
        ["traffic.rate=1e9", "traffic.rates=[1,8]"],
    ],
)
def test_what_only_another_traffic_has_is_left_to_the_run(two: Path, settings: list[str]) -> None:
    traffic = frontier_plan(two, settings=settings).traffic
    assert (traffic.arrivals, traffic.design, traffic.rate) == ("saturation", "mirrored", 0)


def test_traffic_without_a_rate_needs_a_range(tmp_path: Path) -> None:
    path = tmp_path / "still.toml"
    path.write_text(TWO.replace("rate = 4.0", ""))
    assert "traffic.rates=[LOWEST,HIGHEST]" in refusal(ConfigError, frontier_plan, path)
    searched = ["traffic.rates=[1,8]"]
    assert frontier_plan(path, settings=searched).traffic.step_rates == (1.0, 8.0)
    assert "is external" in refusal(ConfigError, frontier_plan, "external", settings=searched)


def test_a_limit_of_a_gate_asks_for_verdicts(two: Path) -> None:
    for path, settings, asks in ((two, [], False), (two, ["gates.margin=0.2"], True), ("frontier-demo", [], False)):
        assert asks_for_verdicts(frontier_plan(path, settings=settings).gates, "generate") is asks
