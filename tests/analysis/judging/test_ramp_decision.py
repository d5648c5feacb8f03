"""What a ramp does next."""

from __future__ import annotations

from dataclasses import replace

import pytest

from analysis.judging.ramp_decision import Standing, decide
from analysis.records.tables import RecordError
from analysis.settings.ramp_limits import RampLimits

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
