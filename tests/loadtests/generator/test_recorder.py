"""Records on disk."""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace as Fake
from typing import Any
from unittest.mock import Mock

import gevent
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailgate.analysis.records.schemas import REQUESTS
from tailgate.analysis.records.tables import read_end, read_table
from tailgate.loadtests.clients.grpc_call import EmbedCall, GrpcCall
from tailgate.loadtests.external.arms import OpenAiArm, OpenAiOptions
from tailgate.loadtests.external.client_security import SecurityConfig
from tailgate.loadtests.generator import load_log as accounts
from tailgate.loadtests.generator.histogram import BOUNDS_S, ArmTally, Histogram
from tailgate.loadtests.generator.load_log import GarbageWindow, LoadLog
from tailgate.loadtests.generator.outcome import record_of
from tailgate.loadtests.generator.record import SERVED_COLUMNS, RequestRecord, request_batch
from tailgate.loadtests.generator.recorder import RequestRecorder, record_file
from tailgate.loadtests.generator.trial_config import TrialConfig
from tailgate.servers.clock import now_ns
from tailgate.servers.complaint import ConfigError
from tailgate.servers.metadata import ARM_HEADER, trailing_key
from tests.fakes.request_rows import MS, piped, record, row_of

ROOT = Path(__file__).resolve().parents[3]


def rows_of(path: Path) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = read_table(path, REQUESTS)[0].to_pylist()
    return rows


def test_rows_come_back_as_they_were_appended(tmp_path: Path) -> None:
    none = np.zeros(0, dtype=np.int64)
    rows = [
        record(0),
        record(1, arm=None, replica=None, first_token_ns=None, output_tokens=0, token_ns=none),
        record(2, status="UNAVAILABLE", error="refused", token_ns=np.array([5], dtype=np.int64)),
    ]
    path = tmp_path / "deep" / "requests-0.arrow"
    recorder = RequestRecorder(record_file(path), rows_per_batch=2)
    for row in rows:
        recorder.append(row)
    recorder.close()
    recorder.close()
    assert (read_end(path), read_table(path, REQUESTS)[1]) == ((3, True), ())
    assert rows_of(path) == [row_of(row) for row in rows]
    assert (rows[0].ttft_ms, rows[0].e2e_ms, rows[1].ttft_ms) == (11.0, 101.0, None)


def test_a_broken_disk_is_reported_to_what_appends() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    recorder = RequestRecorder(piped(writer), rows_per_batch=2)
    recorder.append(record(0))
    recorder.append(record(1))
    assert recorder.file.settle(5.0)
    assert recorder.file.offer(b"y", 1, 3) is False, "nothing follows a piece that failed"
    for write in (recorder.flush, recorder.close):
        with pytest.raises(BrokenPipeError):
            write()
    assert recorder.file.dropped_rows == 5


def test_records_survive_kill_9(tmp_path: Path) -> None:
    path = tmp_path / "requests-0.arrow"
    code = f"""
import os, signal
from pathlib import Path
from tailgate.loadtests.generator.recorder import RequestRecorder, record_file
from tests.fakes.request_rows import record
recorder = RequestRecorder(record_file(Path({str(path)!r})))
for number in range(1000):
    recorder.append(record(number))
recorder.flush()
recorder.file.settle(5.0)
recorder.append(record(1000))
os.kill(os.getpid(), signal.SIGKILL)
"""
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, timeout=60)
    assert ended.returncode == -signal.SIGKILL
    assert [row["request_id"] for row in rows_of(path)] == [f"1-{number}" for number in range(1000)]


@pytest.mark.parametrize(
    ("name", "error"), [("file", "exists already: give an empty directory"), ("file/x", "cannot be written")]
)
def test_no_file_is_overwritten_and_one_that_cannot_be_made_is_named(tmp_path: Path, name: str, error: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=error):
        record_file(tmp_path / name)


def test_a_number_that_its_column_cannot_hold_is_unknown() -> None:
    rows = [record(0, prompt_tokens=2**31, server_end_ns=2**63), record(1, prompt_tokens=7, server_end_ns=9)]
    rows.append(record(2, prompt_tokens=None, server_end_ns=10**30))
    for batch in (request_batch(rows), request_batch(rows[::-1])):
        batch.validate(full=True)
        assert batch.column("prompt_tokens").to_pylist() == [None, 7, None]
        assert batch.column("server_end_ns").to_pylist() == [None, 9, None]


def test_a_column_of_the_schema_is_measured_here_or_is_a_whole_number_of_the_server() -> None:
    assert sorted([*RequestRecord._fields, *SERVED_COLUMNS]) == sorted([*REQUESTS.names, "served"])
    assert {str(REQUESTS.field(name).type) for name in SERVED_COLUMNS} <= {"int32", "int64"}


PINNED = 'pinned to arm "new" but arm "eager" answered: check the routes'
ROUTED = 'routed to arm "new" but arm "eager" answered: check the routes'


@pytest.mark.parametrize(
    ("pinned", "routed", "said", "changes", "error"),
    [
        ("new", "new", "new", {}, None),
        ("new", "", "eager", {}, PINNED),
        (None, "new", "new", {}, None),
        (None, "new", "", {}, None),
        (None, "", "new", {}, None),
        (None, "new", "eager", {}, ROUTED),
        ("new", "new", "new", {"error": "cut"}, "the answer ended with OK and an error: cut"),
        ("new", "new", "new", {"output_tokens": 0}, "the answer ended with OK and holds no token"),
        ("new", "new", "new", {"output_tokens": 2}, "the server counts 1 tokens in its answer, and 2 came"),
    ],
)
@pytest.mark.parametrize("embeds", [False, True])
def test_an_answer_is_that_of_the_arm_it_was_sent_to_and_fails_where_it_is_not_whole(
    embeds: bool, pinned: str | None, routed: str, said: str, changes: dict[str, Any], error: str | None
) -> None:
    error = None if embeds and "output_tokens" in changes else error  # an embedding has none
    settings = {"status": "OK", "error": "", "sent_ns": 1, "first_token_ns": 2, "end_ns": 3, "output_tokens": 1}
    settings["token_ns"] = b""
    call = Mock(spec=EmbedCall if embeds else GrpcCall, **settings | changes)
    call.initial_metadata = {ARM_HEADER: routed} if routed else {}
    call.trailing_metadata = {trailing_key("output_tokens"): "1"} | ({trailing_key("arm"): said} if said else {})
    plan = Fake(prompt_tokens=3, max_tokens=1, phase="")
    call.tag = Fake(arm=pinned, plan=plan, request_id="1", pair_id="1", endpoint=None, scheduled_ns=0)
    record = record_of(call, 1)
    assert (record.arm, record.error, record.status) == ("new", error, "INTERNAL" if error else "OK")
    assert (record.output_tokens is None, record.prompt_tokens) == (embeds, 3)
    call.trailing_metadata[trailing_key("prompt_tokens")] = "5"
    assert record_of(call, 1).prompt_tokens == 5, "as the server counts them"


def test_a_slow_disk_delays_nothing_and_what_it_cannot_take_is_counted() -> None:
    """A pipe that nothing reads takes 64 KiB and then makes the writer wait, as a disk that is behind does."""
    reader, writer = os.pipe()
    spool = piped(writer, most_waiting_bytes=1 << 20)
    for _ in range(100):
        spool.offer(b"x" * 40_000, 40_000, 10)
        gevent.sleep(0)
        assert spool.waiting_bytes <= 1 << 20
    assert spool.rows + spool.dropped_rows < 1000  # some wait
    before = spool.dropped_rows
    assert before > 700
    assert not spool.settle(0.05)
    taken = 0
    while taken < 40_000 * (100 - before // 10):  # the disk is back: what waited is written
        gevent.sleep(0)
        taken += len(os.read(reader, 1 << 16)) if select.select([reader], [], [], 0.001)[0] else 0
    assert spool.settle(5.0)
    assert (spool.rows, spool.dropped_rows) == (1000 - before, before)
    spool.close()
    os.close(reader)


def test_close_gives_up_on_a_disk_that_hangs_and_counts_what_is_lost() -> None:
    reader, writer = os.pipe()
    spool = piped(writer)
    for _ in range(4):
        spool.offer(b"x" * 40_000, 40_000, 10)
    spool.close(timeout_s=0.05)
    assert spool.rows + spool.dropped_rows == 40
    assert spool.dropped_rows >= 20
    os.close(reader)  # wakes the thread that hangs


def test_the_account_counts_busy_seconds_once_the_schedule_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Fake(process_time=time.process_time, thread_time=lambda: clock.used_s, perf_counter=lambda: clock.at_s)
    clock.used_s = clock.at_s = 0.0
    monkeypatch.setattr(accounts, "time", clock)
    log = LoadLog(None, worker=0)
    for share in (1.0, 0.96, 0.97, 0.5):  # getting ready may take all of a core
        clock.used_s, clock.at_s = clock.used_s + share, clock.at_s + 1.0
        log.refresh()
        log.start_ns = now_ns()
    assert log.account()["cpu"] == {"busy_s": 2.0, "of_s": 3.0}


def test_log_counts_and_quantiles_count_from_the_schedule(tmp_path: Path) -> None:
    log = LoadLog(tmp_path, worker=3, arms=["eager", "compiled"])
    log.planned = 5
    at_ns = now_ns()
    for e2e_ms, status in ((200, "OK"), (300, "OK"), (400, "UNAVAILABLE")):
        times = {"scheduled_ns": 0, "sent_ns": 40, "first_token_ns": 100, "end_ns": e2e_ms}
        times = {name: at_ns + (after_ms - 500) * MS for name, after_ms in times.items()}
        log.begun("eager")
        log.ended(record(status=status, **times), "eager")
    log.begun("eager")
    log.lag.add(2 * MS)
    log.start_ns = at_ns - 5_000 * MS
    log.complete = True
    log.write()
    generator = json.loads((tmp_path / "generator-3.json").read_text())
    quantiles = {"ttft_p50_ms": 100.0, "ttft_p99_ms": 100.0, "e2e_p50_ms": 200.0, "e2e_p99_ms": 300.0}
    expected = {"n": 3, "failed": 1, "inflight": 1, **quantiles}
    assert generator["arms"]["eager"] == pytest.approx(expected, rel=0.01)
    assert 5.0 <= generator["t_s"] < 60.0
    assert generator["arms"]["compiled"]["ttft_p99_ms"] is None
    assert (generator["planned"], generator["started"], generator["finished"], generator["failed"]) == (5, 4, 3, 1)
    assert (generator["lag_ms"]["max"], generator["complete"]) == (2.0, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["generator-3.json"]


@given(st.lists(st.integers(1_000, 3_600_000_000_000), min_size=1, max_size=200), st.floats(0.01, 1))
def test_lag_quantile_is_at_most_one_percent_high_and_never_low(lags: list[int], q: float) -> None:
    histogram = Histogram()
    for lag in lags:
        histogram.add(lag)
        assert histogram.max_ms >= lag / MS
    exact_ms = float(np.quantile(lags, q, method="inverted_cdf")) / MS
    assert exact_ms * (1 - 1e-9) <= histogram.quantile_ms(q) <= exact_ms * 1.0101
    assert histogram.max_ms == pytest.approx(max(lags) / MS)


def test_boundaries_rise_and_cover_a_compile_that_takes_minutes() -> None:
    assert BOUNDS_S[:4] == (0.001, 0.0016, 0.0025, 0.004)
    assert (list(BOUNDS_S), BOUNDS_S[-1]) == (sorted(set(BOUNDS_S)), 1000.0)
    histogram = Histogram()
    for seconds in (-1.0, 0.1, 0.15, 0.3, 2000.0):
        histogram.add(int(seconds * 1000) * MS)
    counts = dict(zip((*BOUNDS_S, "above"), histogram.buckets()["counts"], strict=True))
    assert {bound: count for bound, count in counts.items() if count} == {0.001: 1, 0.1: 1, 0.16: 1, 0.4: 1, "above": 1}
    assert histogram.buckets()["sum_s"] == 2000.55


def test_an_arm_counts_answers_that_its_quantiles_have_forgotten() -> None:
    tally = ArmTally()
    assert tally.summary(0)["e2e_p99_ms"] is None
    for number in range(5_000):
        tally.add(record(number))
    # 11 ms to the first token, 101 ms in all, 45 ms between its three tokens
    for metric, bound in (("ttft", 0.016), ("e2e", 0.16), ("tpot", 0.063)):
        counts = tally.histograms()[metric]["counts"]
        assert counts[BOUNDS_S.index(bound)] == sum(counts) == 5_000
    assert tally.histograms()["tpot"]["sum_s"] == pytest.approx(225.0)
    for at_s, ended in ((1, True), (10, True), (11, False), (12, False)):
        found = tally.summary(at_s * 1000 * MS)["e2e_p99_ms"]
        assert found == (pytest.approx(101.0, rel=0.01) if ended else None), at_s
    tally.add(record(first_token_ns=None))
    assert tally.summary(13_000 * MS)["ttft_p50_ms"] is None
    assert tally.finished == 5_001


def test_collector_is_off_in_the_window_and_sweeps_free_cycles() -> None:
    window = GarbageWindow()
    assert gc.isenabled()
    window.open()
    try:
        assert (gc.isenabled(), gc.get_freeze_count() > 0) == (False, True)
        for made, swept in ((0, False), (GarbageWindow.SWEEP_ABOVE + 1, True)):
            for _ in range(made):
                cycle: list[object] = []
                cycle.append(cycle)
            window.sweep()
            assert (window.spent_ms > 0) is swept
            assert gc.get_count()[0] < GarbageWindow.SWEEP_ABOVE
    finally:
        window.close()
    assert (gc.isenabled(), gc.get_freeze_count()) == (True, 0)


def test_a_written_trial_is_read_back_as_it_was(tmp_path: Path) -> None:
    openai = OpenAiOptions(endpoint="chat", extra={"top_k": 1})
    address = ("http://a:1/v1", "http://b/v1")
    external = OpenAiArm(name="vllm", kind="openai", address=address, openai=openai, model_name="m")
    config = TrialConfig(
        **{"trial": 3, "arms": ("eager", "vllm"), "tokenizer": "llama"},
        targets={"eager": "127.0.0.1:50051,127.0.0.1:50052"},
        external={"vllm": external},
        security=SecurityConfig(token_env="TOKEN"),
    )
    config.write(tmp_path / "generator.json")
    assert TrialConfig.read(tmp_path / "generator.json") == config
