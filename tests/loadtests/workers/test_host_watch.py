"""Clocks of two hosts, compared by messages."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.records.schemas import BED
from analysis.records.tables import RecordError, read_table
from loadtests.workers import host_watch
from loadtests.workers.clock_offsets import ClockComparison, Exchange, clock_identity, host_identity
from loadtests.workers.host_watch import HostWatch, write_samples
from servers.clock import ANCHOR_NS
from tests.fakes.processes import wait_for

HOUR_NS = 3600 * 10**9


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take long to import; nothing here is about how long."""
    monkeypatch.setattr(host_watch, "_STOP_WITHIN_S", 60.0)


def wait_for_rows(path: Path) -> list[dict[str, Any]]:
    def rows() -> list[dict[str, Any]]:
        return read_table(path, BED)[0].to_pylist() if path.exists() else []

    wait_for(lambda: {row["kind"] for row in rows()} == {"host", "process"})
    return rows()


def test_samples_of_a_workers_host_arrive_on_the_runs_clock(tmp_path: Path) -> None:
    watch = HostWatch(tmp_path / "bed-2.arrow", trial=4, host="worker-2", sample_s=0.05)
    wait_for_rows(tmp_path / "bed-2.arrow")
    assert os.getpgid(watch._process.pid) != os.getpgid(0)  # no Ctrl-C of the worker's terminal reaches it
    facts = watch.stop()
    assert list(facts["machines"]) == ["worker-2"]
    assert facts["gaps"] == []
    there = read_table(tmp_path / "bed-2.arrow", BED)[0].to_pylist()

    write_samples(watch.samples(HOUR_NS), tmp_path / "here.arrow")
    table, truncated = read_table(tmp_path / "here.arrow", BED)
    assert not truncated
    here = table.to_pylist()
    assert here == [{**row, "at_ns": row["at_ns"] + HOUR_NS} for row in there]
    assert {(row["trial"], row["host"]) for row in here} == {(4, "worker-2")}
    assert {(row["name"], row["pid"]) for row in here if row["kind"] == "process"} == {("load", os.getpid())}


def test_a_watcher_that_cannot_write_is_a_gap(tmp_path: Path) -> None:
    (tmp_path / "bed-0.arrow.new").mkdir()
    watch = HostWatch(tmp_path / "bed-0.arrow", trial=1, host="worker-0", sample_s=0.05)
    (gap,) = watch.stop()["gaps"]
    assert gap["host"] == "worker-0"
    assert "its watcher ended with exit code 1" in gap["why"]
    with pytest.raises(RecordError, match=r"bed-0\.arrow cannot be read"):
        watch.samples(0)


# Locust changes the standard library of a process that imports it.
MASTER = """
import sys
from types import SimpleNamespace as Fake
from loadtests.workers.master import Master, _Load

sent = []
runner = Fake(register_message=lambda *_: None, send_message=lambda kind, data, client: sent.append(data))
options = Fake(records=sys.argv[1], schedule="", trial_config="", remote_workers=0)
master = Master(Fake(runner=runner, parsed_options=options))
load = _Load(number=2, client_id="x", planned=1)
for part in (0, 1, 1):  # the answer to the last was lost
    master._on_bed(load, {"part": part, "of": 2, "bytes": b"no samples"})
print(sent)
"""


def test_samples_that_the_master_cannot_take_are_not_called_kept(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", MASTER, str(tmp_path)], capture_output=True, text=True, check=True)
    first, last, again = ast.literal_eval(done.stdout.splitlines()[-1])
    assert first == {"part": 0, "error": None}
    assert last == again
    assert last["error"].startswith("the master cannot take them: they are no samples")


MS = 1_000_000


def exchange(*, at_ns: int, offset_ns: int, there_ns: int, thought_ns: int, back_ns: int) -> Exchange:
    received = at_ns + there_ns + offset_ns
    return Exchange(at_ns, received, received + thought_ns, at_ns + there_ns + thought_ns + back_ns)


times = st.integers(0, 500 * MS)


@given(offset=st.integers(-(10**18), 10**18), there=times, thought=times, back=times)
def test_the_true_offset_lies_within_the_uncertainty_however_lopsided_the_way(
    offset: int, there: int, thought: int, back: int
) -> None:
    clock = ClockComparison()
    clock.add(exchange(at_ns=10**18, offset_ns=offset, there_ns=there, thought_ns=thought, back_ns=back))
    found, uncertainty = clock.at(10**18 + there + thought + back)
    assert abs(found - offset) <= uncertainty + 1  # a nanosecond for rounding
    assert uncertainty == (there + back) // 2


def test_an_exchange_in_which_time_went_back_is_not_believed() -> None:
    clock = ClockComparison()
    clock.add(Exchange(sent_ns=100, received_ns=0, answered_ns=0, back_ns=50))
    assert clock.summary(0)["exchanges"] == 0
    assert clock.at(0) == (0, 0)


def test_processes_of_one_kernel_with_one_anchor_have_one_clock() -> None:
    assert clock_identity() == (f"{host_identity()}/{ANCHOR_NS}" if host_identity() else "")
