"""What arms took of memory while they served, and the load that external servers report."""

from functools import partial

import numpy as np
import pyarrow as pa
import pytest

from analysis.records.run_records import read_run
from analysis.records.schemas import SERVER_LOAD
from analysis.run.memory import memory_of, shared_figure
from analysis.run.run import Run
from analysis.run.server_load import server_load
from tests.fakes.machines import GIB, sample, tell
from tests.fakes.runs import SECOND, FakeRun, write_run

CARDS = {"eager": "cuda:0", "compiled": "cuda:1"}
ONE_CARD = dict.fromkeys(CARDS, "cuda:0")
PROCESSOR = dict.fromkeys(CARDS, "cpu")


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


def samples(*, arm="vllm", replica="vllm-0", trial=1, **columns):
    """One a second from 1 s on."""
    rows = [{"trial": trial, "arm": arm, "replica": replica, "at_ns": SECOND * (1 + place)} for place in range(5)]
    for name, values in columns.items():
        for row, value in zip(rows, values, strict=True):
            row[name] = value
    return rows


def within(start_s, end_s, rows):
    return server_load(
        pa.Table.from_pylist(rows, SERVER_LOAD), "vllm", [(1, int(start_s * SECOND), int(end_s * SECOND))]
    )


LOADED = {"running": [1, 2, 9, 4, 5], "waiting": [0, 0, 3, 7, 0], "cache_pct": [9, 20, 30, 20, 99]}


@pytest.mark.parametrize(
    ("start_s", "end_s", "found"),
    [
        (
            2.4,
            3.6,
            "9 running, 7 waiting, cache 30 %, 2 preemptions",
        ),  # with the samples a second to either side; the counter began anew
        (0.0, 9.0, "9 running, 7 waiting, cache 99 %, 4 preemptions"),
        (-9, -2, ""),  # far from every sample
    ],
)
def test_the_load_of_a_stretch_is_the_most_that_was_sampled(start_s, end_s, found):
    assert within(start_s, end_s, samples(**LOADED, preemptions=[9, 1, 0, 2, 4])) == found


def test_load_of_replicas_adds_up_and_what_no_page_shows_is_unknown():
    own = samples(**LOADED) + samples(**{**LOADED, "cache_pct": [0] * 5}, replica="vllm-1")
    others = samples(**LOADED, arm="sglang") + samples(**LOADED, trial=2)
    assert within(1.5, 1.9, own + others) == "4 running, 0 waiting, cache 20 %"
