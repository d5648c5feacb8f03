from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import numpy as np
import pyarrow as pa
import pytest

from analysis.records.schemas import REQUESTS
from benchmarks.contest import Cores, NullProcess, Work, run
from benchmarks.lag import own_error, stalled_latencies, stream_figures
from benchmarks.master import Trial
from benchmarks.null_server import Pace
from benchmarks.observed import Emitted, Observed, Plan
from benchmarks.proxies import PATHS, opened
from servers.clock import now_ns
from servers.rpc import inference_pb2_grpc
from servers.rpc.inference_pb2 import GenerateRequest

ANYWHERE = Cores(server=None, load=None)


def plan(mode: str, **fields: object) -> Plan:
    return Plan(mode=mode, address="", out="", **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("contestant", ["stock", "bare", "tailgate"])
def test_a_contestant_sees_the_tokens_of_a_few_streams(contestant: str, tmp_path: Path) -> None:
    work = Work(
        plan=plan("streams", streams=5, ramp_s=0.2, tokens=40),
        server=("--tokens-per-s", "20"),
        window_s=0.5,
        settle_s=0.3,
    )
    outcome = run(contestant, work, folder=tmp_path / "run", cores=ANYWHERE)
    figures = stream_figures(outcome.seen, outcome.sent, start_ns=outcome.start_ns, end_ns=outcome.end_ns)
    assert 30 < figures["sent"] <= 55
    assert figures["delivered"] > 0.5
    assert 0 <= figures["p50_lag_ms"] < 1000
    assert outcome.server["refused"] == 0


MS = 1_000_000


def observed(**columns: list[int]) -> Observed:
    count = len(columns["sent"])
    zeros = [0] * count
    plain = {
        name: np.array(columns.get(name, zeros), np.int64) for name in ("scheduled", "sent", "end", "recv", "answer")
    }
    return Observed(
        names=np.array([f"r{number}" for number in range(count)]),
        ok=np.array(columns.get("ok", [1] * count), np.int64),
        stamps=np.array(columns.get("stamps", []), np.int64),
        counts=np.array(columns.get("counts", zeros), np.int64),
        **plain,
    )


def emitted(streams: int, tokens: int) -> Emitted:
    """Streams in phase 0 of 2, a tick each 10 ms, from 1 s on; every stream starts with the first tick."""
    ticks = np.arange(2 * tokens, dtype=np.int64)
    return Emitted(
        ticks=ticks,
        emits=1000 * MS + ticks * 10 * MS,
        names=np.array([f"r{number}" for number in range(streams)]),
        first_ticks=np.zeros(streams, np.int64),
        tokens=np.full(streams, tokens, np.int64),
        phases=2,
    )


def test_lag_is_the_stamp_less_the_servers_send_time() -> None:
    sent = emitted(1, 10)
    stamps = [1000 * MS + 20 * MS * k + (3 * MS if k == 4 else 1 * MS) for k in range(10)]
    figures = stream_figures(observed(sent=[0], stamps=stamps, counts=[10]), sent, start_ns=0, end_ns=10**12)
    assert figures["sent"] == 10
    assert figures["delivered"] == 1.0
    assert figures["p50_lag_ms"] == 1.0
    assert figures["max_lag_ms"] == 3.0
    assert figures["p99_itl_error_ms"] == pytest.approx(2.0, abs=0.01)


def test_tokens_that_do_not_come_are_late_until_the_window_ends() -> None:
    sent = emitted(1, 10)
    stamps = [1000 * MS + 20 * MS * k for k in range(5)]
    figures = stream_figures(observed(sent=[0], stamps=stamps, counts=[5]), sent, start_ns=1000 * MS, end_ns=1200 * MS)
    assert figures["delivered"] == 0.5
    assert figures["max_lag_ms"] == 100.0


def test_own_error_is_late_start_and_delivery_and_not_the_server() -> None:
    seen = observed(
        scheduled=[0, 100 * MS], sent=[1 * MS, 100 * MS], recv=[2 * MS, 101 * MS], answer=[52 * MS, 151 * MS],
        end=[54 * MS, 152 * MS],
    )  # fmt: skip
    figures = own_error(seen, start_ns=0, end_ns=10**9)
    assert figures["due"] == 2
    assert figures["answered"] == 1.0
    assert figures["max_own_ms"] == 3.0
    assert figures["p50_late_ms"] == 0.5
    assert figures["p50_delivery_ms"] == 1.5
    assert figures["p50_path_ms"] == 3.0  # 54 − 50 and 52 − 50


def test_a_stall_delays_what_would_have_been_answered_in_it() -> None:
    due = [0, 900 * MS, 1000 * MS, 2000 * MS, 3950 * MS, 4000 * MS]
    latency = stalled_latencies(due, service_ns=50 * MS, stall_ns=(1000 * MS, 4000 * MS)) / MS
    assert latency.tolist() == [50, 50, 3000, 2000, 50, 50]


@contextmanager
def null(folder: Path, *options: str) -> Iterator[NullProcess]:
    with NullProcess(options, folder=folder, cores=ANYWHERE) as server:
        yield server


@contextmanager
def stub_of(server: NullProcess) -> Iterator[inference_pb2_grpc.InferenceStub]:
    with grpc.insecure_channel(server.address, options=(("grpc.enable_http_proxy", 0),)) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


def test_every_tick_comes_after_the_one_before_and_each_round_has_all_phases() -> None:
    pace = Pace(20.0, base_ns=1000)
    assert pace.phases == 50
    assert pace.due_ns(pace.phases) == 1000 + 50_000_000
    for at_ns in (1000, 999_999, 1_001_000, 12_345_678):
        tick = pace.after(at_ns)
        assert pace.due_ns(tick - 1) <= at_ns < pace.due_ns(tick)


def test_a_grpc_client_gets_paced_tokens_with_their_send_times(tmp_path: Path) -> None:
    with null(tmp_path, "--tokens-per-s", "200") as server, stub_of(server) as stub:
        call = stub.Generate(GenerateRequest(request_id="one", max_tokens=40))
        chunks = list(call)
        trailing = dict(call.trailing_metadata())
        report = server.request(f"report {tmp_path / 'server.npz'}")
    emits = [chunk.emit_ns[0] for chunk in chunks]
    assert len(emits) == 40
    assert emits == sorted(emits)
    assert 0.19 < (emits[-1] - emits[0]) / 1e9 < 0.5
    assert trailing["tailgate-output-tokens"] == "40"
    assert int(trailing["tailgate-recv-ns"]) <= emits[0] <= int(trailing["tailgate-end-ns"]) <= now_ns()
    sent = Emitted.read(tmp_path / "server.npz")
    assert sent.names.tolist() == ["one"]
    assert sent.at(sent.first_ticks[0] + sent.phases * np.arange(40)).tolist() == emits
    assert report["requests"] == report["answered"] == 1


@pytest.mark.parametrize("style", [(), ("--huffman",)])
def test_whole_answers_take_the_service_time(tmp_path: Path, style: tuple[str, ...]) -> None:
    with null(tmp_path, "--service-ms", "40", *style) as server, stub_of(server) as stub:
        call = stub.Generate(GenerateRequest(request_id="one", max_tokens=3))
        assert sum(len(chunk.token_ids) for chunk in call) == 3
        trailing = dict(call.trailing_metadata())
    took_ms = (int(trailing["tailgate-end-ns"]) - int(trailing["tailgate-recv-ns"])) / 1e6
    assert 40 <= took_ms < 500


@pytest.mark.parametrize("name", PATHS)
def test_a_way_passes_answers_and_their_metadata_on(name: str, tmp_path: Path) -> None:
    with NullProcess((), folder=tmp_path, cores=ANYWHERE) as server:
        folder = tmp_path / "way"
        folder.mkdir()
        with opened(name, server.address, folder=folder, cores=ANYWHERE) as way:
            before = way.cpu_s()
            with grpc.insecure_channel(way.address, options=(("grpc.enable_http_proxy", 0),)) as channel:
                call = inference_pb2_grpc.InferenceStub(channel).Generate(GenerateRequest(max_tokens=3), timeout=10)
                assert sum(len(chunk.token_ids) for chunk in call) == 3
                assert dict(call.trailing_metadata())["tailgate-output-tokens"] == "3"
            assert (way.cpu_s() > before) == (name != "direct")


def test_every_record_of_two_workers_is_acknowledged_and_in_the_run(tmp_path: Path) -> None:
    with Trial(tmp_path / "trial", workers=2, rate=1000, seconds=2, tokens=3, requests=40) as trial:
        row = trial.figures()
    assert (row["rows"], row["rows_in_the_run"], row["unacknowledged_rows"]) == (2000, 2000, 0)
    # Each of two workers records 500 a second: a whole batch of 256, and the rest once a second.
    assert row["batches"] == 8
    assert (row["exit_code"], row["lost"], row["clock_beyond_bound"]) == (0, 0, 0)
    assert min(row["round_trip_ms"]["p50"], row["ack_ms"]["p50"], row["master_core"]) > 0
    record = sum(field.type.bit_width // 8 for field in REQUESTS if pa.types.is_integer(field.type))
    assert row["bytes_per_record"] > record + 3 * 8
    assert row["share_bytes"] > 40 * 8
    assert 0 < row["shares_s"] <= row["ready_s"]
