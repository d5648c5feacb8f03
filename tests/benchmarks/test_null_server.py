from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.contest import Cores, NullProcess
from benchmarks.null_server import Pace
from benchmarks.observed import Emitted
from loadtests.clients import frames
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


def test_rates_that_milliseconds_do_not_divide_are_kept() -> None:
    pace = Pace(30.0, base_ns=0)
    assert pace.due_ns(pace.phases * 30) == pytest.approx(10**9, abs=2)


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


def test_a_stall_holds_back_what_falls_into_it(tmp_path: Path) -> None:
    with null(tmp_path) as server, stub_of(server) as stub:
        server.request("stall 0.0 0.4")
        began_ns = now_ns()
        list(stub.Generate(GenerateRequest(max_tokens=1)))
        assert 0.39 < (now_ns() - began_ns) / 1e9 < 2
        start_ns, end_ns = server.request(f"report {tmp_path / 'server.npz'}")["stall_ns"]
        assert end_ns - start_ns == 400_000_000
        began_ns = now_ns()
        list(stub.Generate(GenerateRequest(max_tokens=1)))
        assert now_ns() - began_ns < 300_000_000


def test_a_proxys_health_check_is_answered(tmp_path: Path) -> None:
    with null(tmp_path) as server, grpc.insecure_channel(server.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = stub.Check(health_pb2.HealthCheckRequest(service="tailgate.v1.Inference"))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        assert server.request("status")["requests"] == 0


def test_a_cancelled_stream_is_no_longer_served(tmp_path: Path) -> None:
    with null(tmp_path, "--tokens-per-s", "100") as server, stub_of(server) as stub:
        call = stub.Generate(GenerateRequest(request_id="one", max_tokens=2000))
        next(iter(call))
        assert server.request("status")["streaming"] == 1
        call.cancel()
        deadline_ns = now_ns() + 5 * 10**9
        while server.request("status")["streaming"]:
            assert now_ns() < deadline_ns


def test_more_tokens_than_a_streams_window_are_refused(tmp_path: Path) -> None:
    with null(tmp_path, "--tokens-per-s", "100") as server, raw(server) as sock:
        sock.sendall(request(1, tokens=4000))
        kinds = [(kind, flags & frames.END_STREAM) for kind, flags, _, _ in read_until_end(sock, 1)]
        assert kinds[-1] == (frames.HEADERS, frames.END_STREAM)
        assert not any(kind == frames.DATA for kind, _ in kinds)
        assert server.request(f"report {tmp_path / 'server.npz'}")["refused"] == 1


def test_a_full_connection_window_holds_tokens_back_until_it_opens(tmp_path: Path) -> None:
    with null(tmp_path) as server, raw(server) as sock:
        # two whole answers of 2,000 tokens: the second does not fit into the window of 65,535 bytes any more
        sock.sendall(request(1, tokens=2000) + request(3, tokens=2000))
        sock.settimeout(10)
        seen = [frame for frame in read_until_end(sock, 1) if frame[0] == frames.DATA]
        assert sum(len(payload) for _, _, _, payload in seen) <= frames.DEFAULT_WINDOW
        sock.sendall(frames.frame(frames.WINDOW_UPDATE, 0, 0, frames.UINT32.pack(2**20)))
        tokens = sum(kind == frames.DATA for kind, _, _, _ in read_until_end(sock, 3))
        assert tokens == 2000


@contextmanager
def raw(server: NullProcess) -> Iterator[socket.socket]:
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        sock.sendall(frames.PREFACE + frames.frame(frames.SETTINGS, 0, 0))
        yield sock


def request(stream_id: int, *, tokens: int) -> bytes:
    message = GenerateRequest(request_id=f"r{stream_id}", max_tokens=tokens).SerializeToString()
    body = b"\x00" + frames.UINT32.pack(len(message)) + message
    return frames.frame(frames.HEADERS, frames.END_HEADERS, stream_id, b"\x83\x86") + frames.frame(
        frames.DATA, frames.END_STREAM, stream_id, body
    )


_left: dict[int, bytes] = {}


def read_until_end(sock: socket.socket, stream_id: int) -> list[tuple[int, int, int, bytes]]:
    """Frames up to the end of the stream; what was read beyond is kept for the next call."""
    found: list[tuple[int, int, int, bytes]] = []
    data = _left.pop(sock.fileno(), b"")
    while True:
        position = 0
        while len(data) - position >= 9:
            high, low, kind, flags, stream = frames.HEAD.unpack_from(data, position)
            end = position + 9 + (high << 16 | low)
            if end > len(data):
                break
            found.append((kind, flags, stream, data[position + 9 : end]))
            position = end
            if stream == stream_id and kind == frames.HEADERS and flags & frames.END_STREAM:
                _left[sock.fileno()] = data[position:]
                return found
        got = sock.recv(65_536)
        assert got, "the server closed the connection"
        data = data[position:] + got
