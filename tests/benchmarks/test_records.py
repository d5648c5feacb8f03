"""Damage to any file of a run: no crash, no traceback, no false PASS, and no changed verdict without a reason."""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.command import run_command
from benchmarks.damage import DAMAGES, attempts
from benchmarks.environment import ROOT
from benchmarks.outside import SCENARIOS, agreements, experiment, kept_runs, trace
from benchmarks.planted_arm import plant, planted_in
from loadtests.experiments.reading import load
from servers.engine.engine import Engine
from servers.engine.runner import ModelRunner
from servers.fields import ConfigError
from tests.fakes.runs import EAGER, Compile, FakeArm, FakeRun, write_run

SCRIPTS = ("analysis.py", "damage.py", "generator.py", "judging.py", "recorder.py", "splitter.py")


def test_every_script_starts_from_anywhere_by_its_path(tmp_path: Path) -> None:
    commands = [[sys.executable, str(ROOT / "benchmarks" / script), "--help"] for script in SCRIPTS]
    processes = [
        subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for command in commands
    ]
    errors = {script: process.communicate()[1] for script, process in zip(SCRIPTS, processes, strict=True)}
    assert errors == dict.fromkeys(SCRIPTS, "")


def test_bad_usage_is_one_line_and_the_result_another(capsys: pytest.CaptureFixture[str]) -> None:
    def measure(arguments: object) -> dict[str, object]:
        if arguments:
            raise ConfigError("two\nlines")
        return {"ok": False}

    assert run_command("some.py", measure, ["bad"]) == 2
    assert run_command("some.py", measure, []) == 1
    captured = capsys.readouterr()
    assert captured.out == '{"ok": false}\n'
    assert captured.err.startswith("benchmarks/some.py: two")
    assert captured.err.count("\n") == 1


GATES = {"draws": 99, "metrics": ["e2e"], "quantile": 0.9, "min_blocks": 4, "margin": 1.0, "max_error_pct": 5}
NAIVE = FakeArm(name="compiled", compiles=[Compile(at_s=40, seconds=4), Compile(at_s=90, seconds=4)])
LENIENT = {"max_stall_s": 1000, "max_stall_s_per_min": 60, "max_requests_hit_pct": 100}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    quiet = FakeRun(stated=True, duration_s=150, rate=1, gates=GATES)
    stalled = FakeRun(stated=True, duration_s=150, rate=1, gates={**GATES, **LENIENT}, arms=(EAGER, NAIVE))
    return [write_run(folder / "quiet", quiet), write_run(folder / "stalled", stalled)]


@pytest.mark.parametrize("tries", [20])
def test_no_damage_ends_the_judge_or_makes_a_pass_or_goes_without_a_word(tries: int, runs: list[Path]) -> None:
    found = list(attempts(runs, tries=tries, seed=11, processes=2))
    assert [item for item in found if item.fault] == []
    assert len({item.damage for item in found}) == len(DAMAGES)
    assert sum(item.changed for item in found) > 0.3 * tries
    assert Counter(item.ended for item in found)["judged"] > 0.5 * tries


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: str(damage.__name__))
def test_damage_changes_the_file(damage) -> None:  # type: ignore[no-untyped-def]
    whole = bytes(range(256)) * 4
    changed = 0
    for seed in range(50):
        content = bytearray(whole)
        damage(content, random.Random(seed))
        changed += content != whole
    assert changed >= 35


KEPT = kept_runs()
CALLED = {"h100-from-outside": {"longer": 16, "batches": 4}, "cpu-from-outside": {"longer": 3}}


@pytest.mark.parametrize("kept", KEPT, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_all_compiles_of_a_real_run_are_seen_and_nothing_is_called_that_is_none(kept: Path) -> None:
    rows = {row["arm"]: row for row in agreements(kept)}
    assert rows["eager"]["telemetry"] == rows["eager"]["unexplained"] == rows["eager"]["extra"] == 0
    for arm in ("naive", "lengths", "steps"):
        assert rows[arm]["seen"] == rows[arm]["telemetry"] >= 1
        assert rows[arm]["extra"] == 0
        assert rows[arm]["onset_error_ms"] < 50
    assert rows["steps"]["called"] == CALLED[kept.parent.name].get(kept.name, 0)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_scenario_is_an_experiment_with_its_trace(scenario: str, tmp_path: Path) -> None:
    limits = {"seconds": 60.0, "rate": 3.0, "most_prompt": 192, "most_answer": 48, "seed": 1}
    rows = list(trace(scenario, **limits))  # type: ignore[arg-type]
    assert rows == sorted(rows)
    assert rows == list(trace(scenario, **limits))  # type: ignore[arg-type]
    assert max(prompt for _, prompt, _ in rows) <= 192
    assert max(answer for _, _, answer in rows) <= 48
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2026-01-01 00:00:00.0,5,5\n2026-01-01 00:01:01.0,5,5\n")
    options = argparse.Namespace(model="random:tiny", devices=["cpu"], slots=8, **limits)
    (tmp_path / "outside.toml").write_text(experiment(scenario, options, path))
    arms = load(tmp_path / "outside.toml").own_arms
    assert [arm.name for arm in arms] == ["eager", "naive", "lengths", "steps"]
    assert arms[3].config.shapes.kind == "buckets"


class Clock:
    """Time that passes when somebody waits for it, and a millisecond at every look."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def perf_counter(self) -> float:
        self._now_s += 0.001
        return self._now_s

    def sleep(self, seconds: float) -> None:
        self._now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of an engine whose steps take 10 ms, which plant() changes until the test is over."""
    clock = Clock()

    def advance(engine: Any, arrivals: Any) -> Any:
        clock.sleep(0.01)
        return (["a token"],)

    monkeypatch.setattr("benchmarks.planted_arm.time", clock)
    monkeypatch.setattr(Engine, "advance", advance)
    monkeypatch.setattr(ModelRunner, "memory_bytes", lambda runner: {})
    return clock


def step_s(clock: Clock) -> float:
    began_s = clock.perf_counter()
    Engine.advance(None, [])  # type: ignore[arg-type]
    return clock.perf_counter() - began_s


def test_an_arm_has_the_faults_that_are_planted_in_it() -> None:
    words = ["serve", "--replica", "decode-plus-5-1", "--port", "0"]
    assert planted_in("slow:decode=2;decode-plus-5:decode=1.05,memory=1.3", words) == {"decode": 1.05, "memory": 1.3}
    assert planted_in("slow:decode=2", words) == {}
    assert planted_in("slow:decode=2", ["serve"]) == {}
    assert planted_in("decode=1.1", words) == planted_in("decode=1.1", ["serve"]) == {"decode": 1.1}
    assert planted_in("", words) == {}


def test_steps_last_as_much_longer_as_planted(clock: Clock) -> None:
    plant({"decode": 3.0})
    assert step_s(clock) == pytest.approx(0.036, abs=0.005)


def test_the_engine_stops_once_in_a_while(clock: Clock) -> None:
    plant({"stall_s": 2.0, "every_s": 300.0})
    assert step_s(clock) < 0.1
    clock.sleep(300.0)
    assert step_s(clock) == pytest.approx(2.0, abs=0.1)
    assert step_s(clock) < 0.1


@pytest.mark.usefixtures("clock")
def test_memory_is_held_once_and_only_where_it_is_planted(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[float] = []
    monkeypatch.setattr("benchmarks.planted_arm._weight", lambda runner, times: made.append(times))
    runner: Any = SimpleNamespace(device=torch.device("cpu"))
    plant({"decode": 1.1})
    ModelRunner.memory_bytes(runner)
    assert made == []
    plant({"memory": 1.3})
    ModelRunner.memory_bytes(runner)
    ModelRunner.memory_bytes(runner)
    assert made == [1.3]
