from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest

from benchmarks.contest import Cores, NullProcess
from benchmarks.null_server import Pace
from benchmarks.observed import Emitted
from servers.clock import now_ns
from servers.rpc import inference_pb2_grpc
from servers.rpc.inference_pb2 import GenerateRequest

ANYWHERE = Cores(server=None, load=None)


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
