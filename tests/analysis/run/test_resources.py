"""What arms took of memory while they served."""

from functools import partial

import numpy as np

from tailgate.analysis.judging.gates.memory import memory_of, shared_figure
from tailgate.analysis.records.run_records import read_run
from tailgate.analysis.run.run import Run
from tests.fakes.machines import GIB, sample, tell
from tests.fakes.runs import FakeRun, write_run

CARDS = {"eager": "cuda:0", "compiled": "cuda:1"}


def run_in(path, *, duration_s=300, rate=1, trials=1, **facts):
    return tell(write_run(path / "run", FakeRun(duration_s=duration_s, rate=rate, trials=trials)), **facts)


def seen(directory):
    return memory_of(Run.of(read_run(directory)))


def held(directory, level, **more):
    """What the eager arm held of memory, sampled with this level."""
    sample(directory, "process", "eager-0", {"memory_bytes": level}, arm="eager", **more)
    return seen(directory)["eager"].get("process")


def test_the_peak_is_that_of_the_traffic_and_of_the_replica_that_held_most(tmp_path):
    def around(size, trial, at_s):
        return np.where((at_s < 0) | (at_s > 301), 9, size) * GIB  # more before and after the traffic

    run = run_in(tmp_path)
    for replica, size in (("eager-0", 2), ("eager-1", 3)):
        sample(run, "process", replica, {"memory_bytes": partial(around, size)}, arm="eager")
    assert seen(run)["eager"]["process"] == {1: 3 * GIB}


def test_samples_that_end_early_show_no_peak(tmp_path):
    assert held(run_in(tmp_path / "early"), GIB, last_s=200) is None
    assert held(run_in(tmp_path, duration_s=50), GIB) == {1: GIB}


def compared(directory):
    memory = seen(directory)
    return shared_figure(memory["compiled"], memory["eager"])


def test_arms_on_cards_are_compared_by_memory_of_the_cards(tmp_path):
    run = run_in(tmp_path, devices=CARDS)
    for arm in CARDS:
        sample(run, "process", f"{arm}-0", {"memory_bytes": GIB}, arm=arm)
    assert compared(run) is None
    for arm in CARDS:
        sample(run, "allocator", f"{arm}-0", {"reserved_bytes": 2 * GIB}, arm=arm)
    assert compared(run) == "reserved"
    for arm in CARDS:
        sample(run, "process", f"{arm}-1", {"device_memory_bytes": 3 * GIB}, arm=arm)
        assert seen(run)[arm]["device"] == {1: 3 * GIB}
    assert compared(run) == "device"


def test_the_process_that_listens_for_an_external_arm_shows_no_memory_of_its_server(tmp_path):
    run = run_in(tmp_path, arms=[{"name": "eager"}, {"name": "compiled", "kind": "openai"}])
    for arm in CARDS:
        sample(run, "process", f"{arm}-0", {"memory_bytes": GIB}, arm=arm)
    assert list(seen(run)["eager"]) == ["process"]
    assert (seen(run)["compiled"], compared(run)) == ({}, None)
