"""Records on disk."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import gevent
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.records.schemas import REQUESTS
from loadtests.external.addresses import ExternalConfig, OpenAiOptions
from loadtests.external.client_security import SecurityConfig
from loadtests.generator.arm_tally import ArmTally
from loadtests.generator.goodput import Goodput
from loadtests.generator.lag_histogram import LagHistogram
from loadtests.generator.latency_histogram import BOUNDS_S
from loadtests.generator.load_log import LoadLog
from loadtests.generator.own_cost import GarbageWindow
from loadtests.generator.record import SERVED_COLUMNS, RequestRecord, record_of
from loadtests.generator.record_batches import request_batch
from loadtests.generator.recorder import RequestRecorder, record_file
from loadtests.generator.spool import Spool
from loadtests.generator.trial_config import TrialConfig
from servers.clock import now_ns
from servers.fields import ConfigError
from servers.metadata import ARM_HEADER, trailing_key
from tests.fakes.request_rows import MS, record, row_of


def rows_of(path: Path) -> list[dict[str, object]]:
    """Every row of every whole batch; a torn tail is left out."""
    rows: list[dict[str, object]] = []
    with pa.OSFile(str(path), "rb") as source:
        reader = pa.ipc.open_stream(source)
        assert reader.schema == REQUESTS
        while True:
            try:
                rows += reader.read_next_batch().to_pylist()
            except (StopIteration, pa.ArrowInvalid, OSError):
                return rows


def test_rows_come_back_as_they_were_appended(tmp_path: Path) -> None:
    rows = [
        record(0),
        record(1, arm=None, replica=None, first_token_ns=None, output_tokens=0, token_ns=np.zeros(0, dtype=np.int64)),
        record(2, status="UNAVAILABLE", error="refused", token_ns=np.array([5], dtype=np.int64)),
    ]
    recorder = RequestRecorder(
        record_file(tmp_path / "deep" / "requests-0.arrow", remedy="take another"), rows_per_batch=2
    )
    for row in rows:
        recorder.append(row)
    recorder.close()
    recorder.close()
    expected = [row_of(row) for row in rows]
    assert rows_of(tmp_path / "deep" / "requests-0.arrow") == expected


def test_a_broken_disk_is_told_to_whoever_appends(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    recorder = RequestRecorder(Spool(writer), rows_per_batch=2)
    os.close(reader)
    recorder.append(record(0))
    recorder.append(record(1))
    assert recorder.file.settle(5.0)
    with pytest.raises(BrokenPipeError):
        recorder.flush()
    with pytest.raises(BrokenPipeError):
        recorder.close()
    assert recorder.file.dropped_rows == 2


def test_records_survive_kill_9(tmp_path: Path) -> None:
    path = tmp_path / "requests-0.arrow"
    code = f"""
import os, signal
from pathlib import Path
from loadtests.generator.recorder import RequestRecorder, record_file
from loadtests.generator.spool import Spool
from tests.fakes.request_rows import record
recorder = RequestRecorder(record_file(Path({str(path)!r}), remedy="take another"))
for number in range(1000):
    recorder.append(record(number))
recorder.flush()
recorder.file.settle(5.0)
recorder.append(record(1000))
os.kill(os.getpid(), signal.SIGKILL)
"""
    root = Path(__file__).parents[3]
    ended = subprocess.run([sys.executable, "-c", code], cwd=root, check=False, timeout=60)
    assert ended.returncode == -signal.SIGKILL
    assert [row["request_id"] for row in rows_of(path)] == [f"1-{number}" for number in range(1000)]


def test_records_of_an_earlier_run_are_not_overwritten(tmp_path: Path) -> None:
    RequestRecorder(record_file(tmp_path / "requests-0.arrow", remedy="take another")).close()
    with pytest.raises(ConfigError, match="exists already: take another"):
        RequestRecorder(record_file(tmp_path / "requests-0.arrow", remedy="take another"))


def test_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        RequestRecorder(record_file(tmp_path / "file" / "requests-0.arrow", remedy="take another"))


def test_a_number_that_its_column_cannot_hold_is_unknown() -> None:
    rows = [record(0, batch_size=2**31, queue_ns=2**63), record(1, batch_size=7, queue_ns=9)]
    rows.append(record(2, batch_size=None, queue_ns=10**30))
    batch = request_batch(rows)
    batch.validate(full=True)
    assert batch.column("batch_size").to_pylist() == [None, 7, None]
    assert batch.column("queue_ns").to_pylist() == [None, 9, None]
    batch = request_batch(rows[::-1])
    assert batch.column("batch_size").to_pylist() == [None, 7, None]


def test_every_column_of_the_schema_is_measured_here_or_by_the_server() -> None:
    assert sorted([*RequestRecord._fields, *SERVED_COLUMNS]) == sorted([*REQUESTS.names, "served"])


def test_what_the_server_measures_is_a_whole_number() -> None:
    assert {str(REQUESTS.field(name).type) for name in SERVED_COLUMNS} <= {"int32", "int64"}


@pytest.mark.parametrize(
    ("pinned", "routed", "said", "arm", "error"),
    [
        ("new", "new", "new", "new", None),
        ("new", "", "eager", "new", 'pinned to arm "new" but arm "eager" answered: check the routes'),
        (None, "new", "new", "new", None),
        (None, "new", "", "new", None),
        (None, "", "new", "new", None),
        (None, "new", "eager", "new", 'routed to arm "new" but arm "eager" answered: check the routes'),
    ],
)
def test_an_answer_counts_for_the_arm_that_it_was_sent_to(
    pinned: str | None, routed: str, said: str, arm: str, error: str | None
) -> None:
    plan = SimpleNamespace(session_id="s", turn=0, prompt_tokens=3, max_tokens=1, phase="")
    copy: Any = SimpleNamespace(arm=pinned, plan=plan, request_id="1", pair_id="1", lane=None, scheduled_ns=0)
    call: Any = SimpleNamespace(status="OK", error="", sent_ns=1, first_token_ns=2, output_tokens=1, token_ns=b"")
    call.initial_metadata = {ARM_HEADER: routed} if routed else {}
    call.trailing_metadata = {trailing_key("arm"): said} if said else {}
    record = record_of(call, copy, 1, 3)
    assert (record.arm, record.error) == (arm, error)


def test_a_slow_disk_holds_up_nobody_and_what_it_cannot_take_is_counted() -> None:
    """A pipe that nobody reads takes 64 KiB and then makes the writer wait, as a disk that is behind does."""
    reader, writer = os.pipe()
    spool = Spool(writer, most_waiting_bytes=1 << 20)
    piece = b"x" * 40_000
    for _ in range(100):
        spool.offer(piece, 10)
        gevent.sleep(0)
        assert spool.waiting_bytes <= 1 << 20
    assert spool.rows + spool.dropped_rows < 1000  # some wait
    assert spool.dropped_rows > 700
    before = spool.dropped_rows
    assert not spool.settle(0.05)
    taken = bytearray()
    while len(taken) < 40_000 * (100 - before // 10):  # the disk is back: what waited is written
        gevent.sleep(0)
        taken += os.read(reader, 1 << 16) if select_ready(reader) else b""
    assert spool.settle(5.0)
    assert (spool.rows, spool.dropped_rows) == (1000 - before, before)
    spool.close()
    os.close(reader)


def select_ready(descriptor: int) -> bool:
    import select

    return bool(select.select([descriptor], [], [], 0.001)[0])


def test_close_gives_up_on_a_disk_that_hangs_and_counts_what_is_lost() -> None:
    reader, writer = os.pipe()
    spool = Spool(writer)
    for _ in range(4):
        spool.offer(b"x" * 40_000, 10)
    spool.close(timeout_s=0.05)
    assert spool.rows + spool.dropped_rows == 40
    assert spool.dropped_rows >= 20
    os.close(reader)  # wakes the thread that hangs


def test_nothing_follows_a_piece_that_failed(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    spool = Spool(writer)
    spool.offer(b"x", 1)
    assert spool.settle(5.0)
    assert isinstance(spool.error, BrokenPipeError)
    assert spool.offer(b"y", 2) is False
    assert spool.dropped_rows == 3
    spool.close()


def test_a_disk_that_hangs_costs_records_and_not_memory_and_the_account_says_so(tmp_path: Path) -> None:
    """A pipe that nobody reads stands for the disk."""
    reader, writer = os.pipe()
    recorder = RequestRecorder(Spool(writer, most_waiting_bytes=200_000), rows_per_batch=64)
    log = LoadLog(tmp_path, worker=0, planned=5000, recorder=recorder)
    for number in range(5000):
        recorder.append(record(number))
        gevent.sleep(0)
        assert recorder.file.waiting_bytes <= 200_000
    log.ended(None, None)
    log.write()
    rows = json.loads((tmp_path / "generator-0.json").read_text())["records"]
    assert rows["dropped"] == recorder.file.dropped_rows + 1 > 3000
    assert rows["waiting_bytes"] > 100_000
    recorder.close(timeout_s=0.05)
    assert recorder.file.rows + recorder.file.dropped_rows == 5000
    os.close(reader)


def test_account_holds_cpu_of_each_second_once_the_schedule_has_begun(tmp_path: Path) -> None:
    log = LoadLog(tmp_path, worker=0, planned=1)
    until = time.perf_counter() + 0.6
    while time.perf_counter() < until:
        pass
    log.write()
    assert log.account()["cpu"]["of_s"] == 0  # getting ready may take all of a core
    log.start_ns = now_ns()
    until = time.thread_time() + 0.6
    while time.thread_time() < until:
        pass
    log.write()
    cpu = log.account()["cpu"]
    assert cpu["of_s"] > 0.5
    assert 0.1 < cpu["mean"] == cpu["max"] <= 1.05
    assert cpu["busy_s"] in (0.0, cpu["of_s"])


def test_log_counts_and_quantiles_count_from_the_schedule(tmp_path: Path) -> None:
    log = LoadLog(tmp_path, worker=3, planned=5, arms=["eager", "compiled"])
    at_ns = now_ns()
    for number in range(4):
        log.begun("eager")
        if number < 3:
            scheduled = at_ns - 500 * MS
            done = record(
                number,
                scheduled_ns=scheduled,
                sent_ns=scheduled + 40 * MS,
                first_token_ns=scheduled + 100 * MS,
                end_ns=scheduled + (200 + 100 * number) * MS,
                status="OK" if number < 2 else "UNAVAILABLE",
            )
            log.ended(done, "eager")
    log.lag.add(2 * MS)
    log.complete = True
    log.write()
    progress = json.loads((tmp_path / "progress-3.json").read_text())
    generator = json.loads((tmp_path / "generator-3.json").read_text())
    assert progress["arms"]["eager"] == {
        "n": 3,
        "failed": 1,
        "inflight": 1,
        "ttft_p50_ms": 100.0,
        "ttft_p99_ms": 100.0,
        "e2e_p50_ms": 250.0,
        "e2e_p99_ms": 299.0,
    }
    assert progress["overall"]["eager"] == progress["arms"]["eager"]
    assert progress["arms"]["compiled"]["ttft_p99_ms"] is None
    assert (generator["planned"], generator["started"], generator["finished"], generator["failed"]) == (5, 4, 3, 1)
    assert generator["lag_ms"]["max"] == 2.0
    assert generator["complete"] is True
    assert sorted(path.name for path in tmp_path.iterdir()) == ["generator-3.json", "progress-3.json"]


MS_NS = 1_000_000


@dataclass
class Record:
    ttft_ms: float | None = 100.0
    e2e_ms: float = 400.0
    output_tokens: int = 4
    ok: bool = True
    arm: str | None = "eager"
    scheduled_ns: int = 1_000 * MS_NS
    end_ns: int = 2_000 * MS_NS
    token_ns: npt.NDArray[np.int64] = field(default_factory=lambda: np.array([100, 200, 300, 400]) * MS_NS)


@pytest.mark.parametrize(
    ("limits", "record", "good"),
    [
        ({"ttft": 100}, Record(), True),
        ({"ttft": 99}, Record(), False),
        ({"tpot": 100}, Record(), True),
        ({"tpot": 99}, Record(), False),
        ({"tpot": 1}, Record(output_tokens=1), True),
        ({"ttft": 100, "tpot": 99}, Record(), False),
        ({"e2el": 400}, Record(), True),
        ({"e2e": 399}, Record(), False),
        ({"max_itl": 100}, Record(), True),
        ({"max_itl": 99}, Record(), False),
        ({"ttft": 1000}, Record(ok=False), False),
        ({"ttft": 1000}, Record(ttft_ms=None), False),
    ],
)
def test_a_request_is_good_within_every_limit(limits: dict[str, float], record: Record, good: bool) -> None:
    assert Goodput(limits).is_good(record) is good


def test_counts_of_several_processes_add_up() -> None:
    whole, parts = Goodput({"ttft": 200.0}), [Goodput({"ttft": 200.0}) for _ in range(2)]
    for second in range(10):
        record = Record(scheduled_ns=second * 1000 * MS_NS + 1, end_ns=second * 1000 * MS_NS + 500 * MS_NS)
        whole.add(record)
        parts[second % 2].add(record)
    total = Goodput({"ttft": 200.0})
    for part in parts:
        total.merge(part.take())
        assert part.take()["arms"] == {}
    assert total.lines() == whole.lines()


@given(st.lists(st.integers(1_000, 3_600_000_000_000), min_size=1, max_size=200), st.floats(0.01, 1))
def test_lag_quantile_is_at_most_one_percent_high_and_never_low(lags: list[int], q: float) -> None:
    histogram = LagHistogram()
    for lag in lags:
        histogram.add(lag)
    exact_ms = float(np.quantile(lags, q, method="inverted_cdf")) / MS
    assert exact_ms * (1 - 1e-9) <= histogram.quantile_ms(q) <= exact_ms * 1.0101
    assert histogram.max_ms == pytest.approx(max(lags) / MS)


def test_boundaries_rise_and_cover_a_compile_that_takes_minutes() -> None:
    for metric, bounds_s in BOUNDS_S.items():
        assert list(bounds_s) == sorted(set(bounds_s)), metric
    assert (BOUNDS_S["ttft"][0], BOUNDS_S["ttft"][-1]) == (0.001, 640.0)
    assert BOUNDS_S["e2e"][:3] == (0.01, 0.02, 0.04)
    assert BOUNDS_S["e2e"][-1] == 655.36


def test_an_arm_counts_answers_that_its_quantiles_have_forgotten() -> None:
    tally = ArmTally()
    for number in range(20_000):
        if number == 5_000:
            tally.histograms()
        tally.add(record(number))
    histograms = tally.histograms()
    assert {sum(row["counts"]) for row in histograms.values()} == {20_000}
    assert tally.histograms() == histograms
    # 11 ms to the first token, 101 ms in all, 45 ms between its three tokens
    for metric, bound in (("ttft", 0.02), ("e2e", 0.16), ("tpot", 0.05)):
        row = histograms[metric]
        assert row["counts"][row["bounds_s"].index(bound)] == 20_000
    assert histograms["tpot"]["sum_s"] == pytest.approx(900.0)


# Locust would patch the standard library for every other test in this process.
with patch.dict(os.environ, {"LOCUST_SKIP_MONKEY_PATCH": "1"}):
    from locust.env import Environment

    from loadtests.generator.locust_counts import AT_ONCE, LocustCounts


def test_many_count_without_a_flush() -> None:
    environment = Environment()
    counts = LocustCounts(environment)
    for _ in range(AT_ONCE):
        counts.add("gRPC", "Generate e2e", 1.0, 1)
    assert environment.stats.total.num_requests == AT_ONCE


def test_another_listener_is_noticed() -> None:
    environment = Environment()
    environment.create_local_runner()
    counts = LocustCounts(environment)
    assert counts.alone
    environment.events.request.add_listener(lambda **_: None)  # type: ignore[no-untyped-call]
    assert not counts.alone


def test_rates_that_locust_shows_are_the_same_after_old_seconds_are_forgotten() -> None:
    environment = Environment()
    counts = LocustCounts(environment)
    for second in range(1000, 1200):
        with patch("loadtests.generator.locust_counts.time.time", return_value=float(second)):
            counts.add("gRPC", "Generate e2e", 1.0, 1)
            counts.flush()
    total: Any = environment.stats.total
    before = total.current_rps, total.total_rps
    counts.forget(1199.0)
    assert (total.current_rps, total.total_rps) == before


def test_collector_is_off_in_the_window_and_sweeps_free_cycles() -> None:
    window = GarbageWindow()
    assert gc.isenabled()
    window.open()
    try:
        assert not gc.isenabled()
        assert gc.get_freeze_count() > 0
        window.sweep()
        assert window.spent_ms["count"] == 0  # nothing has gathered yet
        for _ in range(GarbageWindow.SWEEP_ABOVE + 1):
            cycle: list[object] = []
            cycle.append(cycle)
        window.sweep()
        assert window.spent_ms["count"] == 1
        assert gc.get_count()[0] < GarbageWindow.SWEEP_ABOVE
    finally:
        window.close()
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


ROOT = Path(__file__).resolve().parents[3]


def test_a_written_trial_is_read_back_as_it_was(tmp_path: Path) -> None:
    external = ExternalConfig(
        kind="openai",
        addresses=("http://a:1/v1", "http://b/v1"),
        model_name="llama",
        openai=OpenAiOptions(endpoint="chat", extra={"top_k": 1}),
    )
    config = TrialConfig(
        trial=3,
        arms=("eager", "vllm"),
        targets={"eager": "127.0.0.1:50051,127.0.0.1:50052"},
        external={"vllm": external},
        max_concurrency=None,
        prompts="chat",
        tokenizer="llama",
        security=SecurityConfig(token_env="TOKEN"),
    )
    config.write(tmp_path / "generator.json")
    assert TrialConfig.read(tmp_path / "generator.json") == config


def test_who_writes_a_trial_is_not_patched_by_gevent() -> None:
    code = "import sys, loadtests.generator.trial_config; sys.exit({'gevent', 'locust'} & set(sys.modules) != set())"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize("text", ["", "[" * 5000, "1" * 5000, "[]"])
def test_what_is_no_trial_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "generator.json").write_text(text)
    with pytest.raises(ConfigError, match=r"^trial config "):
        TrialConfig.read(tmp_path / "generator.json")
