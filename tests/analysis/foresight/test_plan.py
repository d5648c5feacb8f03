from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from analysis.foresight.plan import Goal
from analysis.foresight.plan_from_design import DESIGNS, Traffic, plan_from_design
from analysis.foresight.plan_from_pilot import plan_from_run
from analysis.records.run_list import listed_runs, write_run_list
from analysis.records.tables import RecordError
from analysis.settings.slo_targets import parse_targets
from tests.fakes.beds import FakeBed, Trouble
from tests.fakes.plans import GATES, pilot, row
from tests.fakes.runs import DAYS_APART, EAGER, Compile, FakeArm, FakeRun, write_run

__all__ = ["pilot"]  # a fixture


def test_a_pilot_plans_every_gate_and_shows_what_does_not_gate(pilot: Path) -> None:
    plan = plan_from_run(pilot, Goal(margin=0.05))
    gating = {item["what"] for item in plan["rows"] if item["gate"]}
    assert gating == {"p99 TTFT", "p99 E2E", "slo p99_ttft_ms", "errors", "blocks and tail"}
    assert not row(plan, "p50 E2E")["gate"]
    assert row(plan, "p50 E2E")["needed_s"] <= row(plan, "p99 E2E")["needed_s"]
    assert plan["needed_s"] == max(item["needed_s"] for item in plan["rows"] if item["gate"])
    assert plan["needed_s"] == row(plan, plan["decided_by"].removeprefix("compiled "))["needed_s"]
    assert (plan["wanted"]["margin"], plan["trials"], plan["trial_s"]) == (0.05, 1, plan["needed_s"])


def test_a_wider_margin_and_less_power_take_less(pilot: Path) -> None:
    narrow, wide, weak = (
        row(plan_from_run(pilot, goal), "p99 E2E")["needed_s"]
        for goal in (Goal(margin=0.04), Goal(margin=0.08), Goal(margin=0.04, power=0.5))
    )
    assert wide < narrow
    assert weak < narrow


def test_a_duration_names_the_margin_that_needs_it(pilot: Path) -> None:
    first = row(plan_from_run(pilot, Goal(duration_s=7200)), "p99 E2E")
    again = row(plan_from_run(pilot, Goal(margin=first["margin"])), "p99 E2E")
    assert again["needed_s"] == pytest.approx(7200, abs=60)


def test_a_narrow_margin_takes_more_starts_and_not_only_time(pilot: Path) -> None:
    narrow = row(plan_from_run(pilot, Goal(margin=0.03)), "p99 E2E")
    assert "in 4 fresh starts" in narrow["note"]
    assert narrow["needed_s"] is not None
    at_margin = row(plan_from_run(pilot, Goal(margin=0.03, ratio=1.03)), "p99 E2E")
    assert (at_margin["needed_s"], at_margin["note"]) == (None, "")
    assert "starts" not in row(plan_from_run(pilot, Goal(margin=0.10)), "p99 E2E")["note"]


def test_an_arm_that_failed_does_not_make_the_run_longer(tmp_path: Path) -> None:
    arms = (EAGER, FakeArm(name="new"), FakeArm(name="stalls", compiles=[Compile(at_s=100, seconds=3)]))
    run = FakeRun(duration_s=210, rate=2.0, arms=arms, gates=GATES, own_drift=0.1)
    plan = plan_from_run(write_run(tmp_path / "run", run), Goal())
    assert plan["decided_by"].startswith("new ")
    assert any("stalls failed in the pilot: no length clears that" in text for text in plan["assumed"])


def test_without_a_pilot_mirrored_arms_need_least_and_separate_ones_most() -> None:
    lengths = {design: plan_from_design(Traffic(rate=4, design=design), Goal())["needed_s"] for design in DESIGNS}
    assert lengths["mirrored"] < lengths["split"] < lengths["separate"]
    assert lengths["shadow"] == lengths["mirrored"]
    assert lengths["switchback"] == pytest.approx(lengths["separate"], rel=0.01)  # but for the length of a block
    steady = plan_from_design(Traffic(rate=4, arrivals="steady"), Goal())["needed_s"]
    assert steady < lengths["mirrored"]
    assert plan_from_design(Traffic(rate=16), Goal())["needed_s"] < lengths["mirrored"]


def test_an_arm_that_searches_for_kernels_takes_more_or_more_starts() -> None:
    plain, searching = (
        plan_from_design(Traffic(rate=4, trials=4, searching=searches), Goal()) for searches in (False, True)
    )
    assert searching["needed_s"] > plain["needed_s"]
    notes = [any("searches for no kernels" in text for text in plan["assumed"]) for plan in (plain, searching)]
    assert notes == [True, False]


def test_without_a_pilot_requests_bound_the_length_too() -> None:
    targets = parse_targets(["p99_ttft_ms <= 500"], "--slo")
    plan = plan_from_design(Traffic(rate=0.1), Goal(margin=2.0), targets=targets)
    slo = row(plan, "slo p99_ttft_ms")
    assert "299 requests if none misses it" in slo["note"]
    assert slo["needed_s"] >= 299 / 0.1
    assert "598 requests" in row(plan, "errors")["note"]
    assert row(plan, "blocks and tail")["needed_s"] == 5 / 0.01 / 0.1 + 30 + 10  # a whole number of blocks


def test_six_trials_share_the_time_and_know_their_error_less_well() -> None:
    plan = plan_from_design(Traffic(rate=4, trials=6), Goal())
    assert plan["trial_s"] * 6 >= plan["needed_s"]
    assert plan["needed_s"] > plan_from_design(Traffic(rate=4, trials=5), Goal())["needed_s"]
    assert not any("Blocks of one start" in text for text in plan["assumed"])
    assert any("How much starts differ is gates.restart_spread" in text for text in plan["assumed"])


def test_a_pilot_of_six_trials_asks_for_more_trials_of_the_same_length(tmp_path: Path) -> None:
    run = FakeRun(duration_s=120, rate=1.0, trials=6, gates={**GATES, "metrics": ["e2e"], "min_blocks": 2})
    plan = plan_from_run(write_run(tmp_path / "run", run), Goal(margin=0.04))
    assert plan["trial_s"] == 120
    assert plan["trials"] > 6
    assert plan["trials"] * 120 == pytest.approx(plan["needed_s"], rel=0.2)


@pytest.mark.parametrize(("trials", "slo", "asked"), [(2, {}, True), (6, {}, False), (6, {"p99_ttft_ms": 2000}, True)])
def test_a_drift_that_trials_differ_by_is_mended_where_it_leaves_a_gate_open(
    tmp_path: Path, trials: int, slo: dict[str, float], asked: bool
) -> None:
    bed = FakeBed(card_noise=0.0, host_noise=0.0, troubles=(Trouble(what="slow_after", size=0.8),))
    run = FakeRun(duration_s=300 if trials == 2 else 120, rate=1.0, trials=trials, gates=GATES, slo=slo, bed=bed)
    plan = plan_from_run(write_run(tmp_path / "run", run), Goal(margin=0.1))
    assert any("% slower" in text for text in plan["mend_first"]) is asked


@pytest.mark.parametrize(("ratios", "said"), [((1.0, 1.0, 1.0), False), ((0.9, 1.0, 1.1), True)])
def test_a_pilot_whose_machines_differ_asks_for_more_of_them(
    tmp_path: Path, ratios: tuple[float, ...], said: bool
) -> None:
    runs = []
    for day, ratio in enumerate(ratios):
        arms = (EAGER, FakeArm(name="compiled", ratio=ratio))
        gates = {**GATES, "metrics": ["e2e"]}
        run = FakeRun(duration_s=300, rate=3.0, arms=arms, gates=gates, environment={"machine": f"m{day}"}, seed=day)
        runs.append(write_run(tmp_path / f"run-{day}", replace(run, day=day * DAYS_APART)))
    write_run_list(tmp_path / "joined", listed_runs(runs))
    plan = plan_from_run(tmp_path / "joined", Goal(margin=0.1))
    assert any("more machines" in text for text in plan["assumed"]) is said


def test_a_goal_is_checked_where_it_is_made() -> None:
    with pytest.raises(RecordError, match="--margin is nan"):
        Goal(margin=float("nan"))
