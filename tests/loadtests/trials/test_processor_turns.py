"""Replicas change processors by turns and have all of them back at the end: real processes, a clock that is set."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loadtests.experiments.reading import from_table
from loadtests.trials import processor_turns
from loadtests.trials.context import TrialContext
from loadtests.trials.processor_turns import ProcessorTurns, processor_sets
from servers.config import ConfigError
from tests.fakes.trial_context import trial_context

# A thread and a child of its own, so that both are seen to be bound.
SLEEPER = (
    "import subprocess, sys, threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start(); "
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); print(child.pid, flush=True); "
    "time.sleep(60)"
)
EXTERNAL = {"name": "vllm", "kind": "openai", "address": "http://127.0.0.1:9", "model_name": "m"}
TABLE: dict[str, Any] = {
    "name": "small",
    "engine": {"max_prompt_tokens": 32, "max_new_tokens": 8},
    "arms": [{"name": "eager", "preset": "eager", "control": True}, {"name": "twin", "preset": "eager"}],
    "traffic": {"duration_s": 100, "rate": 2, "block_s": 10, "length_scale": 0.02},
    "bed": {"processor_turn_s": 1.0},
}


def trial(tmp_path: Path, table: dict[str, Any] = TABLE) -> TrialContext:
    return trial_context(tmp_path / "trial", table)


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


def bound(pid: int) -> set[int]:
    """Where the threads of the process may run; all may run in the same places."""
    (places,) = {frozenset(os.sched_getaffinity(int(path.name))) for path in Path(f"/proc/{pid}/task").iterdir()}
    return set(places)


def test_each_replica_has_every_set_once_in_as_many_turns() -> None:
    sets = processor_sets(range(10), 3)
    assert sets == [(0, 1, 2), (3, 4, 5), (6, 7, 8)]
    assert processor_sets((4, 7), 2) == [(4,), (7,)]
    assert processor_sets((4, 7), 3) == []
    assert processor_sets((4, 7), 0) == []


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one processor alone has no turns")
def test_replicas_change_places_after_each_turn_and_are_free_at_the_end(
    tmp_path: Path, replicas: dict[str, tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    usable, now = sorted(os.sched_getaffinity(0)), 100.0
    monkeypatch.setattr(processor_turns.time, "monotonic", lambda: now)
    first, second = processor_sets(usable, 2)
    context = trial(tmp_path)
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
    facts = context.facts.processor_turns
    assert facts == {"every_s": 1.0, "turns": 4, "sets": [first, second], "error": None}
    turns.stop()
    turns.poll()
    assert bound(replicas["eager-0"][0]) == set(usable)


def test_with_fewer_processors_than_replicas_the_trial_goes_on_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor_turns.os, "sched_getaffinity", lambda pid: {0})
    context = trial(tmp_path)
    turns = ProcessorTurns(context)
    turns.start({"eager-0": os.getpid(), "twin-0": os.getpid()})
    turns.poll()
    turns.stop()
    assert context.facts.processor_turns is not None
    assert context.facts.processor_turns["error"] == "1 processor is too few for 2 replicas"
    assert any("replicas keep their processors" in note for note in context.status.notes)


def test_a_kernel_that_refuses_ends_the_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, processors: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(processor_turns.os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(processor_turns.os, "sched_setaffinity", refuse)
    context = trial(tmp_path)
    turns = ProcessorTurns(context)
    turns.start({"eager-0": os.getpid(), "twin-0": os.getpid()})
    turns.poll()
    assert context.facts.processor_turns is not None
    assert "no process could be bound" in context.facts.processor_turns["error"]


def test_a_replica_that_died_takes_no_turn(
    tmp_path: Path, replicas: dict[str, tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = min(os.sched_getaffinity(0))
    monkeypatch.setattr(processor_turns, "processor_sets", lambda usable, count: [(place,)] * count)
    context = trial(tmp_path)
    turns = ProcessorTurns(context)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    turns.start({"twin-0": gone.pid, "eager-0": replicas["eager-0"][0]})
    assert bound(replicas["eager-0"][0]) == {place}
    turns.stop()
    assert context.facts.processor_turns is not None
    assert context.facts.processor_turns["error"] is None


def test_without_the_setting_nothing_is_bound_or_written(tmp_path: Path) -> None:
    context = trial(tmp_path, {**TABLE, "bed": {}})
    turns = ProcessorTurns(context)
    turns.start({"eager-0": os.getpid()})
    turns.poll()
    turns.stop()
    assert context.facts.processor_turns is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"pressure": {"cpus": 1.0, "end_s": 50}}, "pressure.cpus binds replicas to processors too"),
        ({"compare_models": True, "arms": [*TABLE["arms"][:1], EXTERNAL]}, 'arm "vllm" is external'),
        ({"bed": {"processor_turn_s": -1}}, "bed.processor_turn_s"),
    ],
)
def test_what_turns_cannot_be_beside_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        from_table({**TABLE, **change})
