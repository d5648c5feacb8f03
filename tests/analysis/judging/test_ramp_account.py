"""What became of a ramp, by its journal and its requests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from analysis.judging.alarms import Alarm, ServedCompile, burst_alarms, compile_alarms, death_alarms
from analysis.judging.judgement import judge
from analysis.judging.ramp_account import ramp_gate, ramp_of
from analysis.judging.ramp_decision import Standing, decide
from analysis.records.run_records import read_run
from analysis.records.tables import RecordError
from analysis.records.weight_journal import JOURNAL, WeightChange, append, read_weights
from analysis.report.html import html_report
from analysis.report.looks import words as ramp_words
from analysis.run.run import Run
from analysis.settings.ramp_limits import RampLimits
from analysis.summary.summary import analyze
from tests.fakes.runs import EAGER, SECOND, Compile, FakeArm, FakeRun, start_of, write_run

GATES = {"draws": 99, "sequential": True}
HALF = FakeRun(design="split", duration_s=600, rate=4, gates=GATES)


def change(at_s: float, share: int, action: str, step: int, why: str = "so", **more: int) -> WeightChange:
    weights = {"eager": 100 - share, "compiled": share}
    return WeightChange(
        at_ns=start_of(1) + int(at_s * SECOND), weights=weights, why=why, action=action, step=step, **more
    )


def ramped(path: Path, run: FakeRun, *changes: WeightChange) -> Run:
    directory = write_run(path / "run", run)
    for item in changes:
        append(directory, item)
    return Run.of(read_run(directory))


def gate(run: Run, name: str) -> tuple[str, str]:
    found = next(item for item in judge(run).gates if item.gate == name)
    return found.verdict, found.reason


def test_a_promoted_candidate_passes_the_ramp(tmp_path: Path) -> None:
    run = ramped(tmp_path, HALF, change(0, 50, "start", 3), change(590, 50, "promoted", 4))
    verdict, reason = gate(run, "ramp")
    assert verdict == "PASS"
    assert reason.startswith("It reached all of the traffic; ")


def test_a_rollback_fails_and_counts_who_was_exposed_and_hurt(tmp_path: Path) -> None:
    slow = replace(HALF, arms=(EAGER, FakeArm(name="compiled", compiles=[Compile(at_s=300, seconds=5)])))
    back = change(306, 0, "rollback", 0, why="It compiled.", cause_ns=start_of(1) + 305 * SECOND)
    run = ramped(tmp_path, slow, change(0, 50, "start", 0), back, replace(back, done_ns=back.at_ns + SECOND // 2))
    verdict, reason = gate(run, "ramp")
    assert verdict == "FAIL"
    exposed = int((run.of_arm("compiled") & ~run.requests.broken).sum())
    assert reason.startswith(f"It was rolled back at 1 %: It compiled; {exposed} requests were exposed to it and ")
    assert "and 0 hurt" not in reason


def test_a_rollback_that_no_splitter_took_is_told(tmp_path: Path) -> None:
    back = change(306, 0, "rollback", 0, why="It died.")
    for done_ns, words in (
        (None, "which the splitter had not taken when the run ended"),
        (back.at_ns + 1, "It died; "),
    ):
        path = tmp_path / str(done_ns)
        verdict, reason = gate(ramped(path, HALF, change(0, 50, "start", 0), replace(back, done_ns=done_ns)), "ramp")
        assert verdict == "FAIL"
        assert words in reason


def test_a_step_that_the_end_of_the_run_cut_off_is_not_held_for_what_began_it(tmp_path: Path) -> None:
    begun = change(300, 50, "advance", 2, why="nothing speaks against 25 %")
    _, reason = gate(ramped(tmp_path / "cut", HALF, change(0, 50, "start", 1), begun), "ramp")
    assert reason.startswith("It was held at 25 %: the run ended before that step was decided; ")
    held = change(500, 50, "hold", 2, why="still open after 200 s: so")
    _, reason = gate(ramped(tmp_path / "held", HALF, change(0, 50, "start", 1), begun, held), "ramp")
    assert reason.startswith("It was held at 25 %: still open after 200 s: so; ")


def test_what_was_held_is_open(tmp_path: Path) -> None:
    verdict, reason = gate(ramped(tmp_path, HALF, change(0, 50, "start", 1)), "ramp")
    assert (verdict, reason.startswith("It was held at 5 %")) == ("INCONCLUSIVE", True)


def test_a_share_that_is_not_the_weights_is_seen(tmp_path: Path) -> None:
    for share, ok in ((50, True), (25, False)):
        run = ramped(tmp_path / str(share), HALF, change(0, share, "start", 1))
        check = next(item for item in judge(run).checks if item.check == "sample ratio")
        assert check.ok is ok, check.reason


def test_weights_that_changed_outside_a_ramp_are_no_ramp(tmp_path: Path) -> None:
    outside = replace(change(0, 50, "set", 1), step=None)
    names = {item.gate for item in judge(ramped(tmp_path, HALF, outside)).gates}
    assert "ramp" not in names


def test_the_journal_keeps_the_last_line_of_an_instant_and_no_torn_one(tmp_path: Path) -> None:
    first = change(0, 5, "start", 0)
    append(tmp_path, first)
    append(tmp_path, replace(first, done_ns=7))
    with (tmp_path / JOURNAL).open("a") as file:
        file.write('{"at_ns": 1, "weights": {"a"')
    assert read_weights(tmp_path) == (replace(first, done_ns=7),)
    assert read_weights(tmp_path / "none") == ()


def test_one_request_that_was_exposed_is_one(tmp_path: Path) -> None:
    run = ramped(tmp_path, HALF, change(0, 50, "start", 1))
    account = ramp_of(run)
    assert account is not None
    assert "; 1 request was exposed to it and 0 hurt" in ramp_gate(replace(account, exposed=1, hurt=0)).reason
    assert "; 2 requests were exposed to it and 1 hurt" in ramp_gate(replace(account, exposed=2, hurt=1)).reason
    ramp = {"outcome": "hold", "candidate": "compiled", "reason": "so", "exposed": 1, "hurt": 0}
    assert ramp_words({"ramp": ramp}) == [("Ramp", "compiled was held: so; 1 request exposed, 0 hurt")]


def test_users_have_no_generator_that_lags(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", HALF)
    assert "generator lag" in {check.check for check in judge(Run.of(read_run(directory))).checks}
    experiment = directory / "experiment.toml"
    experiment.write_text(experiment.read_text().replace("[traffic]", '[traffic]\narrivals = "users"') + "\n# edited\n")
    run = Run.of(read_run(directory))
    assert run.generator_lag_ms is None
    assert "generator lag" not in {check.check for check in judge(run).checks}
    summary = analyze(directory)
    assert summary["design"]["generator_lag_p99_ms"] is None
    assert "Generator lag" not in html_report(summary)


LIMITS = RampLimits()
READY = Standing(step=1, step_s=400.0, safe=True, requests=100)


def test_a_step_is_left_upwards_once_the_candidate_is_surely_safe() -> None:
    assert decide(READY, LIMITS).action == "advance"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"step_s": 299.0}, "it lasts 300 s at least"),
        ({"requests": 29}, "the candidate had 29 of 30 requests"),
        ({"safe": False}, "it is not sure that the candidate is at most 25 % slower"),
        ({"uneven": "it got more than its share"}, "it got more than its share"),
        ({"step": 3}, "not every gate has passed, and beyond this step no control is left"),
    ],
)
def test_a_step_is_kept_while_something_lacks(change: dict[str, object], why: str) -> None:
    decision = decide(replace(READY, **change), LIMITS)  # type: ignore[arg-type]
    assert (decision.action, decision.why) == ("stay", why)


def test_one_request_is_no_requests() -> None:
    lacking = decide(replace(READY, requests=0), replace(LIMITS, least_requests=1))
    assert lacking.why == "the candidate had 0 of 1 request"


def test_the_last_step_is_taken_only_when_every_gate_has_passed() -> None:
    assert decide(replace(READY, step=3, passed=True, safe=False), LIMITS).action == "advance"


def test_the_whole_traffic_promotes_after_its_time() -> None:
    assert decide(Standing(step=4, step_s=299.0), LIMITS).action == "stay"
    assert decide(Standing(step=4, step_s=300.0), LIMITS).action == "promoted"


@pytest.mark.parametrize("step", range(5))
def test_harm_that_is_sure_and_alarms_roll_back_from_any_step_at_once(step: int) -> None:
    for standing in (
        Standing(step=step, step_s=0.1, alarms=["it died"]),
        Standing(step=step, step_s=0.1, failed="slow"),
    ):
        assert decide(standing, LIMITS).action == "rollback"
    assert decide(replace(READY, step=step, passed=True, alarms=["it died"]), LIMITS).why == "it died"


def test_forgiven_alarms_and_the_initial_delay() -> None:
    limits = replace(LIMITS, failure_limit=1, initial_delay_s=60.0)
    assert decide(Standing(step=0, step_s=1.0, alarms=["one"]), limits).action == "stay"
    assert decide(Standing(step=0, step_s=1.0, alarms=["one", "two"]), limits).why == "two"
    assert decide(Standing(step=0, step_s=59.0, failed="slow"), limits).action == "stay"
    assert decide(Standing(step=0, step_s=60.0, failed="slow"), limits).action == "rollback"
    # What no gate may take back yet gets no more either.
    late = replace(LIMITS, initial_delay_s=600.0)
    assert decide(READY, late).why == "it lasts 600 s at least"
    assert decide(replace(READY, step_s=600.0), late).action == "advance"
    assert (late.longest_s, LIMITS.longest_s) == (4 * 1800.0 + 600.0, 4 * 1800.0 + 300.0)


def test_what_stays_open_holds_or_rolls_back_as_was_asked() -> None:
    standing = Standing(step=1, step_s=1800.0, requests=100)
    assert decide(standing, LIMITS).action == "hold"
    decision = decide(standing, replace(LIMITS, on_inconclusive="rollback"))
    assert decision.action == "rollback"
    assert decision.why.startswith("still open after 1800 s: it is not sure")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"steps": [1, 5]}, "ramp.steps is [1.0, 5.0]: give percents that rise to 100, such as 1, 5, 50, 100"),
        (
            {"steps": [5, 1, 100]},
            "ramp.steps is [5.0, 1.0, 100.0]: give percents that rise to 100, such as 1, 5, 50, 100",
        ),
        ({"steps": [0, 100]}, "ramp.steps is 0: give a value from 0.01 to 100"),
        ({"steps": 5}, "ramp.steps is 5: give a list of percents"),
        ({"step_s": 60, "most_step_s": 30}, "ramp.step_s is 60: give at most ramp.most_step_s, 30"),
        ({"on_inconclusive": "ask"}, "ramp.on_inconclusive is 'ask': use hold or rollback"),
        ({"failure_limit": -1}, "ramp.failure_limit is -1: give a value from 0 to 1e+06"),
    ],
)
def test_limits_that_cannot_be_are_refused_in_one_line(table: dict[str, object], message: str) -> None:
    with pytest.raises(RecordError) as caught:
        RampLimits.from_table(table)
    assert str(caught.value) == message


def compiled(end_ns: int, seconds: float = 0.1, *, kind: str = "recompile", arm: str = "new") -> ServedCompile:
    return ServedCompile(arm=arm, kind=kind, seconds=seconds, end_ns=end_ns, shape="prefill 1×81")


def found(*events: ServedCompile, most: int = 1) -> list[str]:
    return [alarm.why for alarm in compile_alarms("new", events, stall_limit_s=1.0, max_recompiles=most)]


def test_a_compile_of_the_limit_or_longer_is_an_alarm_when_it_ends() -> None:
    (alarm,) = compile_alarms("new", [compiled(7, 1.0), compiled(9, 0.99)], stall_limit_s=1.0, max_recompiles=9)
    assert alarm == Alarm(at_ns=7, why="new compiled for 1.0 s while serving for prefill 1×81")


def test_recompiles_beyond_the_limit_are_alarms_each() -> None:
    assert found(compiled(1)) == []
    assert found(compiled(1), compiled(2), compiled(3)) == [
        "new recompiled 2 times while serving for prefill 1×81",
        "new recompiled 3 times while serving for prefill 1×81",
    ]


def test_other_arms_and_events_that_no_unforeseen_shape_caused_are_none() -> None:
    assert found(compiled(1, 9.0, arm="old"), compiled(2, 9.0, kind="graph_capture"), most=0) == []


def test_a_death_counts_when_it_happened_and_now_where_nobody_knows() -> None:
    deaths = [{"arm": "new", "replica": "new-0", "at_ns": 5}, {"arm": "new"}, {"arm": "old", "replica": "old-0"}]
    assert death_alarms("new", deaths, now_ns=9) == [
        Alarm(at_ns=5, why="new-0 died"),
        Alarm(at_ns=9, why="new died"),
    ]


def test_a_burst_is_five_failures_and_more_than_a_fifth() -> None:
    def burst(failed: int, finished: int) -> list[Alarm]:
        return burst_alarms("new", failed=failed, finished=finished, now_ns=3, meanwhile="in this step")

    assert burst(4, 4) == burst(5, 25) == []
    assert burst(5, 24) == [Alarm(at_ns=3, why="5 of 24 requests to new failed in this step")]
