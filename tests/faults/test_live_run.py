"""What a run shows and leaves is read as it is."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults import look_over
from tests.faults.arrangement import ANSWERS, SECRETS, arranged, environment, experiment
from tests.faults.fault import PHASES, USERS_PHASES, Kind, Moment, Setup
from tests.faults.live_run import LiveRun, answered, phase_of
from tests.faults.plan import KINDS, Plan
from tests.faults.signals import Signal
from tests.faults.story import Answered


def plain(kind: Kind) -> Plan:
    return Plan(seed=1, kind=kind, truth="good", family="none", quick=True, duration_s=5.0)


@pytest.mark.parametrize(
    ("line", "kind", "phase"),
    [
        ("[0:00] · preparing", "run", "preparing"),
        ("[0:01] · starting arms · eager-0: starting", "run", "starting arms"),
        ("[1:03] · trial 2/3 · traffic 0 of 5 s · 0/116 requests", "run", "traffic"),
        ("[0:03] · traffic of users · eager-0: ready", "users' ramp", "traffic of users"),
        ("[0:09] · comparing answers eager-0 · 4/4 requests", "run", "comparing answers"),
        ("judging out/20260101T000000Z-faults", "run", "judging"),
        ("[0:02] live page: http://127.0.0.1:1/", "run", ""),
        ("tailgate: the traffic broke", "run", ""),
    ],
)
def test_a_phase_is_read_from_what_a_run_says(line: str, kind: Kind, phase: str) -> None:
    assert phase_of(line, kind) == phase
    assert phase in ("", *PHASES, *USERS_PHASES)


def test_answers_to_traffic_are_read_and_those_to_other_questions_not(tmp_path: Path) -> None:
    (tmp_path / ANSWERS).write_text("parity-0 eager 5\n1-0-eager eager 7\n")
    assert list(answered(tmp_path)) == [Answered(request_id="1-0-eager", arm="eager", at_ns=7)]


def test_secrets_and_tracebacks_are_found_wherever_they_lie(tmp_path: Path) -> None:
    name, secret = next(iter(SECRETS.items()))
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "arm.log").write_bytes(b"\xff opens with " + secret.encode())
    (tmp_path / "logs" / "page.log").write_text("Traceback (most recent call last):\n")
    assert look_over.leaks([tmp_path], []) == (f"{tmp_path}/logs/arm.log ({name})",)
    assert len(look_over.leaks([], [f"python --token {secret}"])) == 1
    assert look_over.tracebacks([tmp_path]) == (f"{tmp_path}/logs/page.log",)
    (tmp_path / "logs" / "page.log").write_text(
        "Exception ignored in atexit callback:\nTraceback (most recent call last):\n"
    )
    assert look_over.tracebacks([tmp_path]) == ()
    assert look_over.leaks([tmp_path / "none"], ["python"]) == ()


@pytest.mark.parametrize("kind", KINDS)
def test_every_experiment_is_one_that_is_taken(kind: Kind, tmp_path: Path) -> None:
    if kind == "users' ramp":
        return  # it takes one that is built in
    (tmp_path / "faults.toml").write_text(experiment(plain(kind), "http://127.0.0.1:1"))
    reading = "import sys; from loadtests.experiments.reading import load; load('faults.toml', settings=sys.argv[1:])"
    settings = arranged(plain(kind), tmp_path).settings
    done = subprocess.run(
        [sys.executable, "-c", reading, *settings],
        cwd=tmp_path,
        env=environment("test-of-settings", Setup(folder=tmp_path)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_moment_comes_so_long_after_its_phase_or_after_a_later_one(tmp_path: Path) -> None:
    def moment(phase: str, after_s: float = 0.0) -> Moment:
        return Moment(phase=phase, after_s=after_s, fault=Signal(signal.SIGKILL, "page"))

    live = LiveRun(plain("run"), tmp_path)
    log = tmp_path / "run.err"
    log.write_text("[0:00] · preparing\n[0:01] · starting a")  # not whole yet
    live.follow(log)
    assert live.phase == "preparing"
    assert not live.is_due(moment("starting arms"))
    log.write_text("[0:00] · preparing\n[0:01] · starting arms\n[0:02] · traffic 0 of 5 s\n")
    live.follow(log)
    assert live.phase == "traffic"
    assert live.is_due(moment("starting arms"))
    assert live.is_due(moment("starting the load"))  # it was too short to be shown
    assert not live.is_due(moment("traffic", after_s=3600.0))
    assert not live.is_due(moment("stopping"))
