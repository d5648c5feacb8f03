"""Each promise can be broken: a story that breaks it is told so, and one that does not is left alone."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from typing import Any

import pytest

from tests.faults.fault import Moment
from tests.faults.plan import Plan
from tests.faults.promises import PROMISES, breaches, lost_s
from tests.faults.signals import Signal
from tests.faults.story import Answered, Command, Injected, Story

S = 1_000_000_000
PLAN = Plan(seed=1, kind="run", truth="good", family="safety", quick=True, duration_s=5.0)


def ended(code: int | None, verdict: str | None, *, stderr: str = "", **more: Any) -> Command:
    line = json.dumps({"verdict": verdict, "complete": verdict is not None, **more})
    return Command(code=code, stdout=f"{line}\n", stderr=stderr, took_s=9.0, limit_s=60.0)


def story(**changes: Any) -> Story:
    """A run that broke, and kept every promise but for the changes."""
    return replace(Story(plan=PLAN, run=ended(1, None, stderr="tailgate: it broke\n"), run_dir=None), **changes)


def hit(number: signal.Signals, role: str, at_s: float = 10.0) -> Injected:
    moment = Moment(phase="traffic", after_s=1.0, fault=Signal(number, role))
    return Injected(moment=moment, at_ns=int(at_s * S), phase="traffic", hit=f"1 of {role}")


def answers(*at_s: float, arm: str = "eager") -> tuple[Answered, ...]:
    return tuple(Answered(request_id=f"1-{n}", arm=arm, at_ns=int(at * S)) for n, at in enumerate(at_s))


def broken(told: Story) -> set[str]:
    return set(breaches(told))


def test_a_run_that_kept_everything_breaks_nothing() -> None:
    analysis = ended(3, "INCONCLUSIVE")
    assert not broken(story(analysis=analysis, answered=answers(1.0, 2.0), recorded=frozenset({"1-0", "1-1"})))


@pytest.mark.parametrize("truth", ["naive", "slow", "other answers", "dies"])
def test_a_bad_candidate_must_not_pass_by_run_analysis_or_summary(truth: Any) -> None:
    bad = replace(PLAN, truth=truth)
    assert "no wrong PASS" in broken(story(plan=bad, run=ended(0, "PASS")))
    assert "no wrong PASS" in broken(story(plan=bad, analysis=ended(0, "PASS")))
    assert "no wrong PASS" in broken(story(plan=bad, summaries=({"overall": "PASS"},)))
    assert "no wrong PASS" not in broken(story(plan=bad, run=ended(99, "FAIL"), analysis=ended(99, "FAIL")))


def test_nobody_passes_without_an_arm_that_others_outlived() -> None:
    passed = story(run=ended(0, "PASS"), answered=answers(5.0, 12.0), injected=(hit(signal.SIGKILL, "candidate"),))
    assert "no wrong PASS" in broken(passed)
    # It was the last thing that the arm was asked: nothing is wrong with the PASS.
    assert "no wrong PASS" not in broken(replace(passed, answered=answers(5.0, 10.5)))
    stopped = replace(passed, injected=(hit(signal.SIGSTOP, "candidate"),))
    assert "no wrong PASS" not in broken(stopped)


def test_a_good_candidate_must_not_fail_by_what_hit_others() -> None:
    failed = ended(99, "FAIL", headline="compiled-padded fails")
    by_control = replace(PLAN, moments=(hit(signal.SIGKILL, "control").moment,))
    assert "no wrong blame" in broken(story(plan=by_control, run=failed))
    by_itself = replace(PLAN, moments=(hit(signal.SIGKILL, "candidate").moment,))
    assert "no wrong blame" not in broken(story(plan=by_itself, run=failed))
    assert "no wrong blame" not in broken(story(plan=replace(PLAN, truth="slow"), run=failed))


def test_a_run_or_an_analysis_that_does_not_end_is_told() -> None:
    assert "ends by itself within its limit" in broken(story(run=ended(None, None)))
    assert "ends by itself within its limit" in broken(story(analysis=ended(None, None)))


def test_what_is_left_or_goes_late_is_told() -> None:
    assert "nothing is left behind" in broken(story(left=("process 'envoy'",)))
    assert "nothing is left behind" in broken(story(gone_after_s=20.0))


def test_records_that_vanish_or_come_too_late_are_told() -> None:
    gone = story(recorded_before=frozenset({"1-0", "1-1"}), recorded=frozenset({"1-0"}))
    assert "flushed records stay" in broken(gone)
    killed = story(answered=answers(5.0, 9.2, 11.0), injected=(hit(signal.SIGKILL, "load"),))
    assert "flushed records stay" in broken(replace(killed, recorded=frozenset({"1-1"})))
    last_second = replace(killed, recorded=frozenset({"1-0"}))
    assert "flushed records stay" not in broken(last_second)
    assert lost_s(last_second) == pytest.approx(0.8)
    # Nobody who records was hit: every answer is recorded.
    assert "flushed records stay" in broken(story(answered=answers(5.0), injected=(hit(signal.SIGKILL, "page"),)))


@pytest.mark.parametrize(
    "changes",
    [
        {"tracebacks": ("logs/page.log",)},
        {"run": ended(1, None, stderr="Traceback (most recent call last):\ntailgate: it broke\n")},
        {"run": ended(1, None, stderr="tailgate: " + "x" * 3000)},
        {"run": ended(1, None, stderr="tailgate: a fault in tailgate itself, KeyError: 1")},
        {"run": ended(1, None)},
        {"run": ended(-9, None)},
    ],
)
def test_reasons_that_are_no_line_are_told(changes: dict[str, Any]) -> None:
    assert "reasons are one line" in broken(story(**changes))


def test_an_analysis_gives_a_verdict_or_one_line() -> None:
    one = ended(1, None, stderr="tailgate: no records\n")
    assert "can be judged afterwards" not in broken(story(analysis=one))
    assert "can be judged afterwards" in broken(story(analysis=ended(1, None)))
    assert "can be judged afterwards" in broken(story(analysis=ended(1, None, stderr=2 * "tailgate: it broke\n")))
    assert "can be judged afterwards" in broken(story(analysis=ended(3, None)))
    assert "can be judged afterwards" in broken(story(analysis=ended(-6, None)))


def test_leaks_are_told() -> None:
    assert "no secret in any file" in broken(story(leaks=("trial.json (FAULTS_TOKEN)",)))


def test_a_summary_that_is_missing_damaged_or_otherwise_is_told() -> None:
    name = "summaries are as published"
    assert name in broken(story(run=ended(3, "INCONCLUSIVE")))
    assert name in broken(story(summaries=("summary.json: no JSON",)))
    assert name in broken(story(summaries=({"schema": 1},)))


def test_a_run_that_could_go_on_and_did_not_is_told() -> None:
    name = "goes on once faults are lifted"
    could = replace(PLAN, family="liveness", moments=(hit(signal.SIGSTOP, "page").moment,))
    assert name in broken(story(plan=could))
    assert name in broken(story(plan=could, run=ended(99, "FAIL")))
    assert name in broken(story(plan=replace(could, truth="naive"), run=ended(3, "INCONCLUSIVE")))
    assert name not in broken(story(plan=could, run=ended(0, "PASS")))
    slowed = replace(could, moments=(hit(signal.SIGSTOP, "candidate").moment,))
    assert name not in broken(story(plan=slowed, run=ended(99, "FAIL")))
    assert name not in broken(story())  # of a safety plan nothing is asked


def test_every_promise_is_tried_here() -> None:
    tried = (
        "no wrong PASS, no wrong blame, ends by itself within its limit, nothing is left behind, flushed records stay, "
        "reasons are one line, can be judged afterwards, no secret in any file, summaries are as published, "
        "goes on once faults are lifted"
    )
    assert set(tried.split(", ")) == set(PROMISES)
