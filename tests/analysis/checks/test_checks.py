"""Each check of a run by itself: what fails it, whom it concerns and what it opens."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tailgate.analysis.checks import arms, complete, data, pressure, traffic
from tailgate.analysis.checks.applied import apply_checks
from tailgate.analysis.checks.check import Rule
from tailgate.analysis.checks.generator import dropped_faults, late_faults, lost_processes
from tailgate.analysis.checks.machines import LEVER, Disturbance, rows_of_rule, speed
from tailgate.analysis.checks.table import RULES
from tailgate.analysis.judging.comparisons import Comparisons
from tailgate.analysis.judging.gates import FAIL, INCONCLUSIVE, PASS
from tailgate.analysis.judging.judgement import judge
from tailgate.analysis.records.run_records import read_run
from tailgate.analysis.run.work import TokenTimes, Work
from tailgate.analysis.statistics.compare import Comparison
from tests.fakes.machines import tell
from tests.fakes.runs import SECOND, FakeRun, comparison, gate, run_in, write_run

ARMS = ("eager", "compiled")
HALVES, WEIGHTS = {"a": 50, "b": 50}, {"a": 9.0, "b": 1.0}
COMPILING = {"replica": "a-0", "exit_code": -9, "compiling": {"start_ns": 5, "seconds": 12.04, "shape": "2x64"}}
FEW = {"many": 23, "answers": 58}


def work(prompt_tokens: float) -> Work:
    return Work(arm="a", control="b", means=(("prompt tokens", prompt_tokens, 100.0),))


def came(arm: str = "a", **more: Any) -> TokenTimes:
    return TokenTimes(**{"arm": arm, "answers": 1000, "untimed": 0, "many": 800, "at_once": 0, **more})


def faults_of(rule: Rule, **run: Any) -> list[str]:
    """Return what the rule says of a run of which only this is known."""
    checks = list(rule.find(SimpleNamespace(run=SimpleNamespace(trial_name="trial {}".format, **run))))  # type: ignore[arg-type]
    return [check.reason for check in checks if not check.ok]


def compared(
    dtype: str = "float32", *, intended: bool = False, resolved: bool = True, external: Any = None
) -> list[str]:
    """Compare an arm of this dtype with a control in float32."""
    common = {"external": external, "resolved": resolved}
    arm = SimpleNamespace(arm="a", config={"model": {"dtype": dtype}}, **common)
    control = SimpleNamespace(arm="b", config={"model": {"dtype": "float32"}}, **common | {"resolved": True})
    records = SimpleNamespace(experiment={"compare_models": intended})
    account = {"a": arm, "b": control}.get
    return faults_of(arms.comparable, treatments=("a",), control="b", records=records, account=account)


def lived(*deaths: dict[str, Any], silent: tuple[str, ...] = ()) -> list[str]:
    account = SimpleNamespace(arm="a", external=None, deaths=deaths, silent=silent)
    return faults_of(complete.alive, arms=("a",), control="b", infos=[{"trial": 1}], account=lambda arm: account)


def pressed(on_s: tuple[int, int] = (0, 100), **had: Any) -> list[str]:
    """Ask for a neighbour on 2 processors in 100 s of traffic; it was there `on_s`."""
    start_ns, end_ns = (SECOND * (1 + at_s) for at_s in on_s)
    info = {"trial": 1, "start_ns": SECOND, "duration_s": 100, "complete": True}
    info["pressure"] = {"gpu_gib": 0, "processors": 2, "start_ns": start_ns, "end_ns": end_ns, **had}
    records = SimpleNamespace(experiment={"pressure": {"processors": 2}})
    return faults_of(pressure.pressure, records=records, infos=[info])


def late(**changes: Any) -> list[str]:
    return late_faults([{**ACCOUNT, **changes}], 50.0)


def dropped(**changes: Any) -> list[str]:
    return list(dropped_faults([{**ACCOUNT, **changes}]))


def stopped(*, joined: bool = False, **facts: Any) -> list[str]:
    """Return what is missing of a run that its user stopped after 6 s, or of two joined ones of which it is one."""
    info = {"trial": 1, "start_ns": SECOND, "interrupted_ns": 7 * SECOND, **facts}
    runs = [SimpleNamespace(name="day-2", trials={1: 1})]
    records = SimpleNamespace(generators=[], joined=joined, runs=runs, experiment={"trials": {"count": 2}})
    run: dict[str, Any] = {"infos": [info], "arms": ("a",), "records": records, "of_arm": lambda arm: np.ones(9)}
    run |= {"in_turn": False, "planned": {}, "reported_open_loop": True, "copied": True, "ended_arms": {}}
    return faults_of(complete.missing, **run)


def test_of_separate_runs_the_one_with_fewer_steady_requests_is_named() -> None:
    sizes: Any = {"quantile": 0.99, "margin": 0.1, "alpha": 0.05, "blocks": 9, "trials": 2, "requests": 60}
    item = Comparison(arm="a", fewer="b", ratio=1.0, **sizes)
    assert item.lacks == "b has 60 of 500 steady requests"
    seen: Any = SimpleNamespace(compared=SimpleNamespace(gated=[item]))
    assert [data._fewer(seen, arm) for arm in "ac"] == ["b", "c"]


def uneven(*, open_loop: bool) -> list[str]:
    """Return what is missing of mirrored arms of which one has 900 requests and the other 9."""
    run = {"infos": [], "arms": ("a", "b"), "in_turn": False, "planned": {}, "copied": True, "ended_arms": {}}
    run |= {"records": SimpleNamespace(generators=[], joined=False, runs=[], experiment={})}
    counts = {"a": np.ones(900), "b": np.ones(9)}
    return faults_of(complete.missing, of_arm=counts.get, reported_open_loop=open_loop, **run)


def lost(**changes: Any) -> list[str]:
    return lost_processes(
        [{**ACCOUNT, "trial": 1, "rows": 600, **changes}], [{"trial": 1, "load_processes": 1}], "trial {}".format
    )


ACCOUNT: dict[str, Any] = {
    "worker": 0,
    "planned": 600,
    "finished": 600,
    "records": {"written": 600, "dropped": 0},
    "lag_ms": {"p99": 1.0},
    "loop_lag_ms": {"p99": 1.0},
    "cpu": {"busy_s": 0.0, "of_s": 600.0},
    "complete": True,
}
CLOCK = {"offset_ns": 5, "exchanges": 30, "worst_uncertainty_ns": 1_000_000, "host": "b"}
USERS: dict[str, Any] = {"splitter": {"count": 1000}, "passed": 990, "unplaced": 0}


@pytest.mark.parametrize(
    ("faults", "words"),
    [
        (compared(), None),
        (compared("bfloat16"), "a also differs from the control in model.dtype"),
        (compared("bfloat16", intended=True), None),
        (compared(resolved=False), "one of them ran in no trial"),
        (compared(external={"kind": "openai"}), "a and b: weights, precision"),
        (compared(external={"kind": "openai"}, intended=True), None),
        (arms.unequal_means(work(104.0)), None),
        (arms.unequal_means(work(106.0)), "106 to 100 prompt tokens"),
        (arms.unequal_means(work(0.0)), "0 to 100"),
        (arms.gap_faults(came(at_once=80), came("b")), "10 % of a and 0 % of b"),
        (arms.gap_faults(came(at_once=80), came("b", at_once=80)), None),
        (arms.gap_faults(came(at_once=10, **FEW), came("b", at_once=7, **FEW)), None),
        (arms.gap_faults(came(), came("b", untimed=7)), "7 of 1000 answers of b"),
        (complete.missing_requests({"a": 1000, "b": 998}, {}, mirrored=True), None),
        (complete.missing_requests({"a": 1000, "b": 997}, {}, mirrored=True), "b has 997 of 1000"),
        (complete.missing_requests({"a": 1000, "b": 0}, {}), "b has no request"),
        (complete.missing_requests({}, {}, mirrored=True), "no arm"),
        (uneven(open_loop=True), "b has 9 of 900 requests"),
        (uneven(open_loop=False), None),
        (stopped(duration_s=780.0), "trial 1 was interrupted after 6 of 780 s"),
        (stopped(), "trial 1 was interrupted after 6 s"),
        (stopped(joined=True), "trial 1 (trial 1 of day-2) stopped before its end"),
        (stopped(joined=True), "trial 2 missing"),
        (complete.missing_requests({"a": 900, "b": 900}, {"a": 1000, "b": 1000}, mirrored=True), "a has 900 of 1000"),
        (complete.missing_requests({"a": 500, "b": 400}, {"*": 1000}), "900 of 1000"),
        (complete.missing_requests({"a": 600, "b": 400}, {"*": 1000}), None),
        (lived(), None),
        (lived({"replica": "a-0", "exit_code": -9}), "a-0 died under load (exit code -9)"),
        (lived(COMPILING), "12.0 s into a compile for 2x64"),
        (lived(silent=("a-1",)), "a-1 had stopped serving"),
        (traffic.share_faults([({"a": 9010, "b": 990}, WEIGHTS)]), None),
        (traffic.share_faults([({"a": 8700, "b": 1300}, WEIGHTS)]), "more than chance"),
        (traffic.share_faults([({"a": 900, "b": 100, "c": 3}, WEIGHTS | {"c": 0.0})]), "c got 3 of 1003 sessions"),
        (traffic.share_faults([({"a": 5}, WEIGHTS)]), None),
        (traffic.share_faults([({"a": 0, "b": 0}, {"a": 1, "b": 1})]), None),
        (traffic.share_faults([({"a": 5, "b": 2}, {"a": 99, "b": 1})]), None),  # p = .002, twice
        (traffic.share_faults([(HALVES, {"a": 1, "b": 1}), (HALVES, WEIGHTS)]), "more than chance"),
        (pressed(), None),
        (pressed((8, 100)), "from 8 to 100 s"),
        (pressed((0, 90)), "from 0 to 90 s"),
        (pressed(processors=1), "not what [pressure] asks for"),
        (pressed(end_ns=None), "not recorded"),
        (pressed(error="no memory"), "trial 1: no memory"),
        (late(), None),
        (late(loop_lag_ms={"p99": 60.0}), "60.0 ms, limit 50 ms"),
        (late(cpu={"busy_s": 31.0, "of_s": 600.0}), "31 of 600 s, limit 30 s"),
        (late(cpu={"busy_s": 2.0, "of_s": 15.0}), None),
        (late(clock={**CLOCK, "worst_uncertainty_ns": 51_000_000}), "± 51 ms, limit 50 ms"),
        (late(clock={**CLOCK, "exchanges": 0}), "not compared"),
        (late(clock=CLOCK), None),
        (late(clock={"same": True, "exchanges": 0}), None),
        (dropped(records={"dropped": 3}), "load process 0 dropped 3 records"),
        (dropped(**USERS), "of 1000 production requests 10 are not in"),
        (dropped(**USERS | {"passed": 999}), None),
        (lost(), None),
        (lost(lost="no answer", complete=False, rows=40), "lost (no answer), with 40 of 600"),
        (lost(complete=False, rows=40, error="no disk"), "cut off (no disk), with 40 of 600"),
        (lost(rows=599), "ended 600 requests and 599 are recorded"),
        (lost(trial=2), "trial 1 has accounts of 0 of 1 load processes"),
    ],
)
def test_a_check_holds_or_fails_by_its_facts(faults: list[str], words: str | None) -> None:
    assert bool(faults) is (words is not None)
    assert words is None or words in faults[0]


@pytest.mark.parametrize(("seen", "ok"), [((1.6, 0.01), False), ((1.6, 0.2), True), ((1.05, 0.01), True)])
def test_interference_is_a_large_slowdown_beyond_chance(
    seen: tuple[float, float], ok: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traffic, "_slowdown", lambda run: seen)
    assert (faults_of(traffic.interference) == []) is ok


def test_rules_of_one_check_follow_each_other_and_rank_alike():
    groups = [name for name, _ in groupby(RULES, lambda rule: rule.name)]
    assert len(groups) == len(set(groups))
    ranks = {(rule.name, rule.rank) for rule in RULES}
    assert len(ranks) == len(groups)


ALL = comparison(verdict=PASS, blocks=60, groups=6, trials=6)


def machine(name, ratio, spread, **more):
    own = replace(ALL, machine=name, ratio=ratio, spread=spread, trials=2, verdict=INCONCLUSIVE)
    return replace(own, **{"p_inferior": 0.5, "p_noninferior": 0.5, **more})


SPREAD = [machine("a", 0.9, 0.02), machine("b", 1.12, 0.02)]
FAILED = replace(ALL, ratio=1.3, verdict=FAIL)


@pytest.mark.parametrize(
    ("item", "machines", "ok"),
    [
        (ALL, [machine("a", 0.98, 0.02), machine("b", 1.03, 0.02)], True),
        (ALL, [machine("a", 0.9, 0.03), machine("b", 1.15, 0.03)], False),
        (ALL, [machine("a", 0.9, 0.2), machine("b", 1.15, 0.2)], True),
        (ALL, [machine("a", 0.7, 0.01), machine("b", 1.0, 0.01)], True),
        (ALL, [*(machine(name, 1.0, 0.5) for name in "acd"), machine("b", 1.2, 0.3, p_inferior=0.04)], False),
        (FAILED, [machine("a", 1.6, 0.02), machine("b", 1.0, 0.02)], False),
        (FAILED, [machine("a", 1.35, 0.02), machine("b", 1.25, 0.02)], True),
        (ALL, [machine("a", None, None), machine("b", 1.0, 0.02)], True),
        (ALL, SPREAD, False),
        (ALL, [replace(item, restart_spread=0.2 * math.sqrt(2.0)) for item in SPREAD], True),
    ],
)
def test_a_machine_that_contradicts_all_of_them_opens_the_comparison(item, machines, ok):
    texts = [text for *_, text in data.contradicted([item], machines)]
    assert (texts == []) is ok
    assert ok or "b" in texts[0]


@pytest.mark.parametrize("verdict", [PASS, FAIL])
def test_only_the_gate_that_is_contradicted_is_opened(verdict, monkeypatch):
    gates = [
        gate("slo", PASS, gate="slo p99_ttft_ms"),
        gate("slo", verdict, gate="slo p99_e2e_ms"),
        gate("noninferiority", verdict),
        gate("recompile", PASS),
    ]
    monkeypatch.setattr(data, "_missed_on_one", lambda run, arm: [("slo p99_ttft_ms", "slo", "missed on b")])
    run = SimpleNamespace(treatments=("compiled",), machines=("a", "b"))
    (check,) = data.heterogeneity.find(SimpleNamespace(run=run, compared=Comparisons()))
    after = apply_checks(gates, [check])
    assert [item.verdict for item in after] == [INCONCLUSIVE, verdict, verdict, PASS]
    assert after[0].blocked_by == ("heterogeneity",)


def disturbance(*, excess: float, shift: float | None, trial: int = 1, place: str = "cuda:1") -> Disturbance:
    return Disturbance(place=place, trial=trial, arms=("compiled",), excess=excess, shift=shift, text="so")


@pytest.mark.parametrize(
    ("troubles", "shift"),
    [
        ([disturbance(excess=0.6, shift=0.1), disturbance(excess=0.5, shift=0.4, trial=2)], LEVER * 0.4),
        ([disturbance(excess=0.9, shift=0.1), disturbance(excess=0.3, shift=None, trial=2)], None),
        ([disturbance(excess=0.9, shift=0.1), disturbance(excess=0.3, shift=None, place="cuda:0")], None),
        ([disturbance(excess=0.6, shift=0.1), disturbance(excess=0.5, shift=0.2, place="host")], LEVER * (0.1 + 0.2)),
    ],
    ids=["largest of a place", "one unknown", "unknown elsewhere", "two places add up"],
)
def test_disturbances_shift_an_arm_by_the_largest_change_of_each_place(
    troubles: list[Disturbance], shift: float | None
) -> None:
    run = SimpleNamespace(arms=ARMS, trial_name="trial {}".format)
    seen: Any = SimpleNamespace(run=run, machines=SimpleNamespace(speeds=()))
    (check,) = rows_of_rule(speed, seen, troubles)
    assert check.shift == shift


@pytest.mark.parametrize(
    ("changes", "blocked"),
    [
        ({}, None),
        ({"finished": 10**6}, "complete"),
        ({"loop_lag_ms": {"p99": 51.0}}, "load generator"),
        ({"records": {"dropped": 3}}, "load generator"),
    ],
)
def test_a_run_whose_generator_fell_short_does_not_pass(
    changes: dict[str, Any], blocked: str | None, tmp_path: Path
) -> None:
    directory = tell(write_run(tmp_path / "run", FakeRun(rate=8.0)), load_processes=1)
    rows = len(read_run(directory).requests)
    account = {**ACCOUNT, "planned": rows, "finished": rows, "rows": rows, **changes}
    (directory / "trial-01" / "generator-0.json").write_text(json.dumps(account))
    judgement = judge(run_in(directory))
    assert judgement.overall == ("PASS" if blocked is None else "INCONCLUSIVE")
    assert {check.check for check in judgement.checks if not check.ok} == (set() if blocked is None else {blocked})
