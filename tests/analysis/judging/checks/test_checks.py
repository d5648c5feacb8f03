"""Each check of a run by itself: what fails it, whom it concerns and what it opens."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from analysis.judging.checks.arms import check_answers, check_comparable, check_equal_work, check_token_stream
from analysis.judging.checks.disturbances import LEVER, Aspect, Disturbance, checks_of, gathered
from analysis.judging.checks.loop import UNKNOWN, Loop
from analysis.judging.checks.machines import check_machines
from analysis.judging.checks.pressure import check_pressure
from analysis.judging.checks.records import check_complete, check_counts, check_cut, check_deaths, check_records
from analysis.judging.checks.statistics import (
    check_autocorrelation,
    check_blocks,
    check_cold_starts,
    check_length,
    check_tail,
)
from analysis.judging.checks.traffic import (
    check_control_errors,
    check_interference,
    check_open_loop,
    check_sample_ratio,
)
from analysis.judging.gates import FAIL, INCONCLUSIVE, PASS
from analysis.judging.generators import check_generator, lag_of, lost_processes, measured_of
from analysis.judging.judgement import judge
from analysis.judging.validity import apply_checks
from analysis.records.run_records import read_run, shifted
from analysis.run.run import Run
from analysis.run.work import TokenTimes, Work
from analysis.settings.gate_limits import GateLimits
from tests.fakes.machines import tell
from tests.fakes.runs import FakeRun, comparison, gate, write_run

EXTERNAL = {"a": "openai"}
WEIGHTS = {"a": 9.0, "b": 1.0}
ENDED = [{"trial": 1, "complete": True}, {"trial": 2, "complete": True}]
COMPILING = {"replica": "a-0", "exit_code": -9, "compiling": {"start_ns": 5, "seconds": 12.04, "shape": "2x64"}}


def work(prompt_tokens=100.0, **more):
    return Work(arm="a", control="b", means=(("prompt tokens", prompt_tokens, 100.0),), **more)


def came(arm="a", **more):
    return TokenTimes(**{"arm": arm, "answers": 1000, "untimed": 0, "many": 800, "at_once": 0, **more})


def row(replica="eager-0", same=6, dtype="float32", **more):
    known = {"arm": "eager", "replica": replica, "error": None, "departs": None, "same": same, "of": 6}
    return {**known, "dtype": dtype, "prompts": [4, 57, 2, 9, 9, 9], **more}


def correlated(*values):
    return [comparison(autocorrelation=value, blocks=48, groups=12) for value in values]


FEW = {"many": 23, "answers": 58}
OTHER_ANSWER = row("eager-1", 5, departs=[1, 2])
LIMITS = GateLimits()
FREE = Loop(z=0.2, kept=0.95)


@pytest.mark.parametrize(
    ("check", "ok", "words"),
    [
        (check_comparable("a", [], intended=False), True, ""),
        (check_comparable("a", ["model.dtype"], intended=False), False, "model.dtype"),
        (check_comparable("a", ["model.dtype"], intended=True), True, ""),
        (check_comparable("a", [], intended=False, outside=EXTERNAL), False, ""),
        (check_comparable("a", [], intended=True, outside=EXTERNAL), True, "a (openai) is external"),
        (check_equal_work(work(104.0)), True, ""),
        (check_equal_work(work(106.0)), False, ""),
        (check_equal_work(work(0.0)), False, ""),
        (check_equal_work(work(other=("3 of 9 answers of a are shorter",))), False, "3 of 9 answers of a"),
        (check_token_stream(came(at_once=80), came("b"), judged=True), False, ""),
        (check_token_stream(came(at_once=80), came("b"), judged=False), True, ""),
        (check_token_stream(came(at_once=80), came("b", at_once=80), judged=True), True, ""),
        (check_token_stream(came(at_once=10, **FEW), came("b", at_once=7, **FEW), judged=True), True, ""),
        (check_token_stream(came(), came("b", untimed=7), judged=True), False, "7 of 1000 answers of b"),
        (check_answers("eager", [row(), row("eager-1")]), True, ""),
        (check_answers("eager", [row(), OTHER_ANSWER]), False, "token 3 after a prompt of 57"),
        (check_answers("eager", [row(), OTHER_ANSWER | {"dtype": "bfloat16"}]), True, ""),
        (check_autocorrelation("a", correlated(0.2, None)), True, ""),
        (check_autocorrelation("a", correlated(0.2, 0.8)), False, ""),
        (check_autocorrelation("a", correlated(None)), True, ""),
        (check_autocorrelation("a", correlated(0.8), lengths_change=True), False, "traffic.length_scales"),
        (check_blocks("a", 18, LIMITS, 30.0), True, ""),
        (check_blocks("a", 17, LIMITS, 30.0), False, "17 steady blocks"),
        (check_length(1, LIMITS, 30.0), False, ""),
        (check_tail("a", 500, 0.99), True, ""),
        (check_tail("a", 499, 0.99), False, ""),
        (check_tail("a", 0, 0.5), False, ""),
        (check_cold_starts(3), True, ""),
        (check_cold_starts(1), False, "1 cold start; 3"),
        (check_counts({"a": 1000, "b": 998}, {}, mirrored=True), True, ""),
        (check_counts({"a": 1000, "b": 997}, {}, mirrored=True), False, "b has 997 of 1000"),
        (check_counts({"a": 1000, "b": 0}, {}, mirrored=False), False, ""),
        (check_counts({}, {}, mirrored=True), False, ""),
        (check_counts({"a": 900, "b": 900}, {"a": 1000, "b": 1000}, mirrored=True), False, ""),
        (check_counts({"a": 500, "b": 400}, {"*": 1000}, mirrored=False), False, ""),
        (check_counts({"a": 600, "b": 400}, {"*": 1000}, mirrored=False), True, ""),
        (check_cut("a", 10, 1000, 0.99), True, ""),
        (check_cut("a", 11, 1000, 0.99), False, ""),
        (check_records([], 0, 0), True, ""),
        (check_records(["a.arrow is cut off"], 0, 0), False, "a.arrow is cut off"),
        (check_records([], 1, 0), False, "1 request has times"),
        (check_records([], 0, 2), False, "2 rows repeat"),
        (check_complete(ENDED[:1]), True, ""),
        (check_complete([*ENDED[:1], {"trial": 2}]), False, "Trial 2 was stopped"),
        (check_complete(ENDED, planned=2), True, ""),
        (check_complete(ENDED, planned=3), False, "Trial 3 is missing"),
        (check_complete([ENDED[0], {"trial": 3, "complete": True}]), False, "Trial 2 is missing"),
        (check_complete([], planned=0), True, ""),
        (check_complete(ENDED, processes=["load process 0 is lost"]), False, "Load process 0 is lost"),
        (check_deaths("a", [], control=False), True, ""),
        (check_deaths("a", [{"replica": "a-0", "exit_code": -9}], control=False), False, "a-0 (exit code -9)"),
        (check_deaths("a", [COMPILING], control=True), False, "12.0 s into a compile for 2x64"),
        (check_sample_ratio({"a": 9010, "b": 990}, WEIGHTS), True, ""),
        (check_sample_ratio({"a": 8700, "b": 1300}, WEIGHTS), False, ""),
        (check_sample_ratio({"a": 900, "b": 100, "c": 3}, WEIGHTS | {"c": 0.0}), False, "c has weight 0"),
        (check_generator([lag_of(3.0, 50.0)]), True, "3.0 ms late or more, limit 50 ms"),
        (check_generator([lag_of(80.0, 50.0)]), False, ""),
        (check_generator([lag_of(None, 50.0)]), False, ""),
        (
            check_generator([lag_of(80.0, 50.0), lag_of(120.0, 50.0)]),
            False,
            "120.0 ms late or more, limit 50 ms; and 1",
        ),
        (check_control_errors("eager", 5, 1000, 0.5), True, ""),
        (check_control_errors("eager", 6, 1000, 0.5), False, ""),
        (check_control_errors("eager", 0, 0, 0.5), True, ""),
        (check_open_loop(True, True), True, ""),
        (check_open_loop(None, True), True, ""),
        (check_open_loop(False, True), False, ""),
        (check_open_loop(True, False), False, ""),
        (check_open_loop(None, True, loops=[FREE, FREE]), True, ""),
        (check_open_loop(None, True, loops=[FREE, Loop(z=-9.0, kept=0.4)]), False, "60 %"),
        (check_open_loop(None, True, loops=[FREE, UNKNOWN]), False, ""),
        (check_pressure([]), True, ""),
        (check_pressure([f"fault {number}" for number in range(5)]), False, "fault 2; and 2 more"),
        (check_interference(None, None), True, ""),
        (check_interference(1.6, 0.01), False, ""),
    ],
)
def test_a_check_holds_or_fails_by_its_facts(check, ok, words):
    assert check.ok is ok
    assert words in check.reason


@pytest.mark.parametrize(
    ("check", "arm", "affects"),
    [
        (check_equal_work(work(106.0)), "a", {"noninferiority", "slo", "cold"}),
        (check_answers("eager", [row(), OTHER_ANSWER]), None, {"noninferiority", "parity", "recompile"}),
        (check_blocks("a", 17, LIMITS, 30.0), "a", {"noninferiority"}),
        (check_cold_starts(1), None, {"cold"}),
        (check_pressure(["memory on 1 of 2 devices"]), None, {"noninferiority"}),
        (check_deaths("a", [COMPILING], control=True), None, {"noninferiority", "slo"}),
        (check_deaths("a", [COMPILING], control=False), "a", {"noninferiority", "slo"}),
    ],
)
def test_a_check_concerns_its_arm_and_affects_its_gates(check, arm, affects):
    assert check.arm == arm
    assert affects <= set(check.affects)


def test_the_remedies_of_the_traffic_do_not_name_the_design_in_use():
    assert "switchback" in check_interference(1.6, 0.01).remedy
    assert "a run of their own" in check_interference(1.6, 0.01, taking_turns=True).remedy
    assert "open_loop" in check_open_loop(None, True, loops=[FREE, UNKNOWN]).remedy
    assert check_sample_ratio({"a": 5}, WEIGHTS) is None


ALL = comparison(verdict=PASS, method="t over trials", blocks=60, groups=6, trials=6)


def machine(name, ratio, spread, **more):
    own = replace(ALL, machine=name, ratio=ratio, spread=spread, trials=2, verdict=INCONCLUSIVE)
    return replace(own, **{"p_inferior": 0.5, "p_noninferior": 0.5, **more})


def found(item, *apart, shares=()):
    return check_machines("compiled", [item], apart, shares)


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
    assert (check.value is None) is (machines[0].ratio is None)
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
    assert after[0].blocked_by == ("machines",)


ASPECT = Aspect(check="bed drift", sound="All was well.", remedy="Mend it.")
ARMS = ("eager", "compiled")


def disturbance(*, value: float, shift: float | None, trial: int = 1, place: str = "cuda:1") -> Disturbance:
    return Disturbance(
        aspect=ASPECT, place=place, trial=trial, arms=("compiled",), value=value, limit=0.05, shift=shift, text="so"
    )


@pytest.mark.parametrize(
    ("troubles", "shift"),
    [
        ([disturbance(value=0.6, shift=0.1), disturbance(value=0.5, shift=0.4, trial=2)], LEVER * 0.4),
        ([disturbance(value=0.9, shift=0.1), disturbance(value=0.3, shift=None, trial=2)], None),
        ([disturbance(value=0.9, shift=0.1), disturbance(value=0.3, shift=None, place="cuda:0")], None),
        ([disturbance(value=0.6, shift=0.1), disturbance(value=0.5, shift=0.2, place="host")], LEVER * (0.1 + 0.2)),
    ],
    ids=["largest of a place", "one unknown", "unknown elsewhere", "two places add up"],
)
def test_disturbances_shift_an_arm_by_the_largest_change_of_each_place(
    troubles: list[Disturbance], shift: float | None
) -> None:
    (check,) = checks_of(ASPECT, gathered(troubles, "eager"), ARMS)
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


CLOCK = {"offset_ns": 5, "exchanges": 30, "worst_uncertainty_ns": 1_000_000, "host": "b", "applied": True}
USERS = {"splitter": {"count": 1000}, "passed": 990, "unplaced": 0}
ESTIMATED = {"noninferiority", "slo", "cold"}


@pytest.mark.parametrize(
    ("changes", "words", "affects"),
    [
        ({"records": {"dropped": 3}}, "3 records of load process 0 were dropped", {*ESTIMATED, "recompile", "error"}),
        (USERS, "10 are not in the splitter's log", {*ESTIMATED, "error"}),
        ({"loop_lag_ms": {"p99": 60.0}}, "60.0 ms late or more, limit 50 ms", ESTIMATED),
        ({"cpu": {"busy_s": 31.0, "of_s": 600.0}}, "31 of 600 s, limit 30 s", ESTIMATED),
        ({"clock": {**CLOCK, "worst_uncertainty_ns": 51_000_000}}, "± 51 ms, limit 50 ms", ESTIMATED),
        ({"clock": {**CLOCK, "exchanges": 0}}, "not compared", ESTIMATED),
        ({"clock": CLOCK}, "", None),
        ({"clock": {"same": True, "exchanges": 0}}, "", None),
        ({"cpu": {"busy_s": 2.0, "of_s": 15.0}}, "", None),
        ({}, "", None),
    ],
)
def test_the_load_generator_fails_by_each_account_that_fell_short(
    changes: dict[str, Any], words: str, affects: set[str] | None
) -> None:
    check = check_generator(list(measured_of([{**ACCOUNT, **changes}], 50.0)))
    assert check.ok is (affects is None)
    assert words in check.reason
    assert check.ok or (set(check.affects) == affects and check.remedy)


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
    rows = read_run(directory).requests.num_rows
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


def test_records_of_another_host_are_judged_on_the_clock_of_the_run(tmp_path: Path) -> None:
    folder, account = whole_run(tmp_path / "run")
    before = read_run(tmp_path / "run").requests
    clock = {**CLOCK, "offset_ns": 3_200_000_000, "applied": False}
    (folder / "generator-0.json").write_text(json.dumps({**account, "clock": clock}))
    after = read_run(tmp_path / "run").requests
    assert after.equals(pa.Table.from_batches([shifted(batch, 3_200_000_000) for batch in before.to_batches()]))
    assert after.column("token_ns").equals(before.column("token_ns"))
    assert not after.column("end_ns").equals(before.column("end_ns"))
    (folder / "generator-0.json").write_text(json.dumps({**account, "clock": {**clock, "applied": True}}))
    assert read_run(tmp_path / "run").requests.equals(before)
