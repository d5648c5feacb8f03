"""Each check of a run by itself: what fails it, whom it concerns and what it opens."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tailgate.analysis.checks import arms, complete, data, pressure, traffic
from tailgate.analysis.checks.applied import apply_checks
from tailgate.analysis.checks.generator import dropped_faults, late_faults, lost_processes
from tailgate.analysis.checks.machines import LEVER, SPEED, Disturbance, rows_of_rule
from tailgate.analysis.checks.table import RULES
from tailgate.analysis.judging.gates import FAIL, INCONCLUSIVE, PASS
from tailgate.analysis.judging.judgement import judge
from tailgate.analysis.records.run_records import read_run
from tailgate.analysis.run.run import Run
from tailgate.analysis.run.work import TokenTimes, Work
from tests.fakes.machines import tell
from tests.fakes.runs import SECOND, FakeRun, comparison, gate, write_run

EXTERNAL = ["a"]
ARMS = ("eager", "compiled")
WEIGHTS = {"a": 9.0, "b": 1.0}
COMPILING = {"replica": "a-0", "exit_code": -9, "compiling": {"start_ns": 5, "seconds": 12.04, "shape": "2x64"}}


def work(prompt_tokens=100.0, **more):
    return Work(arm="a", control="b", means=(("prompt tokens", prompt_tokens, 100.0),), **more)


def came(arm="a", **more):
    return TokenTimes(**{"arm": arm, "answers": 1000, "untimed": 0, "many": 800, "at_once": 0, **more})


def ratio(counts, weights):
    (check,) = traffic.sample_ratio([(counts, weights)])
    return check


def correlated(*values):
    known = [comparison(autocorrelation=value, blocks=48, groups=12) for value in values]
    (check,) = data.autocorrelation("a", known)
    return check


def missing(*arguments, **more):
    return complete.MISSING.found(complete.missing_requests(*arguments, **more))


def pressed(on_s=(0, 100), **had):
    """Ask for a neighbour on 2 processors in 100 s of traffic; it was there `on_s`."""
    start_ns, end_ns = (SECOND * (1 + at_s) for at_s in on_s)
    info = {"trial": 1, "start_ns": SECOND, "duration_s": 100, "complete": True}
    info["pressure"] = {"gpu_gib": 0, "processors": 2, "start_ns": start_ns, "end_ns": end_ns, **had}
    records = SimpleNamespace(experiment={"pressure": {"processors": 2}})
    (check,) = pressure.PRESSURE.find(SimpleNamespace(run=SimpleNamespace(records=records, infos=[info])))
    return check


FEW = {"many": 23, "answers": 58}


@pytest.mark.parametrize(
    ("check", "ok", "words"),
    [
        (arms.comparable("a", [], intended=False), True, ""),
        (arms.comparable("a", ["model.dtype"], intended=False), False, "model.dtype"),
        (arms.comparable("a", ["model.dtype"], intended=True), True, ""),
        (arms.comparable("a", [], intended=False, external=EXTERNAL), False, "a: weights, precision"),
        (arms.comparable("a", [], intended=True, external=EXTERNAL), True, ""),
        (arms.equal_work(work(104.0)), True, ""),
        (arms.equal_work(work(106.0)), False, ""),
        (arms.equal_work(work(0.0)), False, ""),
        (arms.equal_work(work(other=("3 of 9 answers of a are shorter",))), False, "3 of 9 answers of a"),
        (arms.token_stream(came(at_once=80), came("b"), judged=True), False, ""),
        (arms.token_stream(came(at_once=80), came("b"), judged=False), True, ""),
        (arms.token_stream(came(at_once=80), came("b", at_once=80), judged=True), True, ""),
        (arms.token_stream(came(at_once=10, **FEW), came("b", at_once=7, **FEW), judged=True), True, ""),
        (arms.token_stream(came(), came("b", untimed=7), judged=True), False, "7 of 1000 answers of b"),
        (correlated(0.2, None), True, ""),
        (correlated(0.2, 0.8), False, ""),
        (missing({"a": 1000, "b": 998}, {}, mirrored=True), True, ""),
        (missing({"a": 1000, "b": 997}, {}, mirrored=True), False, "b has 997 of 1000"),
        (missing({"a": 1000, "b": 0}, {}, mirrored=False), False, ""),
        (missing({}, {}, mirrored=True), False, ""),
        (missing({"a": 900, "b": 900}, {"a": 1000, "b": 1000}, mirrored=True), False, ""),
        (missing({"a": 500, "b": 400}, {"*": 1000}, mirrored=False), False, ""),
        (missing({"a": 600, "b": 400}, {"*": 1000}, mirrored=False), True, ""),
        (complete.lived("a", [], control=False), True, ""),
        (
            complete.lived("a", [{"replica": "a-0", "exit_code": -9}], control=False),
            False,
            "a-0 died under load (exit code -9)",
        ),
        (complete.lived("a", [COMPILING], control=True), False, "12.0 s into a compile for 2x64"),
        (ratio({"a": 9010, "b": 990}, WEIGHTS), True, ""),
        (ratio({"a": 8700, "b": 1300}, WEIGHTS), False, ""),
        (ratio({"a": 900, "b": 100, "c": 3}, WEIGHTS | {"c": 0.0}), False, "c got 3 of 1003 sessions (expected 0)"),
        (*traffic.interference(1.6, 0.01), False, "1.60 times"),
        (*traffic.interference(1.6, 0.2), True, ""),
        (pressed(), True, ""),
        (pressed((8, 100)), False, "from 8 to 100 s"),
        (pressed((0, 90)), False, "from 0 to 90 s"),
        (pressed(processors=1), False, "not what [pressure] asks for"),
        (pressed(end_ns=None), False, "not recorded"),
        (pressed(error="no memory"), False, "trial 1: no memory"),
    ],
)
def test_a_check_holds_or_fails_by_its_facts(check, ok, words):
    assert check.ok is ok
    assert words in check.reason


@pytest.mark.parametrize(
    ("check", "arm", "opens"),
    [
        (arms.equal_work(work(106.0)), "a", {"noninferiority", "slo"}),
        (complete.lived("a", [COMPILING], control=True), None, {"noninferiority", "slo"}),
        (complete.lived("a", [COMPILING], control=False), "a", {"noninferiority", "slo"}),
    ],
)
def test_a_check_concerns_its_arm_and_affects_its_gates(check, arm, opens):
    assert check.arm == arm
    assert opens <= set(check.opens)


def test_what_cannot_be_tested_has_no_row():
    assert list(traffic.sample_ratio([({"a": 5}, WEIGHTS)])) == []
    assert list(traffic.interference(None, None)) == []
    assert list(data.autocorrelation("a", [comparison(autocorrelation=None)])) == []


def test_rules_of_one_check_follow_each_other_and_rank_alike():
    groups = [name for name, _ in groupby(RULES, lambda rule: rule.name)]
    assert len(groups) == len(set(groups))
    ranks = {(rule.name, rule.rank) for rule in RULES}
    assert len(ranks) == len(groups)


ALL = comparison(verdict=PASS, blocks=60, groups=6, trials=6)


def machine(name, ratio, spread, **more):
    own = replace(ALL, machine=name, ratio=ratio, spread=spread, trials=2, verdict=INCONCLUSIVE)
    return replace(own, **{"p_inferior": 0.5, "p_noninferior": 0.5, **more})


def found(item, *by_machine, shares=()):
    return data.heterogeneity("compiled", [item], by_machine, shares)


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
    check = found(item, *machines)
    assert check.ok is ok
    assert ok or "b" in check.reason


@pytest.mark.parametrize("verdict", [PASS, FAIL])
def test_only_the_gate_that_is_contradicted_is_opened(verdict):
    gates = [
        gate("slo", PASS, gate="slo p99_ttft_ms"),
        gate("slo", verdict, gate="slo p99_e2e_ms"),
        gate("noninferiority", verdict),
        gate("recompile", PASS),
    ]
    missed = ("slo p99_ttft_ms", "slo", "p99_ttft_ms is missed on b alone")
    check = found(ALL, machine("a", 1.0, 0.1), machine("b", 1.0, 0.1), shares=[missed])
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
    (check,) = rows_of_rule(SPEED, ARMS, troubles)
    assert check.shift == shift


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
USERS = {"splitter": {"count": 1000}, "passed": 990, "unplaced": 0}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"loop_lag_ms": {"p99": 60.0}}, "60.0 ms, limit 50 ms"),
        ({"cpu": {"busy_s": 31.0, "of_s": 600.0}}, "31 of 600 s, limit 30 s"),
        ({"clock": {**CLOCK, "worst_uncertainty_ns": 51_000_000}}, "± 51 ms, limit 50 ms"),
        ({"clock": {**CLOCK, "exchanges": 0}}, "not compared"),
        ({"clock": CLOCK}, ""),
        ({"clock": {"same": True, "exchanges": 0}}, ""),
        ({"cpu": {"busy_s": 2.0, "of_s": 15.0}}, ""),
        ({}, ""),
    ],
)
def test_the_load_generator_fails_by_each_account_that_was_late(changes: dict[str, Any], words: str) -> None:
    assert [words in fault for fault in late_faults([{**ACCOUNT, **changes}], 50.0)] == [True] * bool(words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"records": {"dropped": 3}}, "load process 0 dropped 3 records"),
        (USERS, "of 1000 production requests 10 are not in"),
        ({**USERS, "passed": 999}, ""),
    ],
)
def test_requests_that_were_dropped_or_never_logged_are_lost(changes: dict[str, Any], words: str) -> None:
    assert [words in fault for fault in dropped_faults([{**ACCOUNT, **changes}])] == [True] * bool(words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lost": "no answer", "complete": False, "rows": 40}, ("no answer", "40 of 600")),
        ({"complete": False, "rows": 40, "error": "no disk"}, ("no disk", "40 of 600")),
        ({"rows": 599}, ("600 requests", "599 are recorded")),
        ({"trial": 2}, ("trial 1 has accounts of 0 of 1 load processes",)),
    ],
)
def test_a_load_process_that_is_lost_is_named(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    def lost(**more: Any) -> list[str]:
        return lost_processes([{**ACCOUNT, "trial": 1, "rows": 600, **more}], [{"trial": 1, "load_processes": 1}])

    assert lost() == []
    assert [word for word in words if word not in lost(**changes)[0]] == []


def whole_run(directory: Path) -> tuple[Path, dict[str, Any]]:
    write_run(directory, FakeRun(rate=8.0))
    folder = directory / "trial-01"
    rows = len(read_run(directory).requests)
    tell(directory, load_processes=1)
    files = list(folder.glob("requests*.arrow"))
    assert len(files) == 1
    files[0].rename(folder / "requests-0.arrow")
    account = {**ACCOUNT, "planned": rows, "finished": rows, "records": {"written": rows, "dropped": 0}}
    (folder / "generator-0.json").write_text(json.dumps(account))
    return folder, account


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
    folder, account = whole_run(tmp_path / "run")
    (folder / "generator-0.json").write_text(json.dumps(account | changes))
    judgement = judge(Run.of(read_run(tmp_path / "run")))
    assert judgement.overall == ("PASS" if blocked is None else "INCONCLUSIVE")
    assert {check.check for check in judgement.checks if not check.ok} == (set() if blocked is None else {blocked})
