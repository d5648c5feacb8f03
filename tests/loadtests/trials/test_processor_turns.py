"""Replicas that take turns on the processors."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loadtests.trials import processes
from loadtests.trials.processes import ProcessorTurns, processor_sets
from tests.fakes.whole_run import trial_context

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


TABLE: dict[str, Any] = {
    "name": "small",
    "engine": {"max_prompt_tokens": 32, "max_new_tokens": 8},
    "arms": [{"name": "eager", "preset": "eager", "control": True}, {"name": "twin", "preset": "eager"}],
    "traffic": {"duration_s": 100, "rate": 2, "block_s": 10, "length_scale": 0.02},
    "machines": {"processor_turn_s": 1.0},
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
    monkeypatch.setattr(processes.time, "monotonic", lambda: now)
    # On a machine with one processor both sets are that one.
    sets = processor_sets(usable, 2) or [tuple(usable)] * 2
    monkeypatch.setattr(processes, "processor_sets", lambda usable, count: sets)
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

    monkeypatch.setattr(processes.os, "sched_getaffinity", lambda pid: usable)
    monkeypatch.setattr(processes.os, "sched_setaffinity", refuse)
    context = trial_context(tmp_path / "trial", TABLE)
    turns = ProcessorTurns(context)
    turns.start({"eager-0": os.getpid(), "twin-0": os.getpid()})
    turns.poll()
    turns.stop()
    assert context.facts.processor_turns is not None
    assert words in context.facts.processor_turns["error"]
    assert context.status.notes
