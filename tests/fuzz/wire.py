"""Readers of what comes over a wire: HTTP/2 and its headers, answers of servers, telemetry, the splitter's pages."""

from __future__ import annotations

import json
import random
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gevent
import gevent.socket
from google.protobuf.message import DecodeError
from hpack import Encoder

from tailgate.loadtests.clients.call import Call
from tailgate.loadtests.clients.connection import Connection
from tailgate.loadtests.clients.frames import ProtocolError
from tailgate.loadtests.clients.grpc_call import EmbedCall, GrpcCall
from tailgate.loadtests.clients.headers import HeaderDecoder, HeaderError
from tailgate.loadtests.clients.inference import InferenceClient
from tailgate.loadtests.clients.openai import OpenAiCall, exchange
from tailgate.loadtests.clients.route import OipCall
from tailgate.loadtests.external.arms import OipOptions
from tailgate.loadtests.generator.outcome import record_of
from tailgate.loadtests.generator.record import request_batch
from tailgate.loadtests.trials.status import ReplicaState, Status
from tailgate.loadtests.trials.telemetry import Collector, _Follower
from tailgate.loadtests.users.observer import Observer
from tailgate.servers.clock import now_ns
from tailgate.servers.complaint import LONGEST
from tailgate.servers.metadata import FIGURES, STATUS_NAMES, trailing_key
from tailgate.servers.rpc import telemetry_pb2
from tailgate.servers.rpc.inference_pb2 import EmbedResponse
from tailgate.servers.rpc.oip_pb2 import ModelInferResponse, ModelStreamInferResponse
from tests.fakes import http2
from tests.fakes.http2 import chunk, frame, grpc_message
from tests.fuzz.oracle import Reader, pieces

_LARGEST_BLOCK = 256 * 1024
_OIP_CALL = partial(OipCall, options=OipOptions())
_TRAILERS = [("grpc-status", "0"), ("grpc-message", "all%20well"), ("tailgate-arm", "eager")] + [
    (trailing_key(name), str(7 + place)) for place, name in enumerate(FIGURES)
]
_ANSWER = [(":status", "200"), ("content-type", "application/grpc"), ("x-tailgate-arm", "eager")]


def _blocks(folder: Path) -> list[bytes]:
    """Return blocks in every form of HPACK: coded and plain, indexed and not, with changes of the table size."""
    blocks = [Encoder().encode(fields, huffman=coded) for fields in (_ANSWER, _TRAILERS) for coded in (True, False)]
    coder = Encoder()
    twice = coder.encode(_TRAILERS) + coder.encode(_TRAILERS)
    coder = Encoder()
    coder.header_table_size = 100
    return [*blocks, twice, coder.encode(_ANSWER), http2.literals(*_TRAILERS), b"\x00\x01a\x00" * 50]


def _headers(folder: Path, content: bytes, draws: random.Random) -> None:
    decoder = HeaderDecoder(largest_list=_LARGEST_BLOCK)
    for block in pieces(content[:_LARGEST_BLOCK], draws):
        fields = decoder.decode(block)
        assert sum(len(name) + len(value) + 32 for name, value in decoder.table.dynamic_entries) <= 4096
        assert sum(len(name) + len(value) for name, value in fields.items()) <= 8 * _LARGEST_BLOCK


def _records(call: Call) -> None:
    """Check that the row of the call can be written, and holds its end in one line."""
    assert call.status in STATUS_NAMES, call.status
    assert len(call.error) <= LONGEST + 100, f"an error of {len(call.error)} characters"
    assert call.error.isprintable(), call.error[:200]
    plan = SimpleNamespace(prompt_tokens=4, max_tokens=8, phase="measure")
    call.tag = SimpleNamespace(
        plan=plan, arm="eager", request_id="1-0", pair_id="1-0", endpoint=None, scheduled_ns=call.start_ns
    )
    request_batch([record_of(call, 1)]).validate(full=True)


@contextmanager
def _connected() -> Iterator[tuple[Connection, list[GrpcCall]]]:
    """Yield a connection with three open calls, whose bytes come by hand."""
    here, there = socket.socketpair()
    client = InferenceClient("127.0.0.1:9", retry_s=60.0)
    client._refused_until_ns = now_ns() + 10**12  # reconnecting fails at once
    sock = gevent.socket.socket(fileno=here.detach())
    sock.setblocking(False)
    lost: list[BaseException] = []  # what greenlets and callbacks raise
    hub = gevent.get_hub()
    hub.handle_error = lambda context, kind, value, trace: lost.append(value)
    try:
        connection = Connection(client, sock)
        client.connections.append(connection)
        given: dict[str, Any] = {"headers": b"", "timeout_s": None, "on_done": None, "tag": None}
        calls = [GrpcCall(body=b"body" * size, **given) for size in (1, 9, 50_000)]
        for call in calls:
            connection.open(call)
        yield connection, calls
    finally:
        connection.close("CANCELLED", "the end of the test")
        client.close()
        gevent.sleep(0)
        connection.reader.join(1.0)
        there.close()
        del hub.handle_error
        if lost:
            raise lost[0]


def _frames(folder: Path, content: bytes, draws: random.Random) -> None:
    with _connected() as (connection, calls):
        try:
            for piece in pieces(content, draws):
                if connection.closed:
                    break
                connection.feed(piece, now_ns())
                gevent.sleep(0)
        except ProtocolError as problem:
            connection.close("UNAVAILABLE", str(problem))
            raise
        finally:
            connection.close("UNAVAILABLE", "the end of the input")
            for call in calls:
                _records(call)


def _answers(folder: Path) -> list[bytes]:
    coder = Encoder()
    start = frame(http2.SETTINGS, 0, 0, struct.pack(">HIHI", 3, 100, 4, 65_535)) + frame(http2.SETTINGS, http2.ACK, 0)

    def answer(stream: int) -> bytes:
        whole = chunk([1]) + chunk([2, 3], [1_000, 2_000]) + chunk([])
        head = frame(http2.HEADERS, http2.END_HEADERS, stream, coder.encode(_ANSWER))
        data = frame(http2.DATA, 0, stream, whole[:7])
        data += frame(http2.DATA, http2.PADDED, stream, b"\x03" + whole[7:] + b"\x00" * 3)
        ends = http2.END_HEADERS | http2.END_STREAM
        return head + data + frame(http2.HEADERS, ends, stream, coder.encode(_TRAILERS))

    one = start + answer(1)
    block = coder.encode(_ANSWER)
    cut = frame(http2.HEADERS, 0, 3, block[:4]) + frame(http2.CONTINUATION, http2.END_HEADERS, 3, block[4:])
    for stream, size in ((0, 70_000), (5, 9)):
        cut += frame(http2.WINDOW_UPDATE, 0, stream, struct.pack(">I", size))
    rest = cut + frame(http2.PING, 0, 0, b"12345678") + frame(http2.RST_STREAM, 0, 3, struct.pack(">I", 7)) + answer(5)
    away = frame(http2.GOAWAY, 0, 0, struct.pack(">II", 1, 11) + b"too_many_pings")
    coder = Encoder()
    return [one, one + rest, one + rest + away, start + away + answer(1)]


def _trailers(folder: Path, content: bytes, draws: random.Random) -> None:
    """Trailing metadata hold anything."""
    call = GrpcCall(headers=b"", body=b"", timeout_s=None, on_done=None, tag=None)
    call.on_headers(dict(_ANSWER), False, now_ns())
    call.on_data(chunk([1]), now_ns())
    lines = (line.partition(": ") for line in content[:_LARGEST_BLOCK].decode("latin-1").split("\n"))
    call.on_headers({name: value for name, _, value in lines}, True, now_ns())
    _records(call)


def _answered(call_of: Callable[..., GrpcCall], folder: Path, content: bytes, draws: random.Random) -> None:
    """Take the content as the messages of an answer."""
    call = call_of(headers=b"", body=b"", timeout_s=None, on_done=None, tag=None)
    call.on_headers(dict(_ANSWER), False, now_ns())
    for piece in pieces(content, draws):
        if not call.status:
            call.on_data(piece, now_ns())
    if not call.status:
        call.on_headers(dict(_TRAILERS), True, now_ns())
    _records(call)


def _infer_answers(folder: Path) -> list[bytes]:
    text, raw = ModelInferResponse(id="1"), ModelInferResponse(id="2")
    text.outputs.add(name="text_output", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"a word")
    raw.outputs.add(name="text_output", datatype="BYTES", shape=[2])
    raw.raw_output_contents.append(b"\x02\x00\x00\x00hi\x01\x00\x00\x00!")
    messages = [ModelStreamInferResponse(infer_response=item) for item in (text, raw)]
    messages.append(ModelStreamInferResponse(error_message="no\nmore"))
    return [grpc_message(item.SerializeToString()) for item in messages] + [
        b"".join(grpc_message(item.SerializeToString()) for item in messages)
    ]


def _openai(folder: Path, content: bytes, draws: random.Random) -> None:
    call = OpenAiCall(request=b"", token="secret")
    sock = SimpleNamespace(sendall=len, settimeout=bool, makefile=lambda mode: BytesIO(content))
    exchange(call, sock, reused=False)
    _records(call)


def _events(folder: Path) -> list[bytes]:
    events = [
        {"choices": [{"index": 0, "text": "a", "finish_reason": None}], "usage": {"completion_tokens": 1}},
        {"choices": [{"index": 0, "delta": {"content": "b"}}], "usage": {"completion_tokens": 3, "prompt_tokens": 4}},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
        {"choices": [], "usage": {"completion_tokens": 3, "prompt_tokens": 4}},
    ]
    error = {"error": {"message": "too\nlong", "code": 400}}
    body = "".join(f"data: {json.dumps(event)}\r\n\r\n" for event in events) + ": ping\n\ndata: [DONE]\n\n"
    head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
    size = f"{len(body):x}\r\n{body}\r\n0\r\n\r\n"
    refusal = json.dumps(error)
    return [
        f"{head}content-length: {len(body)}\r\n\r\n{body}".encode(),
        f"{head}transfer-encoding: chunked\r\n\r\n{size}".encode(),
        f"HTTP/1.1 400 Bad Request\r\ncontent-length: {len(refusal)}\r\n\r\n{refusal}".encode(),
        f"{head}\r\ndata: {refusal}\n\n".encode(),
        b"HTTP/1.1 307 Moved\r\nlocation: https://x/\r\ncontent-length: 0\r\n\r\n",
    ]


def _telemetry_seeds(folder: Path) -> list[bytes]:
    compiled = telemetry_pb2.CompileEvent(
        event_id="1", kind="recompile", start_ns=5, end_ns=9, shape="4x16", phase="serving", request_ids=["1-0"]
    )
    step = telemetry_pb2.StepRecord(step_id=1, kind="decode", start_ns=2, end_ns=8, batch=3, padded_batch=4)
    event = telemetry_pb2.TelemetryEvent
    events = [
        event(compile=compiled),
        event(steps=telemetry_pb2.StepRecords(records=[step, step])),
        event(progress=telemetry_pb2.Progress(stage="serving", detail="warm", done=1, total=1, at_ns=4)),
        event(memory=telemetry_pb2.MemoryReading(at_ns=7)),
        event(under_way=telemetry_pb2.CompileUnderWay(kind="compile", start_ns=3, shape="1x8", phase="serving")),
    ]
    return [item.SerializeToString() for item in events]


def _telemetry(folder: Path, content: bytes, draws: random.Random) -> None:
    with suppress(DecodeError):
        event = telemetry_pb2.TelemetryEvent.FromString(content)
        for path in folder.glob("*.arrow*"):
            path.unlink()
        status = Status()
        status.replicas["eager-0"] = ReplicaState()
        collector = Collector(folder, trial=1, status=status)
        try:
            collector._take(_Follower(arm="eager", replica="eager-0", channel=None, state=ReplicaState()), event)
            collector._flush()
        finally:
            collector.stop()


_SINCE_NS = 1_800_000_000_000_000_000


def _log(folder: Path) -> list[bytes]:
    common = {"connection": 4, "session": "s1", "host": "127.0.0.1:1"}
    common["path"] = "/tailgate.v1.Inference/Generate"
    rows: list[dict[str, Any]] = []
    for second in range(2):
        start = {**common, "start_s": f"{1_800_000_000 + second}.{second:09d}", "duration_ms": 100}
        rows.append({**start, "event": "DownstreamStart", "arm": None})
        figures = {name: str(place) for place, name in enumerate(FIGURES)}
        ended = {"event": "DownstreamEnd", "arm": "eager", "first_ns": 20_000_000, "end_ns": 100_000_000}
        rows.append({**start, **ended, "status": second, "message": "why", "flags": "-", "figures": figures})
    return ["".join(json.dumps(row) + "\n" for row in rows).encode()]


def _observed(folder: Path, content: bytes, draws: random.Random) -> None:
    for path in folder.glob("*-0*"):
        path.unlink()
    log = folder / "requests.log"
    log.write_bytes(content)
    arms = {"eager": {"127.0.0.1:1": "eager-0"}, "compiled": {}}
    observer = Observer(folder, log=log, admin=None, arms=arms, timeout_s=60.0, since_ns=_SINCE_NS)
    observer.step(_SINCE_NS + 10**10)
    observer.close(_SINCE_NS + 10**10)


WIRE = (
    Reader(name="headers", seeds=_blocks, read=_headers, refuses=(HeaderError,)),
    Reader(name="http2", seeds=_answers, read=_frames, refuses=(ProtocolError,)),
    Reader(
        name="trailing metadata",
        seeds=lambda folder: ["\n".join(map(": ".join, _TRAILERS)).encode()],
        read=_trailers,
    ),
    Reader(name="oip", seeds=_infer_answers, read=partial(_answered, _OIP_CALL), most_mib=160),
    Reader(
        name="embedding",
        seeds=lambda folder: [grpc_message(EmbedResponse(values=[0.5] * 8, tokens=4).SerializeToString())],
        read=partial(_answered, EmbedCall),
    ),
    Reader(name="openai", seeds=_events, read=_openai),
    Reader(name="telemetry", seeds=_telemetry_seeds, read=_telemetry),
    Reader(name="request log", seeds=_log, read=_observed),
)
