"""Short runs with faults of every family, and the promises that they are checked against. `make faults` runs more."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.faults.campaign import carry_out
from tests.faults.fault import Moment
from tests.faults.plan import FAMILIES, SECRETS, Plan, covering, plan
from tests.faults.processes import Signal
from tests.faults.promises import PROMISES, Answered, Command, Injected, Story, breaches, leaks, lost_s, tracebacks

COUNTS = dict.fromkeys(FAMILIES, 2) | {"signals": 6, "devices": 0}
SEEDS = [(family, seed) for family, count in COUNTS.items() for seed in covering(count, families=(family,)) if count]


@pytest.mark.timeout(420)
@pytest.mark.parametrize(("family", "seed"), SEEDS)
def test_every_promise_holds_under_faults(family: str, seed: int, tmp_path: Path) -> None:
    planned = plan(seed, quick=True, families=(family,))
    assert not breaches(carry_out(planned, tmp_path)), planned


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU: run tests/faults on a GPU machine")
@pytest.mark.timeout(420)
def test_every_promise_holds_without_device_memory(tmp_path: Path) -> None:
    seed = next(seed for seed in range(1, 100) if plan(seed, families=("devices",), kind="engine").moments)
    planned = plan(seed, families=("devices",), kind="engine")
    assert not breaches(carry_out(planned, tmp_path)), planned


# --- Promises can be broken -------------------------------------------------------------------------------------------

S = 1_000_000_000
PLAN = Plan(seed=1, kind="run", truth="good", family="safety", quick=True, duration_s=5.0)


def ended(code: int | None, verdict: str | None = None, *, stderr: str = "", **more: Any) -> Command:
    line = json.dumps({"verdict": verdict, "complete": verdict is not None, **more})
    return Command(code=code, stdout=f"{line}\n", stderr=stderr, took_s=9.0, limit_s=60.0)


def story(**changes: Any) -> Story:
    """Return a run that broke and kept every promise, with the changes."""
    return replace(Story(plan=PLAN, run=ended(1, stderr="tailgate: it broke\n"), run_dir=None), **changes)


def hit(number: signal.Signals, role: str) -> Injected:
    moment = Moment(phase="traffic", after_s=1.0, fault=Signal(number, role))
    return Injected(moment=moment, at_ns=10 * S, phase="traffic", hit=f"1 of {role}")


def planned(number: signal.Signals, role: str, **changes: Any) -> Plan:
    return replace(PLAN, moments=(hit(number, role).moment,), **changes)


def answers(*at_s: float) -> tuple[Answered, ...]:
    return tuple(Answered(request_id=f"1-{n}", arm="eager", at_ns=int(at * S)) for n, at in enumerate(at_s))


KILL, STOP = signal.SIGKILL, signal.SIGSTOP
PASSED, FAILED = ended(0, "PASS"), ended(99, "FAIL")
WITHOUT_CANDIDATE = {"run": PASSED, "answered": answers(5.0, 12.0), "injected": (hit(KILL, "candidate"),)}
BY_LOAD = {"answered": answers(5.0, 9.2, 11.0), "injected": (hit(KILL, "load"),)}
LAST_SECOND = {**BY_LOAD, "recorded": frozenset({"1-0"})}
LIVENESS = planned(STOP, "page", family="liveness")
# (promise, what breaks it, what does not)
CASES: list[tuple[str, list[dict[str, Any]], list[dict[str, Any]]]] = [
    (
        "no wrong PASS",
        [
            *(
                {"plan": replace(PLAN, truth=truth), "run": PASSED}
                for truth in ("naive", "slow", "other answers", "dies")
            ),
            {"plan": replace(PLAN, truth="naive"), "analysis": PASSED},
            {"plan": replace(PLAN, truth="naive"), "summaries": ({"overall": "PASS"},)},
            WITHOUT_CANDIDATE,
        ],
        [
            {"plan": replace(PLAN, truth="naive"), "run": FAILED, "analysis": FAILED},
            {**WITHOUT_CANDIDATE, "answered": answers(5.0, 10.5)},  # it died after its last request
            {**WITHOUT_CANDIDATE, "injected": (hit(STOP, "candidate"),)},
        ],
    ),
    (
        "no wrong blame",
        [{"plan": planned(KILL, "control"), "run": FAILED}],
        [
            {"plan": planned(KILL, "candidate"), "run": FAILED},
            {"plan": replace(PLAN, truth="slow"), "run": FAILED},
        ],
    ),
    ("ends by itself within its limit", [{"run": ended(None)}, {"analysis": ended(None)}], [{}]),
    ("nothing is left behind", [{"left": ("process 'envoy'",)}, {"gone_after_s": 20.0}], [{}]),
    (
        "flushed records stay",
        [
            {"recorded_before": frozenset({"1-0", "1-1"}), "recorded": frozenset({"1-0"})},
            {**BY_LOAD, "recorded": frozenset({"1-1"})},
            {"answered": answers(5.0), "injected": (hit(KILL, "page"),)},  # the page records nothing
        ],
        [LAST_SECOND, {"answered": answers(1.0, 2.0), "recorded": frozenset({"1-0", "1-1"})}],
    ),
    (
        "reasons are one line",
        [
            {"tracebacks": ("logs/page.log",)},
            {"run": ended(1, stderr="Traceback (most recent call last):\ntailgate: it broke\n")},
            {"run": ended(1, stderr="tailgate: " + "x" * 3000)},
            {"run": ended(1, stderr="tailgate: a fault in tailgate itself, KeyError: 1")},
            {"run": ended(1)},
            {"run": ended(-9)},
        ],
        [{}],
    ),
    (
        "can be judged afterwards",
        [{"analysis": item} for item in (ended(1), ended(1, stderr=2 * "tailgate: no\n"), ended(3), ended(-6))],
        [{"analysis": ended(1, stderr="tailgate: no records\n")}, {"analysis": ended(3, "INCONCLUSIVE")}],
    ),
    ("no secret in any file", [{"leaks": ("trial.json (FAULTS_TOKEN)",)}], [{}]),
    (
        "summaries are as published",
        [{"run": ended(3, "INCONCLUSIVE")}, {"summaries": ("no JSON",)}, {"summaries": ({"schema": 1},)}],
        [{}],
    ),
    (
        "goes on once faults are lifted",
        [
            {"plan": LIVENESS},
            {"plan": LIVENESS, "run": FAILED},
            {"plan": replace(LIVENESS, truth="naive"), "run": ended(3, "INCONCLUSIVE")},
        ],
        [
            {"plan": LIVENESS, "run": PASSED},
            {"plan": planned(STOP, "candidate", family="liveness"), "run": FAILED},
            {},  # a safety plan need not go on
        ],
    ),
]


@pytest.mark.parametrize(("promise", "broken", "kept"), CASES, ids=[case[0] for case in CASES])
def test_a_promise_is_broken_by_these_stories_and_not_by_those(
    promise: str, broken: list[dict[str, Any]], kept: list[dict[str, Any]]
) -> None:
    assert [changes for changes in broken if promise not in breaches(story(**changes))] == []
    assert [changes for changes in kept if promise in breaches(story(**changes))] == []


def test_every_promise_has_cases_and_a_story_can_keep_them_all() -> None:
    assert [promise for promise, _, _ in CASES] == list(PROMISES)
    assert breaches(story()) == {}
    assert lost_s(story(**LAST_SECOND)) == pytest.approx(0.8)


def test_secrets_and_tracebacks_are_found_in_any_file(tmp_path: Path) -> None:
    name, secret = next(iter(SECRETS.items()))
    (tmp_path / "logs").mkdir()
    arm, page = tmp_path / "logs" / "arm.log", tmp_path / "logs" / "page.log"
    arm.write_bytes(b"\xff opens with " + secret.encode())
    page.write_text("Traceback (most recent call last):\n")
    assert leaks([tmp_path], []) == (f"{arm} ({name})",)
    assert len(leaks([], [f"python --token {secret}"])) == 1
    assert leaks([tmp_path / "none"], ["python"]) == ()
    assert tracebacks([tmp_path]) == (f"{page}",)
    page.write_text("Exception ignored in atexit callback:\nTraceback (most recent call last):\n")
    assert tracebacks([tmp_path]) == ()
