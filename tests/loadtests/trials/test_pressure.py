"""The pressure that an experiment puts on its own machines: the neighbour, its record, and the check that reads it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from tailgate.analysis.checks import pressure as checked
from tailgate.analysis.checks.check import Evidence
from tailgate.loadtests.trials.context import RunError, TrialContext
from tailgate.loadtests.trials.pressure import NEIGHBOUR_COMMAND, Pressure
from tailgate.servers.clock import now_ns
from tests.fakes.processes import wait_for
from tests.fakes.whole_run import trial_context

READY = f'print(\'{{"Weighs": {{"at_ns": {now_ns()}}}}}\', flush=True); '
Start = Callable[..., tuple[Pressure, TrialContext]]


@pytest.fixture
def pressed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Make a Pressure over arms on two cards whose neighbour runs `code`; end it afterwards."""
    made: list[Pressure] = []

    def make(code: str = f"{READY}import time; time.sleep(600)", **table: Any) -> tuple[Pressure, TrialContext]:
        arms = [
            {"name": f"arm-{index}", "preset": "eager", "control": not index, "model": {"device": f"cuda:{index}"}}
            for index in (0, 1)
        ]
        traffic = {"duration_s": 100, "rate": 2, "block_s": 10, "length_scale": 0.02}
        engine = {"max_prompt_tokens": 32, "max_new_tokens": 8}
        whole = {"arms": arms, "traffic": traffic, "engine": engine, "trials": {"swap_devices": False}}
        context = trial_context(tmp_path / "trial", {**whole, "pressure": table or {"gpu_gib": 20}})
        context.logs.mkdir()
        monkeypatch.setattr("tailgate.loadtests.trials.pressure.NEIGHBOUR_COMMAND", (sys.executable, "-c", code))
        made.append(Pressure(context, Mock()))
        return made[-1], context

    yield make
    for pressure in made:
        pressure.stop()


def at(context: TrialContext, seconds: float) -> None:
    """So many seconds of the traffic have passed."""
    context.facts.start_ns = now_ns() - int(seconds * 1e9)


def faults(context: TrialContext) -> list[str]:
    """What the check finds once the trial is complete, as reasons."""
    context.facts.complete = True
    context.write_facts()
    info = json.loads((context.folder / "trial.json").read_text())
    experiment = {"pressure": {key: info["pressure"][key] for key in ("gpu_gib", "processors")}}
    run = SimpleNamespace(trial_name="trial {}".format, records=SimpleNamespace(experiment=experiment), infos=[info])
    [check] = checked.pressure.find(Mock(spec=Evidence, run=run))
    assert check.ok == (not check.reason)
    return [check.reason] if check.reason else []


def test_pressure_of_the_whole_traffic_is_on_before_the_load_and_until_its_end(pressed: Start) -> None:
    pressure, context = pressed()
    pressure.start()
    at(context, 100.0)
    pressure.poll()
    pressure.stop()
    pressure.stop()
    had = context.facts.pressure
    assert had is not None
    assert (had["gpu_gib"], had["processors"], had["error"]) == (20, 0, None)
    had["start_ns"] = context.facts.start_ns
    assert faults(context) == []


def test_pressure_that_cannot_be_put_on_ends_the_run_before_the_traffic(pressed: Start) -> None:
    pressure, _ = pressed('raise OSError("out of memory")')
    with pytest.raises(RunError, match=r"out of memory: lower what \[pressure\] asks for"):
        pressure.start()


def test_a_neighbour_that_dies_opens_the_verdict_and_the_run_goes_on(pressed: Start) -> None:
    pressure, context = pressed(f"{READY}import time; time.sleep(1); raise SystemExit(3)")
    pressure.start()
    at(context, 50.0)
    wait_for(lambda: context.facts.pressure["error"] is not None, sleep=lambda _: pressure.poll())  # type: ignore[index]
    pressure.stop()
    assert "exit code 3" in faults(context)[0]
    assert checked.pressure.opens[:3] == ("noninferiority", "slo", "goodput")


def test_a_report_says_what_pressure_was_asked_for() -> None:
    asked = {"pressure": {"gpu_gib": 20.0}}
    assert checked.in_words(asked) == "a neighbour held 20 GiB of each GPU over the whole traffic"
    assert checked.in_words({}) == checked.in_words({"pressure": {"gpu_gib": 0.0}}) == ""


def test_the_neighbour_keeps_processors_busy_until_it_is_killed() -> None:
    with subprocess.Popen([*NEIGHBOUR_COMMAND, "1", "0"], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert json.loads(child.stdout.readline())["Weighs"]["at_ns"] <= now_ns()
        process = psutil.Process(child.pid)
        before = process.cpu_times().user
        wait_for(lambda: process.cpu_times().user > before + 0.2)
        child.kill()


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this host has a GPU")
def test_a_host_without_a_gpu_holds_no_memory_of_one() -> None:
    result = subprocess.run([*NEIGHBOUR_COMMAND, "0", "1", "0"], capture_output=True, check=False)
    assert (result.returncode, result.stdout) == (1, b"")
    assert b"libcuda" in result.stderr.splitlines()[-1]
