"""The gates on memory: its peak beside the control's, and its growth."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analysis.judging.comparisons import PHASES, QUANTILES, blocks_at, compared, comparisons, judge_quantiles
from analysis.judging.gates import (
    CompileFacts,
    Gate,
    death_gate,
    error_gate,
    goodput_ratio_gate,
    noninferiority_gate,
    noninferiority_name,
    recompile_gates,
    slo_gate,
)
from analysis.judging.judgement import Judgement, judge
from analysis.judging.memory import growth_gate, ratio_limits
from analysis.judging.rates import RateComparison, compare_rates, log_ratio
from analysis.records.run_records import read_run
from analysis.records.schemas import REQUESTS
from analysis.records.tables import RecordWriter, read_table
from analysis.run.memory import HeldMemory, RunMemory
from analysis.run.run import Run
from analysis.run.slo import ShareResult
from analysis.run.trials import SECOND as SECOND_COMPARISONS
from analysis.settings.gate_limits import GateLimits
from analysis.settings.metrics import JUDGED_METRICS
from analysis.settings.slo_targets import SloTarget
from analysis.statistics.compare import Comparison
from analysis.statistics.trend import Trend
from analysis.summary.summary import analyze
from benchmarks.simulation.detection import CONTROL, TREATMENT
from benchmarks.simulation.scenario import Scenario, run
from tests.fakes.external_runs import write_external, write_logged
from tests.fakes.resources import GIB, sample, tell
from tests.fakes.runs import EAGER, Compile, FakeArm, FakeRun, write_run

LIMITS = GateLimits()


def facts(**change):
    base = {
        "known": True,
        "recompiles": 0,
        "most_in_a_trial": 0,
        "longest_event_s": 0.0,
        "longest_stall_s": 0.0,
        "stall_s_per_min": 0.0,
        "requests_hit": 0,
        "requests": 180,
        "trials": 1,
    }
    return CompileFacts(**(base | change))


class TestRecompileGates:
    def test_a_recompiling_arm_fails_with_numbers(self):
        seen = facts(recompiles=6, most_in_a_trial=6, longest_event_s=7.9, longest_stall_s=7.85, requests_hit=31)
        first, stall, _, hit = recompile_gates("naive", seen, LIMITS)
        assert first.verdict == stall.verdict == hit.verdict == "FAIL"
        assert first.reason == "6 recompiles while serving, longest 7.9 s, limit 0; 31 of 180 requests waited."

    def test_an_arm_that_never_compiles_passes(self):
        assert {item.verdict for item in recompile_gates("padded", facts(), LIMITS)} == {"PASS"}

    def test_a_value_on_the_limit_passes(self):
        gates = recompile_gates("padded", facts(longest_stall_s=1.0, stall_s_per_min=0.5), LIMITS)
        assert {item.verdict for item in gates} == {"PASS"}

    def test_without_telemetry_nothing_is_known(self):
        gates = recompile_gates("padded", facts(known=False, recompiles=3, most_in_a_trial=3), LIMITS)
        assert {item.verdict for item in gates} == {"INCONCLUSIVE"}

    def test_without_requests_nothing_passes(self):
        assert {item.verdict for item in recompile_gates("padded", facts(requests=0), LIMITS)} == {"INCONCLUSIVE"}


def comparison(verdict, quantile=0.99):
    return Comparison(
        arm="compiled",
        metric="e2e",
        quantile=quantile,
        margin=0.1,
        alpha=0.05,
        ratio=1.02,
        method="made up",
        blocks=25,
        trials=1,
        requests=100,
        verdict=verdict,
    )


def test_a_comparison_gate_is_named_by_quantile_and_metric():
    assert noninferiority_gate(comparison("PASS"), None).gate == "noninferiority p99_e2e"
    assert noninferiority_name(comparison("PASS", quantile=0.999)) == "noninferiority p99_9_e2e"


def test_only_an_open_gate_asks_for_a_longer_run():
    assert noninferiority_gate(comparison("INCONCLUSIVE"), 600.0).needed_s == 600.0
    assert noninferiority_gate(comparison("PASS"), 600.0).needed_s is None
    assert error_gate("compiled", share("INCONCLUSIVE"), 0.5, 600.0).needed_s == 600.0
    assert error_gate("compiled", share("FAIL"), 0.5, 600.0).needed_s is None


def share(verdict, missed=2, requests=100):
    return ShareResult(
        missed=missed, requests=requests, allowed=0.01, low=0.004, high=0.07, design_effect=1.0, verdict=verdict
    )


class TestShareGates:
    TARGET = SloTarget(key="p99_ttft_ms", metric="ttft", quantile=0.99, limit=2000.0)

    def test_an_slo_gate_says_what_was_seen_and_what_is_allowed(self):
        gate = slo_gate("compiled", self.TARGET, share("INCONCLUSIVE"), 2100.0, None)
        assert (gate.gate, gate.unit, gate.value) == ("slo p99_ttft_ms", "ms", 2100.0)
        assert gate.reason == (
            "2 of 100 requests took longer than 2000 ms; p99 TTFT within 2000 ms allows 1 %, "
            "the true share may lie between 0.4 % and 7 %."
        )

    def test_an_slo_without_requests_has_no_value(self):
        gate = slo_gate("compiled", self.TARGET, share("INCONCLUSIVE", 0, 0), math.nan, None)
        assert gate.value is None
        assert gate.reason == "No request to judge p99 TTFT within 2000 ms."

    def test_an_error_gate_without_requests_knows_no_rate(self):
        gate = error_gate("compiled", share("INCONCLUSIVE", 0, 0), 0.5, None)
        assert gate.value is None
        assert gate.reason.startswith("No request completed or failed")


def test_one_death_fails():
    assert (death_gate("compiled", 0).verdict, death_gate("compiled", 1).verdict) == ("PASS", "FAIL")
    assert death_gate("compiled", 2).reason == "compiled died 2 times under load."


class TestParts:
    def test_the_cold_start_and_what_came_after_have_names_of_their_own(self):
        early = facts(recompiles=2, most_in_a_trial=2, longest_event_s=1.0)
        cold = recompile_gates("naive", early, LIMITS, part="cold")
        assert [item.gate for item in cold] == [
            "cold recompiles",
            "cold longest stall",
            "cold stall per minute",
            "cold requests hit",
        ]
        assert cold[0].reason.startswith("2 recompiles in the cold start, longest 1.0 s, limit 0; ")
        steady = recompile_gates("naive", facts(), LIMITS, part="steady")
        assert (steady[0].gate, steady[0].reason) == ("recompiles", "0 recompiles past the cold start, limit 0.")


def test_a_cold_target_is_a_gate_of_its_own_kind():
    target = SloTarget(key="p99_ttft_ms", metric="ttft", quantile=0.99, limit=2000.0, cold=True)
    gate = slo_gate("compiled", target, share("FAIL"), 2100.0, None)
    assert (gate.gate, gate.kind) == ("cold slo p99_ttft_ms", "cold")
    assert gate.reason.startswith("2 of 100 cold requests took longer than 2000 ms; ")


def test_an_itl_target_speaks_of_gaps_and_a_strict_one_of_the_limit_itself():
    target = SloTarget(key="p50_itl_ms", metric="itl", quantile=0.5, limit=40.0, strict=True)
    assert slo_gate("compiled", target, share("PASS"), 12.0, None).reason.startswith(
        "2 of 100 token gaps took 40 ms or longer; p50 ITL below 40 ms allows "
    )


class TestGoodputRatio:
    def rate(self, **change):
        known = {"ratio": 1.0, "low": 0.97, "high": 1.03, "share_pct": 99.0, "control_share_pct": 99.0, "spread": 0.02}
        return RateComparison(
            arm="compiled",
            control="eager",
            rate="goodput",
            value=4.0,
            control_value=4.0,
            alpha=0.05,
            blocks=26,
            groups=8,
            trials=1,
            requests=3000,
            method="made up",
            **(known | change),
        )

    @pytest.mark.parametrize(
        ("low", "high", "verdict"),
        [(0.96, 1.04, "PASS"), (0.94, 1.04, "INCONCLUSIVE"), (0.90, 0.949, "FAIL"), (None, None, "INCONCLUSIVE")],
    )
    def test_the_whole_interval_decides(self, low, high, verdict):
        gate = goodput_ratio_gate(self.rate(low=low, high=high), 0.95, 600.0)
        assert gate.verdict == verdict
        assert gate.needed_s == (600.0 if verdict == "INCONCLUSIVE" else None)

    def test_a_goodput_that_is_unknown_is_no_pass(self):
        unknown = self.rate(ratio=None, low=None, high=None, obstacle="one of the arms was sent nothing")
        gate = goodput_ratio_gate(unknown, 0.95, None)
        assert (gate.verdict, gate.reason) == (
            "INCONCLUSIVE",
            "Goodput cannot be compared: one of the arms was sent nothing.",
        )


SLO = {"p99_ttft_ms": 2000}
STALLS = FakeArm(name="naive", compiles=[Compile(at_s=100 + 100 * step, seconds=20) for step in range(4)])


def rates_of(path, run, edit=None):
    directory = write_run(path / "run", run)
    if edit is not None:
        file = directory / "trial-01" / "requests-0.arrow"
        rows = edit(read_table(file, REQUESTS)[0].to_pylist())
        file.unlink()
        with RecordWriter(file, REQUESTS) as writer:
            for row in rows:
                writer.append(row)
    return {(item.arm, item.rate): item for item in compare_rates(Run.of(read_run(directory)))}


def test_equal_arms_make_the_same_of_the_same_load(tmp_path):
    found = rates_of(tmp_path, FakeRun(duration_s=480, rate=2, slo=SLO))
    assert {rate for _, rate in found} == {"goodput", "requests", "output tokens"}
    for rate in ("goodput", "requests"):
        assert found["compiled", rate].low < 1.0 < found["compiled", rate].high
    # The same tokens in every block: equal, and no interval of no width.
    tokens = found["compiled", "output tokens"]
    assert (tokens.ratio, tokens.low, tokens.high) == (1.0, None, None)
    assert tokens.obstacle == "no stretch of time differs from the others"


def test_stalls_cost_goodput_and_not_throughput(tmp_path):
    found = rates_of(tmp_path, FakeRun(arms=(EAGER, STALLS), duration_s=480, rate=2, slo=SLO))
    goodput, requests = found["naive", "goodput"], found["naive", "requests"]
    assert goodput.share_pct == pytest.approx(100.0 * goodput.value / 2.0, rel=0.01)
    assert goodput.ratio < 0.9
    assert goodput.high < 1.0
    assert goodput.control_share_pct == 100.0
    assert requests.ratio == pytest.approx(1.0, abs=0.01)


def test_failed_requests_are_no_throughput(tmp_path):
    broken = FakeArm(name="compiled", error_share=0.3)
    found = rates_of(tmp_path, FakeRun(arms=(EAGER, broken), duration_s=300, rate=2, slo=SLO))
    assert found["compiled", "requests"].ratio == pytest.approx(0.7, abs=0.06)
    assert found["compiled", "goodput"].high < 0.9


def test_a_split_of_nine_to_one_is_no_difference(tmp_path):
    arms = (FakeArm(name="eager", enabled=False, weight=9), FakeArm(name="compiled", weight=1))
    found = rates_of(tmp_path, FakeRun(design="split", arms=arms, duration_s=480, rate=8, slo=SLO))
    requests = found["compiled", "requests"]
    assert requests.value < requests.control_value / 5
    assert requests.low < 1.0 < requests.high
    assert requests.ratio == pytest.approx(1.0, abs=0.03)


def test_six_trials_are_the_unit(tmp_path):
    found = rates_of(tmp_path, FakeRun(trials=6, duration_s=60, rate=2, slo=SLO))
    assert {(item.method, item.groups) for item in found.values()} == {("t over trials", 6)}


def test_without_limits_nobody_knows_what_a_good_request_is(tmp_path):
    assert ("compiled", "goodput") not in rates_of(tmp_path, FakeRun(duration_s=60, rate=2))
    asked = rates_of(tmp_path / "asked", FakeRun(duration_s=60, rate=2, gates={"min_goodput_ratio": 0.9}))
    assert asked["compiled", "goodput"].ratio is None
    assert "what a good request is" in asked["compiled", "goodput"].obstacle


def test_one_block_has_a_ratio_and_no_limits(tmp_path):
    for item in rates_of(tmp_path, FakeRun(duration_s=30, rate=4, slo=SLO)).values():
        assert item.ratio is not None
        assert (item.low, item.high) == (None, None)


def test_an_arm_without_requests_has_no_rate(tmp_path):
    found = rates_of(
        tmp_path,
        FakeRun(duration_s=60, rate=2, slo=SLO),
        lambda rows: [row for row in rows if row["arm"] == "eager"],
    )
    assert all((item.ratio, item.low, item.high) == (None, None, None) for item in found.values())
    assert all(item.obstacle for item in found.values())


class TestLogRatio:
    def test_no_miss_in_any_group_is_no_certainty(self):
        sent = np.full(10, 50.0)
        ratio, spread, _ = log_ratio(sent, sent, sent, sent, share=True)
        assert ratio == 1.0
        assert spread == pytest.approx(math.sqrt(2 / 501 / 500), rel=0.05)

    def test_by_hand(self):
        made, other, sent = np.array([8.0, 12.0]), np.array([10.0, 10.0]), np.array([20.0, 20.0])
        ratio, spread, _ = log_ratio(made, sent, other, sent, share=False)
        assert (ratio, spread) == (1.0, pytest.approx(math.sqrt(2 * (0.1**2 + 0.1**2))))

    @pytest.mark.parametrize(
        ("made", "sent", "control", "ratio", "why"),
        [
            ([0.0, 0.0], [5.0, 5.0], [5.0, 5.0], 0.0, "the arm made nothing"),
            ([5.0, 5.0], [5.0, 5.0], [0.0, 0.0], None, "the control made nothing"),
            ([0.0, 0.0], [0.0, 0.0], [5.0, 5.0], None, "one of the arms was sent nothing"),
            ([5.0], [5.0], [5.0], 1.0, "one stretch of time cannot show how much stretches differ"),
            ([], [], [], None, "one of the arms was sent nothing"),
        ],
    )
    def test_nothing_has_no_error(self, made, sent, control, ratio, why):
        columns = [np.array(column) for column in (made, sent, control)]
        assert log_ratio(*columns, np.full(len(made), 5.0), share=True) == (ratio, None, why)

    def test_limits_hold_the_truth_as_often_as_they_say(self):
        """Two-sided 90 %: 300 seeded pairs with bunched misses; at least 84 % must hold the true ratio."""
        from scipy import stats

        held = 0
        reach = stats.t.ppf(0.95, 9)
        for seed in range(300):
            rng = np.random.default_rng(seed)
            sent = rng.poisson(200, size=10).astype(float)
            good = [rng.binomial(sent.astype(int), rng.beta(95, 5, size=10)).astype(float) for _ in range(2)]
            ratio, spread, _ = log_ratio(good[0], sent, good[1], sent, share=True)
            held += abs(math.log(ratio)) <= reach * spread
        assert held >= 0.84 * 300


MIB = 1 << 20
GATES = {"max_memory_ratio": 1.5, "max_memory_growth_pct_per_hour": 5.0, "draws": 99}
SHORT = FakeRun(duration_s=400, rate=1, gates=GATES)

Level = Callable[[int, Any], Any]


def judged(path: Path, levels: dict[str, Level], run: FakeRun = SHORT) -> Judgement:
    directory = write_run(path / "run", run)
    for arm, level in levels.items():
        sample(directory, "process", f"{arm}-0", {"memory_bytes": level}, arm=arm)
    return judge(Run.of(read_run(directory)))


def gate_of(judgement: Judgement, name: str) -> Gate:
    return next(gate for gate in judgement.gates if gate.gate == name)


def flat(size: float) -> Level:
    return lambda trial, at_s: np.full(at_s.size, size * (1.0 + 0.002 * trial))


def test_memory_gates_nothing_unless_it_is_asked_for(tmp_path: Path) -> None:
    judgement = judged(tmp_path, {"eager": flat(GIB), "compiled": flat(9 * GIB)}, replace(SHORT, gates={"draws": 99}))
    assert [gate for gate in judgement.gates if gate.kind == "memory"] == []
    assert judgement.memory.arms["compiled"]["process"].peak == pytest.approx(9 * GIB, rel=0.01)


@pytest.mark.parametrize(
    ("size", "verdict"), [(1.2, "PASS"), (1.48, "INCONCLUSIVE"), (1.52, "INCONCLUSIVE"), (1.8, "FAIL")]
)
def test_a_ratio_is_judged_with_its_limits(tmp_path: Path, size: float, verdict: str) -> None:
    gate = gate_of(judged(tmp_path, {"eager": flat(GIB), "compiled": flat(size * GIB)}), "memory ratio")
    assert gate.verdict == verdict
    assert gate.value == pytest.approx(size)
    assert "one trial, in which starts are taken to vary by 1 %" in gate.reason


def test_more_trials_narrow_a_ratio_and_trials_that_differ_widen_it() -> None:
    def width(*logs: float) -> float:
        low, high = ratio_limits(np.array(logs), 0.05)
        return high - low

    assert width(0.0, 0.0, 0.0) < width(0.0) < 0.05
    assert width(-0.2, 0.0, 0.2) > 0.2


def test_what_was_not_seen_leaves_a_gate_open_that_is_asked_for(tmp_path: Path) -> None:
    judgement = judged(tmp_path, {"eager": flat(GIB)})
    ratio, growth = gate_of(judgement, "memory ratio"), gate_of(judgement, "memory growth")
    assert (ratio.verdict, growth.verdict) == ("INCONCLUSIVE", "INCONCLUSIVE")
    assert "not both seen" in ratio.reason
    assert "not seen" in growth.reason
    assert '"memory growth" of compiled' in judgement.advice.text
    assert "machines watched" in judgement.advice.text


def test_a_leak_fails_and_a_warm_up_does_not(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)

    def noise(at_s: Any) -> Any:
        return MIB * rng.standard_normal(at_s.size)

    shapes: dict[str, tuple[Level, str]] = {
        "flat": (lambda trial, at_s: GIB + noise(at_s) / 100, "PASS"),
        "leak": (lambda trial, at_s: GIB + 0.5 * GIB * at_s / 3600.0 + noise(at_s), "FAIL"),
        "jump": (lambda trial, at_s: GIB + 0.2 * GIB * (at_s > 250) + noise(at_s) / 100, "INCONCLUSIVE"),
        "warm-up": (lambda trial, at_s: GIB * (1.5 - 0.5 * np.exp(-np.maximum(at_s, 0) / 150.0)), "INCONCLUSIVE"),
        "warm-up that is over": (lambda trial, at_s: GIB * (1.5 - 0.5 * np.exp(-np.maximum(at_s, 0) / 10.0)), "PASS"),
        "falling": (lambda trial, at_s: 2 * GIB - 0.5 * GIB * at_s / 3600.0, "PASS"),
    }
    for name, (level, verdict) in shapes.items():
        gate = gate_of(judged(tmp_path / name, {"eager": flat(GIB), "compiled": level}), "memory growth")
        assert (name, gate.verdict) == (name, verdict), gate.reason
        assert ("warm-up may not be over" in gate.reason) == (name == "warm-up")


def test_what_a_replica_retains_beside_its_engine_is_not_judged(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", SHORT)
    for arm in ("eager", "compiled"):
        growing = {"memory_bytes": lambda trial, at_s: GIB + GIB * at_s / 3600.0}
        sample(directory, "process", f"{arm}-0", growing, arm=arm)
        sample(directory, "allocator", f"{arm}-0", {"memory_bytes": GIB}, arm=arm)
    assert gate_of(judge(Run.of(read_run(directory))), "memory growth").verdict == "PASS"


def test_host_memory_of_a_family_gates_no_arm_on_a_card(tmp_path: Path) -> None:
    """Its compile workers share most of their pages, which the sum counts once for each."""
    directory = tell(write_run(tmp_path / "run", SHORT), devices={"eager": "cuda:0", "compiled": "cuda:1"})
    for arm, size in (("eager", GIB), ("compiled", 18 * GIB)):
        growing = {"memory_bytes": partial(leaking, size)}
        sample(directory, "process", f"{arm}-0", growing, arm=arm)
    judgement = judge(Run.of(read_run(directory)))
    ratio, growth = gate_of(judgement, "memory ratio"), gate_of(judgement, "memory growth")
    assert (ratio.verdict, growth.verdict) == ("INCONCLUSIVE", "INCONCLUSIVE")
    assert "not seen" in growth.reason
    for arm in ("eager", "compiled"):
        sample(directory, "process", f"{arm}-0", {"device_memory_bytes": GIB}, arm=arm)
    judgement = judge(Run.of(read_run(directory)))
    assert "device memory of the process" in gate_of(judgement, "memory ratio").reason
    assert gate_of(judgement, "memory growth").verdict == "PASS"


def leaking(size: float, trial: int, at_s: Any) -> Any:
    return size + size * at_s / 3600.0


def test_the_fastest_figure_decides(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", SHORT)
    for arm in ("eager", "compiled"):
        sample(directory, "process", f"{arm}-0", {"memory_bytes": GIB}, arm=arm)
        growing = {"memory_bytes": lambda trial, at_s: GIB + GIB * at_s / 3600.0}
        sample(directory, "allocator", f"{arm}-0", growing, arm=arm)
    gate = gate_of(judge(Run.of(read_run(directory))), "memory growth")
    assert gate.verdict == "FAIL"
    assert "Resident memory of the engine grows by" in gate.reason
    assert gate.value == pytest.approx(100 / (1 + 400 / 3600), rel=0.02)


def test_on_a_card_growth_that_was_seen_on_the_host_alone_passes_no_gate() -> None:
    steady = HeldMemory(figure="engine", peaks={1: float(GIB)}, growth=Trend(slope=0.0, low=0.0, high=0.0))
    grows = replace(steady, figure="reserved", growth=Trend(slope=GIB, low=GIB, high=GIB))

    def verdict(figures: dict[str, HeldMemory], *on_card: str) -> str:
        memory = RunMemory(arms={"compiled": figures}, on_card=frozenset(on_card), events=())
        return growth_gate(memory, "compiled", 5.0).verdict

    assert verdict({"engine": steady}) == "PASS"
    assert verdict({"engine": steady}, "compiled") == "INCONCLUSIVE"
    assert verdict({"engine": replace(grows, figure="engine")}, "compiled") == "FAIL"
    assert verdict({"engine": steady, "reserved": replace(steady, figure="reserved")}, "compiled") == "PASS"


SECOND = 10**9
ONCE = "vLLM warns once for each kernel"
QUIET = Scenario(step=64, duration_s=300.0)
STALLING = Scenario(step=64, duration_s=300.0, private_stalls=3)
THIN = Scenario(step=64, duration_s=60.0, rate=0.15)


def written(folder: Path, scenario: Scenario, **gates: float) -> Path:
    rng = np.random.default_rng(1)
    return write_external(folder, run(scenario, rng), rng, gates={"draws": 99, "min_blocks": 2, **gates})


def start_of(folder: Path) -> int:
    return min(read_table(folder / "requests.arrow", REQUESTS)[0]["sent_ns"].to_pylist())


def gates_of(summary: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {gate["gate"]: gate for gate in summary["gates"] if gate["kind"] == "recompile"}


def row_of(summary: dict[str, Any]) -> dict[str, Any]:
    return next(row for row in summary["arms"] if row["name"] == TREATMENT)


def at(folder: Path, second: float, took: float = 0.0, **columns: Any) -> dict[str, Any]:
    end = start_of(folder) + int(second * SECOND)
    return {"start_ns": end - int(took * SECOND), "end_ns": end, "phase": "serving", **columns}


def test_what_a_log_tells_fails_an_arm_that_shows_nothing_outside(tmp_path: Path) -> None:
    folder = written(tmp_path, QUIET)
    summary = analyze(write_logged(folder, [at(folder, 100, 0.2), at(folder, 200, 0.2)], blind_spots=[ONCE]))
    gate = gates_of(summary)["recompiles"]
    assert (gate["verdict"], gate["value"]) == ("FAIL", 2)
    assert gate["reason"].startswith("By its log: 2 recompiles while serving (2 of them JIT compiles of kernels)")
    # The others are within their limits by the log, which may leave compiles out: from outside nothing was seen.
    assert gates_of(summary)["longest stall"]["reason"].startswith("Seen from outside: no stall from")
    compiled = row_of(summary)["compile"]
    assert (compiled["recompiles"], compiled["jit_compiles"], compiled["blind_spots"]) == (2, 2, [ONCE])
    assert len(summary["events"]) == 2


def test_a_log_that_tells_all_passes_an_arm_that_could_not_be_watched_from_outside(tmp_path: Path) -> None:
    folder = written(tmp_path, THIN)
    alone = gates_of(analyze(folder))["recompiles"]
    assert alone["verdict"] == "INCONCLUSIVE"
    gate = gates_of(analyze(write_logged(folder, [])))["recompiles"]
    assert (gate["verdict"], gate["value"]) == ("PASS", 0)
    assert "By its log, which tells of kernels: 0 recompiles while serving, limit 0." in gate["reason"]


def test_a_log_that_leaves_out_passes_nobody(tmp_path: Path) -> None:
    folder = write_logged(written(tmp_path, THIN), [], blind_spots=[ONCE])
    gate = gates_of(analyze(folder))["recompiles"]
    assert (gate["verdict"], gate["value"]) == ("INCONCLUSIVE", None)
    assert gate["reason"].endswith(f"Its log may leave compiles out: {ONCE}.")
    assert any(ONCE in note for note in row_of(analyze(folder))["external"]["notes"])


def test_what_shows_from_outside_decides_where_the_log_leaves_out_and_says_so(tmp_path: Path) -> None:
    gate = gates_of(analyze(write_logged(written(tmp_path, QUIET), [], blind_spots=[ONCE])))["recompiles"]
    assert gate["verdict"] == "PASS"
    assert gate["reason"].endswith(f"Its log may leave compiles out: {ONCE}.")


def test_stalls_that_neither_explains_leave_the_gates_open_whatever_the_log_says(tmp_path: Path) -> None:
    gate = gates_of(analyze(write_logged(written(tmp_path, STALLING), [])))["recompiles"]
    assert gate["verdict"] == "INCONCLUSIVE"
    assert "stood still 3 times" in gate["reason"]


def test_compiles_that_show_from_outside_fail_an_arm_whose_log_does_not_tell_of_them(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    made = run(Scenario(step=64, duration_s=400.0, new_shapes=6, compile_s=3.0), rng)
    folder = write_external(tmp_path, made, rng, gates={"draws": 99, "min_blocks": 2})
    gate = gates_of(analyze(write_logged(folder, [])))["recompiles"]
    assert gate["verdict"] == "FAIL"
    assert (
        gate["reason"].endswith("Its log, which tells of kernels, shows fewer. Stalls")
        or "shows fewer" in gate["reason"]
    )


def test_a_trial_that_does_not_say_what_its_log_told_leaves_all_out(tmp_path: Path) -> None:
    folder = write_logged(written(tmp_path, THIN), [])
    arms = [{"name": name} for name in (CONTROL, TREATMENT)]
    (folder / "trial.json").write_text(json.dumps({"trial": 1, "complete": True, "arms": arms}))
    gate = gates_of(analyze(folder))["recompiles"]
    assert gate["verdict"] == "INCONCLUSIVE"
    assert "trial 1 does not say what its log told" in gate["reason"]


def test_events_that_cannot_be_placed_are_said(tmp_path: Path) -> None:
    folder = written(tmp_path, QUIET)
    summary = analyze(write_logged(folder, [at(folder, 100, kind="jitt")]))
    check = next(check for check in summary["validity"] if check["check"] == "placed compile events" and check["arm"])
    assert not check["ok"]
    assert gates_of(summary)["recompiles"]["verdict"] == "INCONCLUSIVE"


def test_a_compile_whose_length_nobody_tells_lasts_as_long_as_the_stall_around_it(tmp_path: Path) -> None:
    folder = written(tmp_path, STALLING)
    stalls = sorted(row_of(analyze(folder))["blackbox"]["stalls"], key=lambda stall: stall["start_ns"])
    first, second = stalls[0], stalls[1]
    events = [
        {"start_ns": first["end_ns"] + SECOND // 5, "end_ns": first["end_ns"] + SECOND // 5, "frame": "Triton _fwd"},
        {"start_ns": second["start_ns"], "end_ns": second["start_ns"], "kind": "recompile"},
        at(folder, 1.0, frame="of no stall"),
        {"start_ns": stalls[2]["start_ns"], "end_ns": stalls[2]["start_ns"], "kind": "limit_hit"},
    ]
    summary = analyze(write_logged(folder, events, blind_spots=[ONCE]))
    rows = {row["event_id"]: row for row in summary["events"]}
    for name, stall in (("1-log-0", first), ("1-log-1", second)):
        assert (rows[name]["start_ns"], rows[name]["end_ns"]) == (stall["start_ns"], stall["end_ns"])
        assert rows[name]["length_from"] == "stall"
        assert rows[name]["requests_hit"] >= 1
    for name in ("1-log-2", "1-log-3"):
        assert rows[name]["seconds"] == 0
        assert "length_from" not in rows[name]
    gate = gates_of(summary)["longest stall"]
    longest = max(first["seconds"], second["seconds"])
    assert (gate["verdict"], gate["value"] > gate["limit"]) == ("FAIL", True)
    assert row_of(summary)["compile"]["longest_event_s"] == pytest.approx(longest, rel=1e-6)
    # A spike is joined to the compile that the log tells of.
    joined = {name for spike in summary["spikes"] for name in spike["event_ids"]}
    assert joined >= {"1-log-0", "1-log-1"}


SMALL = FakeRun(duration_s=300, rate=2)


def run_of(path, run=SMALL, edit=None):
    directory = write_run(path / "run", run)
    if edit is not None:
        file = directory / "trial-01" / "requests-0.arrow"
        rows = edit(read_table(file, REQUESTS)[0].to_pylist())
        file.unlink()
        with RecordWriter(file, REQUESTS) as writer:
            for row in rows:
                writer.append(row)
    return Run.of(read_run(directory))


@pytest.fixture(scope="module")
def run_of_comparisons(tmp_path_factory):
    return run_of(tmp_path_factory.mktemp("comparisons"))


@pytest.fixture(scope="module")
def found(run_of_comparisons):
    return comparisons(run_of_comparisons)


class TestWhatIsCompared:
    def test_five_latencies_at_five_quantiles_in_each_phase(self, found):
        seen = {(item.metric, item.quantile, item.phase) for item in (*found.gated, *found.beside)}
        assert seen == {(m, q, p) for m in JUDGED_METRICS for q in QUANTILES for p in PHASES}
        assert len(seen) == len(found.gated) + len(found.beside)

    def test_what_the_experiment_asks_for_gates_and_nothing_else(self, found):
        assert [(item.metric, item.quantile, item.phase) for item in found.gated] == [
            ("ttft", 0.99, "steady"),
            ("e2e", 0.99, "steady"),
        ]

    def test_what_stands_beside_has_no_verdict_to_give(self, found):
        assert {item.verdict for item in found.beside} == {"INCONCLUSIVE"}
        assert all(item.p_inferior_holm is None and "limit of" not in item.reason for item in found.beside)
        assert all(item.reason.endswith(".") and item.reason.startswith("p") for item in found.beside)

    def test_failures_are_adjusted_over_arms_and_gated_metrics_alone(self, tmp_path):
        slow = [FakeArm(name=name, ratio=1.5) for name in ("one", "two")]
        gates = {"metrics": ["ttft", "e2e", "tpot"], "quantiles": [0.5, 0.99]}
        gated = comparisons(run_of(tmp_path, FakeRun(arms=(EAGER, *slow), duration_s=300, rate=2, gates=gates))).gated
        assert len(gated) == 2 * 3 * 2
        # Each stands for two tests: of a typical block, and of the whole run.
        tests = sum(1 + (item.p_inferior_whole is not None) for item in gated)
        smallest = min(item.p_inferior for item in gated)
        assert min(item.p_inferior_holm for item in gated) == pytest.approx(min(1.0, tests * smallest))

    def test_another_quantile_joins_the_five(self, tmp_path):
        gates = {"quantiles": [0.75], "margins": {"e2e": 0.3}}
        found = comparisons(run_of(tmp_path, FakeRun(duration_s=120, rate=2, gates=gates)))
        assert [(item.metric, item.quantile, item.margin) for item in found.gated] == [
            ("ttft", 0.75, 0.1),
            ("e2e", 0.75, 0.3),
        ]
        assert {item.quantile for item in found.beside} == {*QUANTILES, 0.75}

    def test_what_stands_beside_does_not_change_the_draws_of_a_gate(self, run_of_comparisons, found):
        assert [
            item.p_inferior for item in judge_quantiles(run_of_comparisons, "compiled", "e2e", "steady", qs=(0.99,))
        ] == [item.p_inferior_whole for item in found.gated if item.metric == "e2e"]


class TestPhases:
    def test_steady_and_cold_share_no_request(self, run_of_comparisons):
        steady, cold, everything = (compared(run_of_comparisons, "compiled", "e2e", phase)[0] for phase in PHASES)
        assert len(steady) + len(cold) == len(everything)
        assert set(cold.block.tolist()) == {0}

    def test_a_compile_takes_its_requests_from_both_arms(self, tmp_path):
        naive = FakeArm(name="naive", compiles=[Compile(at_s=100, seconds=10)])
        run = run_of(tmp_path, FakeRun(arms=(EAGER, naive), duration_s=300, rate=2))
        mine, theirs = compared(run, "naive", "e2e", "steady")
        assert len(mine) == len(theirs) < len(compared(run, "naive", "e2e", "all")[0])
        assert mine.values.max() < 9000

    def test_a_request_and_its_copy_go_together(self, tmp_path):
        def lose(rows):
            return [row for place, row in enumerate(rows) if row["arm"] == "eager" or place % 3]

        run = run_of(tmp_path, edit=lose)
        mine, theirs = compared(run, "compiled", "ttft", "all")
        assert len(mine) == len(theirs) < int(run.of_arm("eager").sum())

    def test_a_metric_that_one_copy_lacks_is_compared_without_both(self, tmp_path):
        def single(rows):
            short = {"output_tokens": 1}
            return [row | (short if row["arm"] == "eager" and place % 2 else {}) for place, row in enumerate(rows)]

        run = run_of(tmp_path, edit=single)
        mine, theirs = compared(run, "compiled", "tpot", "all")
        assert len(mine) == len(theirs) < len(compared(run, "compiled", "e2e", "all")[0])


class TestTokenGaps:
    def test_a_gap_is_in_the_block_in_which_it_ended(self, tmp_path):
        """A request due at 25 s pauses after its first token until 65 s: that gap is of the third block."""

        def pause(rows):
            for row in rows:
                since = (row["scheduled_ns"] - rows[0]["scheduled_ns"]) / SECOND_COMPARISONS
                if row["arm"] == "compiled" and 20 < since < 25:
                    row["token_ns"] = [row["token_ns"][0], row["token_ns"][0] + 40 * SECOND_COMPARISONS]
                    row["end_ns"] = row["sent_ns"] + row["token_ns"][-1]
                    row["output_tokens"] = 2
            return rows

        run = run_of(tmp_path, edit=pause)
        mine, _ = compared(run, "compiled", "itl", "all")
        long = mine.values > 30_000
        assert long.sum() > 3
        assert set(mine.block[long].tolist()) == {2}
        own, _ = compared(run, "compiled", "max_itl", "all")
        assert set(own.block[own.values > 30_000].tolist()) == {0}

    def test_gaps_are_pooled_over_requests(self, run_of_comparisons):
        mine, theirs = compared(run_of_comparisons, "compiled", "itl", "all")
        tokens = run_of_comparisons.requests.output_tokens[run_of_comparisons.of_arm("compiled")]
        assert len(mine) == len(theirs) == int((tokens - 1).sum())

    def test_what_ends_after_the_trial_is_in_its_last_block(self, run_of_comparisons):
        trial = run_of_comparisons.trials[0]
        at = np.array(
            [trial.start_ns, trial.start_ns + 10_000 * SECOND_COMPARISONS, trial.start_ns - SECOND_COMPARISONS]
        )
        assert blocks_at(run_of_comparisons, np.ones(3, dtype=np.int64), at).tolist() == [0, trial.blocks - 1, 0]


def test_a_slower_arm_is_slower_at_every_quantile(tmp_path):
    run = run_of(tmp_path, FakeRun(arms=(EAGER, FakeArm(name="compiled", ratio=1.5)), duration_s=300, rate=2))
    for metric in JUDGED_METRICS:
        for item in judge_quantiles(run, "compiled", metric, "all", qs=(0.5, 0.9)):
            assert item.ratio == pytest.approx(1.5, rel=0.15)


def test_a_few_blocks_set_no_limits_rather_than_endless_ones(tmp_path):
    naive = FakeArm(name="naive", compiles=[Compile(at_s=5, seconds=12)])
    gates = {"alpha": 0.0001, "cold_s": 60}
    found = comparisons(run_of(tmp_path, FakeRun(arms=(EAGER, naive), duration_s=95, rate=3, gates=gates)))
    cold = [item for item in found.beside if item.phase == "cold"]
    assert max(item.blocks for item in cold) <= 3
    assert any(item.low is None and item.high is None for item in cold)
    assert all(item.high is None or item.high < 1000 * item.ratio for item in cold)


def test_no_data_is_compared_with_a_reason(tmp_path):
    run = run_of(tmp_path, edit=lambda rows: [row for row in rows if row["arm"] == "eager"])
    found = comparisons(run)
    assert {item.verdict for item in (*found.gated, *found.beside)} <= {"INCONCLUSIVE"}
    assert all("cannot be compared" in item.reason for item in (*found.gated, *found.beside))


def test_the_same_seed_gives_the_same_comparisons(run_of_comparisons, found):
    assert comparisons(run_of_comparisons) == found
    assert json.dumps([item.low for item in found.beside]) != "[]"
