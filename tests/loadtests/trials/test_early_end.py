"""When a trial that is looked at ends before its time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from analysis.judging.alarms import ServedCompile
from analysis.settings.gate_limits import CompileBudget, GateLimits
from loadtests.trials.early_end import EarlyEnding, early_end
from loadtests.trials.judge import Judge
from loadtests.trials.steering import Steered


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


COMPILE = ServedCompile(arm="new", kind="recompile", seconds=0.1, end_ns=5, shape="2x64")
DEATH = {"arm": "new", "replica": "new-0", "at_ns": 5}


@pytest.mark.parametrize(
    ("compiles", "deaths", "limits", "why"),
    [
        ([COMPILE], [], GateLimits(), "new recompiled 1 time while serving for 2x64"),
        ([COMPILE] * 3, [], GateLimits(max_recompiles=3), None),
        ([COMPILE], [], GateLimits(cold=CompileBudget()), None),
        ([], [DEATH], GateLimits(cold=CompileBudget()), "new-0 died"),
        ([], [{**DEATH, "arm": "eager"}], GateLimits(), None),
    ],
)
def test_an_arm_that_surely_fails_is_ended_before_any_look(
    compiles: list[ServedCompile], deaths: list[dict[str, Any]], limits: GateLimits, why: str | None
) -> None:
    ends: list[int | None] = []
    facts = SimpleNamespace(start_ns=1, ended=None, ended_arms=None, deaths=deaths)
    arms = [SimpleNamespace(name=name, control=name == "eager") for name in ("eager", "new", "other")]
    context = SimpleNamespace(
        facts=facts,
        number=1,
        status=SimpleNamespace(note=lambda _: None),
        experiment=SimpleNamespace(arms=arms, gates=limits),
    )
    trial = SimpleNamespace(
        context=context, collector=SimpleNamespace(served_compiles=compiles), splitter=None, end_load=ends.append
    )
    ending = EarlyEnding(cast(Judge, SimpleNamespace(last=lambda: None)))
    for _ in range(2):
        ending.poll(cast(Steered, trial))
    assert ends == ([] if why is None else [None]), "once"
    assert {arm: row["why"] for arm, row in (facts.ended_arms or {}).items()} == ({} if why is None else {"new": why})
