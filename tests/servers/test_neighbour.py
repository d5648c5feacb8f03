"""What a neighbour holds, how long it computes and what it sends, on the CPU; a card is pressed by the same code."""

import io
import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent import futures

import grpc
import pytest
import torch

from loadtests.bed.family import stat_of
from servers import neighbour
from servers.neighbour import Compute, Demand, Memory, Neighbour, Tenant
from servers.rpc import inference_pb2, inference_pb2_grpc

CPU = torch.device("cpu")
GIB = 1 << 30


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    def of(total: int, available: int) -> None:
        monkeypatch.setattr(neighbour, "host_memory", lambda: (total, available))

    return of


def resident_bytes() -> int:
    return stat_of(os.getpid()).pages * os.sysconf("SC_PAGE_SIZE")


def test_a_share_of_the_memory_is_held_to_the_byte_and_given_back(host: Callable[[int, int], None]) -> None:
    host(GIB, GIB)
    memory = Memory(CPU)
    before = resident_bytes()
    assert memory.hold(0.2) == ""
    assert memory.held_bytes == int(0.2 * GIB)
    assert resident_bytes() - before > 0.18 * GIB  # touched, not only asked for
    for share in (0.05, 0.1, 0.0):
        assert memory.hold(share) == ""
        assert memory.held_bytes == int(share * GIB)


def test_the_last_of_a_hosts_memory_stays_free_and_what_is_missing_is_said(host: Callable[[int, int], None]) -> None:
    host(GIB, GIB // 20 + (10 << 20))
    memory = Memory(CPU)
    assert memory.hold(0.2) == "holds 0.0 GiB of 0.2 GiB asked for: the last 5% of the host's memory stay free"
    assert memory.held_bytes == 0


def test_a_full_device_holds_what_it_has_and_says_what_is_missing(
    host: Callable[[int, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    host(GIB, GIB)
    made, ones = [], torch.ones

    def scarce(*arguments: object, **options: object) -> torch.Tensor:
        if len(made) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate.\nmore")
        made.append(1)
        return ones(*arguments, **options)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(torch, "ones", scarce)
    memory = Memory(CPU)
    assert memory.hold(0.5) == "holds 0.1 GiB of 0.5 GiB asked for: CUDA out of memory. Tried to allocate."
    assert memory.held_bytes == 128 << 20


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_products_take_their_share_of_the_time(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    compute = Compute(CPU)
    monkeypatch.setattr(compute, "_products", lambda: clock.__setitem__(0, clock[0] + 0.0007))
    for _ in range(1000):
        compute.period(share)
    assert compute.busy_s / clock[0] == pytest.approx(share, abs=0.02)


def test_a_change_says_what_the_last_came_to_and_what_is_on_now(host: Callable[[int, int], None]) -> None:
    host(GIB, GIB)
    pressing = Neighbour(CPU, None)
    began = pressing.change(Demand(memory_share=0.1, compute_share=0.5))
    assert (began["memory_bytes"], began["error"]) == (int(0.1 * GIB), None)
    for _ in range(5):
        pressing.work()
    ended = pressing.change(Demand())
    assert ended["memory_bytes"] == 0
    assert 0.0 < ended["had"]["compute_share"] <= 1.0  # type: ignore[index]
    assert began["began_ns"] < ended["ended_ns"] <= ended["began_ns"]  # type: ignore[operator]


class Server(inference_pb2_grpc.InferenceServicer):
    def __init__(self, *, fails: bool) -> None:
        self.fails = fails
        self.requests: list[inference_pb2.GenerateRequest] = []

    def Generate(  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.GenerateChunk]:
        self.requests.append(request)
        if self.fails:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")
        yield inference_pb2.GenerateChunk(token_ids=[5])


@pytest.mark.parametrize("fails", [False, True])
def test_a_tenant_gets_requests_of_one_size_until_it_gets_none(fails: bool) -> None:
    serving, server = Server(fails=fails), grpc.server(futures.ThreadPoolExecutor(4))
    inference_pb2_grpc.add_InferenceServicer_to_server(serving, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        tenant = Tenant(f"127.0.0.1:{port}", prompt_tokens=7, tokens=3)
        assert tenant.at(100.0) == {"answered": 0, "failed": 0, "left_out": 0}
        deadline = time.monotonic() + 20.0
        while sum(tenant.counts.values()) < 5 and time.monotonic() < deadline:
            pass
        counts = tenant.at(0.0)
        assert counts["failed" if fails else "answered"] >= 5
        assert counts["answered" if fails else "failed"] == 0
        sizes = {(len(request.token_ids.ids), request.max_tokens, request.ignore_eos) for request in serving.requests}
        assert sizes == {(7, 3, True)}
        assert serving.requests[0].token_ids.ids != serving.requests[1].token_ids.ids
    finally:
        server.stop(0)


@pytest.fixture
def as_it_is(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The test process keeps its threads, and its place among those that the kernel would end."""
    threads = torch.get_num_threads()
    monkeypatch.setattr(neighbour, "_be_the_first_to_go", lambda: None)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("as_it_is")
def test_the_program_answers_each_demand_and_ends_with_its_stdin(
    host: Callable[[int, int], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    host(GIB, GIB)
    monkeypatch.setattr("sys.stdin", io.StringIO('{"memory_share": 0.01, "compute_share": 0.1}\n{}\n'))
    assert neighbour.main(["--device", "cpu"]) == 0
    ready, began, ended = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert ready == {"ready": True, "device": "cpu"}
    assert (began["memory_bytes"], ended["memory_bytes"]) == (int(0.01 * GIB), 0)


@pytest.mark.usefixtures("as_it_is")
def test_a_device_that_is_not_there_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert neighbour.main(["--device", "cuda:0"]) == 1
    assert "torch sees no GPU" in json.loads(capsys.readouterr().out)["error"]
