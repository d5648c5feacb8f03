"""What load an arm holds: single steps, where the next start looks, and the gate on goodput."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tailgate.analysis.judging.gates import FAIL, INCONCLUSIVE, PASS
from tailgate.analysis.judging.load_steps import Held, Holding, Step, goodput_gate, holding_of, steps_of, to_search
from tailgate.analysis.records.documents import EDITED
from tailgate.analysis.records.run_records import read_run
from tailgate.analysis.run.run import Run
from tailgate.analysis.summary.summary import analyze
from tests.fakes.request_rows import row as request_row
from tests.fakes.request_rows import write_rows

SECOND = 1_000_000_000
START = 1_700_000_000 * SECOND
STEP_S, SETTLE_S = 10.0, 4.0


def write_search(
    folder: Path,
    knees: dict[str, float],
    rates: list[list[float]],
    *,
    settle_is_bad: bool = False,
    seconds: float | None = None,
    limits: str = "",
    **facts: Any,
) -> Path:
    """Write a run whose arms answer in 100 ms up to their knee and in 2 s above it."""
    folder.mkdir(parents=True, exist_ok=True)
    arms = "".join(f'[[arms]]\nname = "{arm}"\ncontrol = {str(i == 0).lower()}\n' for i, arm in enumerate(knees))
    limits = limits or "[slo]\np90_ttft_ms = 500\np90_e2e_ms = 1000\n"
    (folder / "experiment.toml").write_text(
        f'name = "search"\n{arms}[traffic]\ndesign = "mirrored"\n{limits}\n{EDITED}'
    )
    for number, levels in enumerate(rates, 1):
        trial = folder / f"trial-{number:02}"
        trial.mkdir()
        steps = [
            {"start_s": index * STEP_S, "end_s": (index + 1) * STEP_S, "rate": rate}
            for index, rate in enumerate(levels)
        ]
        start = START + number * 1000 * SECOND
        rows = []
        for step in steps:
            for place in range(int(step["rate"] * STEP_S)):
                at_s = step["start_s"] + place / step["rate"]
                settling = at_s - step["start_s"] < SETTLE_S
                for arm, knee in knees.items():
                    took_s = 2.0 if step["rate"] > knee or (settle_is_bad and settling) else 0.1
                    own = {"trial": number, "replica": f"{arm}-0", "pair_id": f"{number}-{len(rows) // len(knees) + 1}"}
                    own |= {"request_id": f"{own['pair_id']}-{arm}", "output_tokens": 2, "phase": "measure"}
                    own["token_ns"] = [int(took_s / 2 * SECOND), int(took_s * SECOND)]
                    rows.append(request_row(at_s=number * 1000 + at_s, ttft_s=took_s / 2, e2e_s=took_s, arm=arm, **own))
        write_rows(trial / "requests-0.arrow", rows, batch=len(rows))
        planned = len(rows) // len(knees)
        info = {
            "trial": number,
            "design": "mirrored",
            "start_ns": start,
            "duration_s": seconds or STEP_S * len(levels),
            "open_loop": True,
            "complete": True,
            "steps": steps,
            "settle_s": SETTLE_S,
            "planned": dict.fromkeys(knees, planned),
            "arms": [{"name": arm, "replicas": [f"{arm}-0"], "config": {}} for arm in knees],
            **facts,
        }
        (trial / "trial.json").write_text(json.dumps(info))
    return folder


def test_the_interval_holds_the_knee_of_each_arm(tmp_path: Path) -> None:
    folder = write_search(tmp_path / "run", {"eager": 17, "new": 9}, [[4, 8, 16, 32], [10, 12, 18, 24]])
    run, summary = Run.of(read_run(folder)), analyze(folder)
    for arm, knee in (("eager", 17), ("new", 9)):
        held = holding_of(arm, steps_of(run))
        assert (held.low_rps or 0) < knee < (held.high_rps or 0)
        assert held.starts == 2
    (gate,) = [row for row in summary["gates"] if row["gate"] == "goodput"]
    assert "5.1 to 12.8 requests/s" in gate["reason"]
    assert gate["value"] == pytest.approx(9 / 17, rel=0.05)


def test_a_step_is_held_to_its_token_gaps_too(tmp_path: Path) -> None:
    limits = "[slo]\np50_itl_ms = 500\n"
    folder = write_search(tmp_path / "run", {"eager": 17, "new": 9}, [[4, 8, 16]], limits=limits)
    found = {(row["arm"], row["rate"]): row for row in analyze(folder)["frontier"]["steps"]}
    assert (found["eager", 16]["held"], found["new", 16]["held"]) == ("held", "missed")
    assert "p50_itl_ms" in found["new", 16]["reason"]


def test_a_search_judges_no_latency(tmp_path: Path) -> None:
    summary = analyze(write_search(tmp_path / "run", {"eager": 17, "new": 17}, [[16, 18], [16, 18]]))
    kinds = {gate["kind"] for gate in summary["gates"]}
    assert kinds == {"goodput", "recompile", "error"}
    assert summary["comparisons"] == []
    checks = {check["check"] for check in summary["validity"]}
    assert not checks & {"blocks", "tail", "control errors", "cut requests"}


def test_settling_time_is_left_out(tmp_path: Path) -> None:
    folder = write_search(tmp_path / "run", {"eager": 17, "new": 17}, [[8, 16, 32]], settle_is_bad=True)
    steps = steps_of(Run.of(read_run(folder)))
    assert [step.held for step in steps if step.arm == "eager"] == ["held", "held", "missed"]
    assert [step.requests for step in steps if step.arm == "eager"] == [48, 96, 192]
    for step in steps:
        assert (step.low_ms, step.ms, step.high_ms) == pytest.approx((50.0 if step.held == "held" else 1000.0,) * 3)


def test_short_and_cut_steps_are_undecided(tmp_path: Path) -> None:
    folder = write_search(tmp_path / "run", {"eager": 17, "new": 17}, [[1, 16, 32]], seconds=25.0)
    steps = [step for step in steps_of(Run.of(read_run(folder))) if step.arm == "new"]
    assert [step.held for step in steps] == ["undecided", "held", "undecided"]
    assert "6 requests, 20 are needed" in steps[0].reason
    assert "ended before" in steps[2].reason


def test_a_late_generator_leaves_the_load_open(tmp_path: Path) -> None:
    folder = write_search(tmp_path / "run", {"eager": 17, "new": 9}, [[4, 8, 16, 32], [10, 12, 18, 24]])
    for number in (1, 2):
        account = {"worker": 0, "lag_ms": {"p50": 1.0, "p99": 400.0, "max": 900.0}, "complete": True}
        (folder / f"trial-{number:02}" / "generator-0.json").write_text(json.dumps(account))
    (gate,) = [row for row in analyze(folder)["gates"] if row["gate"] == "goodput"]
    assert gate["verdict"] == INCONCLUSIVE
    assert "load generator" in gate["blocked_by"]


@pytest.mark.parametrize(
    "fault",
    [
        {"loop_lag_ms": {"p99": 60.0}},
        {"cpu": {"busy_s": 60.0, "of_s": 120.0}},
        {"records": {"dropped": 1}},
        {"clock": {"exchanges": 0}},
    ],
    ids=str,
)
def test_where_arms_take_turns_a_fault_of_the_generator_leaves_the_steps_of_its_trial_alone_undecided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: dict[str, Any]
) -> None:
    monkeypatch.setattr(Run, "in_turn", True)
    folder = write_search(tmp_path / "run", {"eager": 17, "new": 9}, [[4, 8], [4, 8]])
    account = {"worker": 0, "trial": 1, "complete": True, "records": {"dropped": 0}, **fault}
    (folder / "trial-01" / "generator-0.json").write_text(json.dumps(account))
    held = {(step.trial, step.held) for step in steps_of(Run.of(read_run(folder)))}
    assert held == {(1, "undecided"), (2, "held")}


def step(rate: float, held: Held, trial: int = 1) -> Step:
    return Step(arm="a", trial=trial, rate=rate, held=held, reason="", requests=100, good=90)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([step(1, "held"), step(2, "held")], (2, None)),
        ([step(1, "missed"), step(2, "missed")], (None, 1)),
        ([step(1, "undecided"), step(2, "undecided")], (None, None)),
        ([], (None, None)),
    ],
)
def test_an_open_end_is_searched_from_the_last_step(
    steps: list[Step], expected: tuple[float | None, float | None]
) -> None:
    assert to_search("a", steps) == expected


def span(low: float | None, high: float | None, *, trials: int = 2, arm: str = "new", thin: bool = False) -> Holding:
    return Holding(arm=arm, low_rps=low, seen_rps=low, high_rps=high, starts=trials, steps=6, thin=thin)


def of_control(low: float | None, high: float | None, trials: int = 2) -> Holding:
    return span(low, high, trials=trials, arm="eager")


@pytest.mark.parametrize(
    ("own", "control", "verdict"),
    [
        (span(20, 21), of_control(10, 11), PASS),
        (span(10, 10.5), of_control(10, 10.5), PASS),
        (span(10, 12), of_control(10, 12), INCONCLUSIVE),
        (span(5, 6), of_control(10, 11), FAIL),
        (span(None, 6), of_control(10, 11), FAIL),
        (span(30, None), of_control(10, 11), PASS),
        (span(20, 21, trials=1), span(10, 11, arm="eager", trials=1), INCONCLUSIVE),
        (span(20, 21), of_control(None, 11), INCONCLUSIVE),
        (span(30, None), of_control(30, None), INCONCLUSIVE),
        (span(None, None), of_control(10, 11), INCONCLUSIVE),
        (span(None, 6, thin=True), of_control(10, 11), INCONCLUSIVE),
    ],
)
def test_the_far_ends_of_the_intervals_decide(own: Holding, control: Holding, verdict: str) -> None:
    assert goodput_gate(own, control, margin=0.1).verdict == verdict
