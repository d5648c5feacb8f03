"""When a trial that is looked at ends before its time."""

from __future__ import annotations

from typing import Any

from loadtests.trials.early_end import early_end


def look(**arms: tuple[str | None, bool]) -> dict[str, Any]:
    rows = {
        arm: {"decision": decision, "hopeless": hopeless, "reason": f"{arm} is so."}
        for arm, (decision, hopeless) in arms.items()
    }
    return {"seconds": 300.0, "arms": rows}


def test_a_run_goes_on_while_an_arm_is_open() -> None:
    end = early_end(look(a=("PASS", False), b=(None, False)))
    assert (end.why, end.arms) == (None, {})


def test_an_arm_that_failed_gets_no_more_while_another_is_open() -> None:
    end = early_end(look(a=("FAIL", False), b=(None, False)))
    assert (end.why, end.arms) == (None, {"a": "a is so."})
    assert early_end(look(a=("FAIL", False), b=(None, False)), ended=["a"]).arms == {}


def test_a_run_ends_when_all_arms_are_decided() -> None:
    assert early_end(look(a=("PASS", False), b=("FAIL", False))).why == "decided after 5.0 minutes (a: PASS; b: FAIL)"


def test_a_run_ends_when_what_is_open_is_hopeless() -> None:
    why = early_end(look(a=("PASS", False), b=(None, True))).why
    assert why == "decided after 5.0 minutes (a: PASS; b: what is left of the run will hardly decide it)"


def test_no_arm_at_all_ends_nothing() -> None:
    assert early_end({"seconds": 0.0, "arms": {}}).why is None
