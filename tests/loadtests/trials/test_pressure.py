"""Pressure on a trial's machines, limits of processors, and replicas that take turns on them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from loadtests.bed.family import family_of
from loadtests.trials import processor_turns
from loadtests.trials.context import TrialContext
from loadtests.trials.cpu_limits import limit_all
from loadtests.trials.errors import RunError
from loadtests.trials.pressure import Pressure
from loadtests.trials.processor_turns import ProcessorTurns, processor_sets
from servers.clock import now_ns
from tests.fakes.processes import refusal, wait_for
from tests.fakes.whole_run import trial_context

FAKES = Path(__file__).resolve().parents[2] / "fakes"
TWO_PHASES = [{"end_s": 20, "compute_share": 0.5}, {"start_s": 30, "compute_share": 0.5}]
Start = Callable[..., tuple[Pressure, TrialContext]]


@pytest.fixture
def pressed(tmp_path: Path) -> Iterator[Start]:
    """Makes a Pressure over arms on two cards, and ends all its processes."""
    made: list[Pressure] = []

    def make(pressure: dict[str, Any], *flags: str) -> Any:
        table: dict[str, Any] = {
            "engine": {"max_prompt_tokens": 32, "max_new_tokens": 8},
            "arms": [
                {"name": f"arm-{index}", "preset": "eager", "control": not index, "model": {"device": device}}
                for index, device in enumerate(("cuda:0", "cuda:1"))
            ],
            "traffic": {"duration_s": 100, "rate": 2, "block_s": 10, "length_scale": 0.02},
            "trials": {"ready_timeout_s": 20, "swap_devices": False},
            "pressure": pressure,
        }
        context = trial_context(tmp_path / "trial", table)
        context.logs.mkdir()
        made.append(
            Pressure(
                context,
                arm_command=[sys.executable, str(FAKES / "arm.py")],
                neighbour_command=[sys.executable, str(FAKES / "neighbour.py"), *flags],
            )
        )
        return made[-1], context

    yield make
    for pressure in made:
        pressure.kill()
        pressure.stop(hurry=True)


def rows(context: TrialContext) -> list[dict[str, Any]]:
    """Rows of the first card and then of the second: either neighbour may answer first."""
    kept: list[dict[str, Any]] = json.loads((context.folder / "trial.json").read_text())["pressure"]
    assert kept == context.facts.pressure
    return sorted(kept, key=lambda row: row["device"])


def at(context: TrialContext, seconds: float) -> None:
    """So many seconds of the traffic have passed."""
    context.facts.start_ns = now_ns() - int(seconds * 1e9)


def until(pressure: Pressure, holds: Callable[[], bool], within_s: float = 60.0) -> None:
    wait_for(holds, within_s, sleep=lambda _: pressure.step())


def test_a_phase_of_the_whole_traffic_is_on_every_device_before_the_load_and_until_its_end(pressed: Start) -> None:
    pressure, context = pressed({"memory_share": 0.3, "compute_share": 0.2})
    pressure.start({})
    started_ns = now_ns()
    assert sorted(pressure.process_ids) == ["neighbour cuda:0", "neighbour cuda:1"]
    at(context, 50.0)
    pressure.step()
    assert {row["end_ns"] for row in rows(context)} == {None}
    ending_ns = now_ns()
    pressure.stop(hurry=False)
    kept = rows(context)
    assert [(row["kind"], row["device"], row["share"]) for row in kept] == [
        *(("memory", "cuda:0", 0.3), ("compute", "cuda:0", 0.2)),
        *(("memory", "cuda:1", 0.3), ("compute", "cuda:1", 0.2)),
    ]
    assert {row["memory_bytes"] for row in kept if row["kind"] == "memory"} == {300}
    assert {row["had_share"] for row in kept if row["kind"] == "compute"} == {0.25}
    assert all(row["start_ns"] <= started_ns and ending_ns <= row["end_ns"] and row["error"] is None for row in kept)
    assert pressure.process_ids == {}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--refuse", "cuda:1"), ("neighbour-cuda-1", "the device is busy")),
        (("--die", "cuda:1=0"), ("exit code 7",)),
        (("--short", "cuda:1"), ("out of memory", "[pressure]")),
    ],
)
def test_a_pressure_that_cannot_be_had_ends_the_run_before_the_traffic(
    flags: tuple[str, ...], words: tuple[str, ...], pressed: Start
) -> None:
    pressure, _ = pressed({"memory_share": 0.3}, *flags)
    said = refusal(RunError, pressure.start, {})
    assert all(word in said for word in words)


def test_rows_of_a_neighbour_that_dies_have_the_reason(pressed: Start) -> None:
    pressure, context = pressed({"schedule": TWO_PHASES}, "--die", "cuda:1=1")
    pressure.start({})
    at(context, 20.1)
    until(pressure, lambda: len(context.status.notes) == 1)
    at(context, 30.1)
    until(pressure, lambda: len(context.facts.pressure or []) == 4)
    pressure.stop(hurry=False)
    why = "the neighbour ended with exit code 7"
    assert [(row["start_ns"] < row["end_ns"], row["error"]) for row in rows(context)][:2] == [(True, None)] * 2
    assert [row["error"] for row in rows(context)][2:] == [why] * 2
    assert context.status.notes[0].startswith(f"cuda:1: {why}")


NOWHERE = Path("/nonexistent")
# A thread and a child of its own, so that both are seen to be bound.
SLEEPER = (
    "import subprocess, sys, threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start(); "
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); print(child.pid, flush=True); "
    "time.sleep(60)"
)


@pytest.fixture
def replicas() -> Iterator[dict[str, tuple[int, int]]]:
    """Two processes, each with a child: (its number, that of the child) by name."""
    made = [subprocess.Popen([sys.executable, "-c", SLEEPER], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    pairs = {}
    for name, process in zip(("eager-0", "twin-0"), made, strict=True):
        assert process.stdout is not None
        pairs[name] = (process.pid, int(process.stdout.readline()))
    yield pairs
    for pid in (pid for pair in pairs.values() for pid in pair):
        os.kill(pid, 9)
    for process in made:
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture
def tree(replicas: dict[str, tuple[int, int]]) -> int:
    """A process with a thread and a child."""
    return replicas["eager-0"][0]


def affinities(pid: int) -> list[set[int]]:
    return [
        os.sched_getaffinity(int(task.name))
        for member, _ in family_of(pid)
        for task in Path(f"/proc/{member}/task").iterdir()
    ]


def test_every_thread_of_a_process_and_its_children_is_bound_and_released(tree: int) -> None:
    before = affinities(tree)
    assert len(before) >= 3
    (limit,) = limit_all([tree], 0.5, groups=NOWHERE)
    assert limit is not None
    first = min(os.sched_getaffinity(0))
    assert affinities(tree) == [{first}] * len(before)
    assert limit.facts() == {"method": "affinity", "processors": [first]}
    limit.lift()
    assert affinities(tree) == before


def test_bound_processes_are_released_where_another_cannot_be_bound(tree: int, monkeypatch: pytest.MonkeyPatch) -> None:
    before, bind, leaf = affinities(tree), os.sched_setaffinity, [*family_of(tree)][1][0]

    def refused(thread: int, processors: set[int]) -> None:
        if thread == leaf and len(processors) == 1:
            raise PermissionError(1, "not yours")
        bind(thread, processors)

    monkeypatch.setattr(os, "sched_setaffinity", refused)
    with pytest.raises(PermissionError):
        limit_all([tree], 1.0, groups=NOWHERE)
    assert affinities(tree) == before


TABLE: dict[str, Any] = {
    "name": "small",
    "engine": {"max_prompt_tokens": 32, "max_new_tokens": 8},
    "arms": [{"name": "eager", "preset": "eager", "control": True}, {"name": "twin", "preset": "eager"}],
    "traffic": {"duration_s": 100, "rate": 2, "block_s": 10, "length_scale": 0.02},
    "bed": {"processor_turn_s": 1.0},
}


def bound(pid: int) -> set[int]:
    """Where the threads of the process may run; all may run in the same places."""
    (places,) = {frozenset(os.sched_getaffinity(int(path.name))) for path in Path(f"/proc/{pid}/task").iterdir()}
    return set(places)


def test_replicas_change_processors_after_each_turn_and_have_all_at_the_end(
    tmp_path: Path, replicas: dict[str, tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert processor_sets(range(10), 3) == [(0, 1, 2), (3, 4, 5), (6, 7, 8)]
    assert (processor_sets((4, 7), 2), processor_sets((4, 7), 3)) == ([(4,), (7,)], [])
    usable, now = sorted(os.sched_getaffinity(0)), 100.0
    monkeypatch.setattr(processor_turns.time, "monotonic", lambda: now)
    # On a machine with one processor both sets are that one.
    sets = processor_sets(usable, 2) or [tuple(usable)] * 2
    monkeypatch.setattr(processor_turns, "processor_sets", lambda usable, count: sets)
    first, second = sets
    context = trial_context(tmp_path / "trial", TABLE)
    turns = ProcessorTurns(context)
    turns.start({name: pid for name, (pid, _) in replicas.items()})
    seen = []
    for _ in range(3):
        seen.append([bound(pid) for pair in replicas.values() for pid in pair])
        now += 0.5
        turns.poll()
        assert [bound(pid) for pair in replicas.values() for pid in pair] == seen[-1]
        now += 0.6
        turns.poll()
    one, other = [set(first)] * 2 + [set(second)] * 2, [set(second)] * 2 + [set(first)] * 2
    assert seen == [one, other, one]
    turns.stop()
    assert [bound(pid) for pair in replicas.values() for pid in pair] == [set(usable)] * 4
    assert context.facts.processor_turns == {"every_s": 1.0, "turns": 4, "sets": [first, second], "error": None}


@pytest.mark.parametrize(("usable", "words"), [({0}, "1 processor is too few"), ({0, 1}, "no process could be bound")])
def test_turns_that_cannot_be_taken_are_an_error_in_the_records_and_a_note(
    usable: set[int], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(pid: int, processors: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(processor_turns.os, "sched_getaffinity", lambda pid: usable)
    monkeypatch.setattr(processor_turns.os, "sched_setaffinity", refuse)
    context = trial_context(tmp_path / "trial", TABLE)
    turns = ProcessorTurns(context)
    turns.start({"eager-0": os.getpid(), "twin-0": os.getpid()})
    turns.poll()
    turns.stop()
    assert context.facts.processor_turns is not None
    assert words in context.facts.processor_turns["error"]
    assert context.status.notes
