"""The client against a strict HTTP/2 peer (h2 on a thread) and against a real gRPC server in a process of its own.

gevent runs here without patching anything: the client uses gevent's sockets directly.
"""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Iterator

import gevent
import h2.settings
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtests.clients.call import Call
from loadtests.clients.inference import InferenceClient
from loadtests.clients.metadata import encode_metadata
from loadtests.external.addresses import parse_target
from servers.fields import ConfigError
from servers.rpc.inference_pb2 import GenerateRequest
from tests.fakes.generating import generate, keeping_client, read_slowly, until
from tests.fakes.http2 import Exchange, Peer, chunk
from tests.fakes.inference import Behaviour, ServedFake, serve
from tests.fakes.patience import PATIENCE_S


def request(tokens: int = 3, prompt: int = 4) -> GenerateRequest:
    message = GenerateRequest(request_id="r", max_tokens=tokens)
    message.token_ids.ids.extend(range(3, 3 + prompt))
    return message


def finished(call: Call) -> Call:
    assert call.wait(PATIENCE_S), "the call did not end"
    return call


def test_tokens_and_metadata_of_a_good_answer_arrive() -> None:
    def answer(exchange: Exchange) -> None:
        exchange.start(extra=[("x-tailgate-arm", "eager")])
        for number in range(3):
            exchange.data(chunk([number]))
        exchange.trailers((("grpc-status", "0"), ("tailgate-replica", "eager-0")))

    with Peer(answer) as peer:
        client = keeping_client(peer.target)
        call = generate(client, request(), metadata=[("x-tailgate-arm", "eager")])
        received = [list(item.token_ids) for item in call]
        client.close()
    assert (received, call.status, call.error) == ([[0], [1], [2]], "OK", "")
    assert call.initial_metadata["x-tailgate-arm"] == "eager"
    assert call.trailing_metadata["tailgate-replica"] == "eager-0"
    assert call.sent_ns <= call.token_ns[0] == call.first_token_ns <= call.token_ns[-1] <= call.end_ns
    sent = peer.requests[0]
    assert sent.headers[":path"] == "/tailgate.v1.Inference/Generate"
    assert sent.headers["x-tailgate-arm"] == "eager"
    assert sent.headers["te"] == "trailers"
    assert GenerateRequest.FromString(sent.body[5:]) == request()
    assert not peer.problems


def test_token_times_are_stamped_at_arrival() -> None:
    late_ms, behind_ms = read_slowly()
    assert min(late_ms) >= 0
    assert behind_ms[-1] > 300
    assert max(late_ms) < behind_ms[-1] / 3


def test_coalesced_tokens_keep_the_servers_gaps_but_never_precede_the_chunk_before() -> None:
    ms = 1_000_000

    def answer(exchange: Exchange) -> None:
        exchange.start()
        exchange.data(chunk([1, 2], [0, 5 * ms]))
        time.sleep(0.05)
        exchange.data(chunk([3, 4, 5], [10 * ms, 20 * ms, 30 * ms]))
        exchange.data(chunk([6, 7], [40 * ms, 9_000 * ms]))
        exchange.trailers()

    with Peer(answer) as peer:
        client = InferenceClient(peer.target)
        times = finished(generate(client, request(7))).token_ns
        client.close()
    assert times[0] == times[1]  # both are new to the user when the first chunk comes
    assert (times[4] - times[3], times[3] - times[2]) == (10 * ms, 10 * ms)
    assert times[5] == times[4]  # 8.96 s before its chunk would be long before the chunk before it
    assert list(times) == sorted(times)


def test_trailers_only_reply_carries_status_and_message() -> None:
    def answer(exchange: Exchange) -> None:
        fields = [
            ("grpc-status", "8"),
            ("grpc-message", "queue full: 100%25 of 128%0A\u2014 retry".replace("\u2014", "%E2%80%94")),
        ]
        exchange.start(extra=fields, end=True)

    with Peer(answer) as peer:
        client = InferenceClient(peer.target)
        call = finished(generate(client, request()))
        client.close()
    assert call.status == "RESOURCE_EXHAUSTED"
    assert call.error == "queue full: 100% of 128 — retry"
    assert (call.first_token_ns, call.output_tokens) == (None, 0)


@pytest.mark.parametrize(
    ("http_status", "status"),
    [("503", "UNAVAILABLE"), ("404", "UNIMPLEMENTED"), ("418", "UNKNOWN"), ("200", "UNKNOWN")],
)
def test_reply_without_grpc_status_maps_from_http(http_status: str, status: str) -> None:
    with Peer(lambda exchange: exchange.start(http_status, end=True)) as peer:
        client = InferenceClient(peer.target)
        assert finished(generate(client, request())).status == status
        client.close()


@pytest.fixture(scope="module")
def cutting_peer() -> Iterator[tuple[Peer, InferenceClient, dict[str, object]]]:
    script: dict[str, object] = {}

    def answer(exchange: Exchange) -> None:
        exchange.link.slice_bytes = script["slice"]  # type: ignore[assignment]
        exchange.start()
        for piece in script["pieces"]:  # type: ignore[attr-defined]
            exchange.data(piece)
        exchange.trailers()

    with Peer(answer) as peer:
        client = keeping_client(peer.target)
        yield peer, client, script
        client.close()


@settings(max_examples=60)
@given(
    chunks=st.lists(st.lists(st.integers(0, 50_000), max_size=5), min_size=1, max_size=12),
    cuts=st.lists(st.floats(0, 1), max_size=20),
    slice_bytes=st.sampled_from([0, 1, 3, 8, 9, 10, 64]),
)
def test_message_split_across_data_frames(
    cutting_peer: tuple[Peer, InferenceClient, dict[str, object]],
    chunks: list[list[int]],
    cuts: list[float],
    slice_bytes: int,
) -> None:
    peer, client, script = cutting_peer
    stream = b"".join(chunk(ids) for ids in chunks)
    edges = [0, *sorted(int(cut * len(stream)) for cut in cuts), len(stream)]
    script["pieces"] = [stream[start:end] for start, end in itertools.pairwise(edges)]
    script["slice"] = slice_bytes
    call = generate(client, request())
    received = [list(item.token_ids) for item in call]
    assert received == chunks
    assert call.status == "OK"
    assert call.output_tokens == sum(map(len, chunks))
    assert not peer.problems


def test_stream_cut_inside_a_message_is_not_ok() -> None:
    def answer(exchange: Exchange) -> None:
        exchange.start()
        exchange.data(chunk([1, 2, 3])[:-1])
        exchange.trailers()

    with Peer(answer) as peer:
        client = InferenceClient(peer.target)
        call = finished(generate(client, request()))
        client.close()
    assert call.status == "INTERNAL"
    assert "inside a message" in call.error


def test_header_block_over_one_frame_is_put_together() -> None:
    long = [(f"tailgate-note-{number}", "v" * 9_000) for number in range(4)]

    def answer(exchange: Exchange) -> None:
        exchange.answer(chunk([1]), trailers=[("grpc-status", "0"), *long])

    with Peer(answer) as peer:
        client = InferenceClient(peer.target)
        call = finished(generate(client, request()))
        after = finished(generate(client, request()))  # the compression state survived
        client.close()
    assert call.trailing_metadata["tailgate-note-3"] == "v" * 9_000
    assert (call.status, after.status) == ("OK", "OK")


def test_request_header_block_over_one_frame_is_split() -> None:
    with Peer(lambda exchange: exchange.answer(chunk([1]))) as peer:
        client = InferenceClient(peer.target)
        call = finished(generate(client, request(), metadata=[("x-note", "v" * 40_000)]))
        client.close()
    assert call.status == "OK", peer.problems
    assert peer.requests[0].headers["x-note"] == "v" * 40_000


def test_cancel_resets_stream() -> None:
    with Peer(lambda exchange: exchange.start()) as peer:
        client = InferenceClient(peer.target)
        call = generate(client, request())
        until(lambda: peer.requests)
        call.cancel()
        assert (call.status, call.error) == ("CANCELLED", "cancelled by the client")
        until(peer.reset_seen.is_set)
        client.close()
    assert peer.links[0].resets == [(1, 8)]


def test_deadline_is_sent_and_enforced() -> None:
    with Peer(lambda exchange: exchange.start()) as peer:
        client = InferenceClient(peer.target)
        call = finished(generate(client, request(), timeout_s=0.15))
        until(peer.reset_seen.is_set)
        client.close()
    assert call.status == "DEADLINE_EXCEEDED"
    assert 0.14 <= (call.end_ns - call.start_ns) / 1e9 < 2
    sent = peer.requests[0].headers["grpc-timeout"]
    assert sent.endswith("m")
    assert 1 <= int(sent[:-1]) <= 150


@pytest.mark.parametrize(
    ("code", "status"),
    [(7, "UNAVAILABLE"), (8, "CANCELLED"), (11, "RESOURCE_EXHAUSTED"), (12, "PERMISSION_DENIED"), (2, "INTERNAL")],
)
def test_reset_by_the_server_becomes_a_status(code: int, status: str) -> None:
    def answer(exchange: Exchange) -> None:
        exchange.start()
        exchange.link.state.reset_stream(exchange.stream_id, code)
        exchange.link.flush()

    with Peer(answer) as peer:
        client = InferenceClient(peer.target)
        call = finished(generate(client, request()))
        client.close()
    assert call.status == status
    assert f"error {code}" in call.error


def test_goaway_moves_to_new_connection() -> None:
    """Streams that the server saw end where they are; those it did not see, and later calls, go elsewhere."""

    def answer(exchange: Exchange) -> None:
        if len(peer.links) == 1:
            if exchange.stream_id == 1:
                exchange.start()
                exchange.data(chunk([1]))
            else:
                exchange.link.state.close_connection(last_stream_id=1)
                exchange.link.flush()
                # h2 sends nothing after GOAWAY; a real server does, so finish stream 1 with bytes of our own.
                trailers = b"\x00\x0bgrpc-status\x010"
                frame = len(trailers).to_bytes(3, "big") + b"\x01\x05" + (1).to_bytes(4, "big") + trailers
                exchange.link.sock.sendall(frame)
        else:
            exchange.answer(chunk([2]))

    with Peer(answer) as peer:
        client = InferenceClient(peer.target)
        first = generate(client, request())
        until(lambda: peer.requests)
        second = generate(client, request())
        assert (finished(first).status, finished(second).status) == ("OK", "OK")
        third = finished(generate(client, request()))
        client.close()
    assert third.status == "OK"
    assert first.trailing_metadata == {"grpc-status": "0"}
    assert len(peer.links) == 2


def test_lost_connection_ends_calls_and_the_next_call_reconnects() -> None:
    def answer(exchange: Exchange) -> None:
        if len(peer.links) == 1:
            exchange.start()
            exchange.link.sock.shutdown(socket.SHUT_RDWR)
        else:
            exchange.answer(chunk([1]))

    with Peer(answer) as peer:
        client = InferenceClient(peer.target)
        lost = finished(generate(client, request()))
        again = finished(generate(client, request()))
        client.close()
    assert lost.status == "UNAVAILABLE"
    assert "closed the connection" in lost.error
    assert again.status == "OK"


def test_refused_connection_is_a_status_and_heals_when_the_server_comes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    client = InferenceClient(f"127.0.0.1:{port}", retry_s=0.05)
    calls = [generate(client, request()) for _ in range(200)]
    assert {finished(call).status for call in calls} == {"UNAVAILABLE"}
    assert f"127.0.0.1:{port}" in calls[0].error
    assert "refused" in calls[0].error
    with serve(Behaviour(), port=port):
        gevent.sleep(0.06)
        assert finished(generate(client, request(), timeout_s=5)).status == "OK"
    client.close()


def test_server_that_speaks_no_http2_is_named_as_such() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            sock, _ = listener.accept()
            sock.recv(10)
            sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            sock.recv(10_000)
            sock.close()

        threading.Thread(target=answer, daemon=True).start()
        client = InferenceClient(f"127.0.0.1:{listener.getsockname()[1]}")
        call = finished(generate(client, request()))
        client.close()
    assert call.status == "UNAVAILABLE"
    assert "HTTP/1.1" in call.error


@pytest.mark.parametrize("connections", [1, 2])
def test_stream_limit_is_respected(connections: int) -> None:
    def answer(exchange: Exchange) -> None:
        exchange.start()

        def end() -> None:
            time.sleep(0.02)
            with lock:
                exchange.link.open.pop(exchange.stream_id, None)
                exchange.trailers()

        threading.Thread(target=end, daemon=True).start()

    lock = threading.Lock()
    with Peer(answer, {h2.settings.SettingCodes.MAX_CONCURRENT_STREAMS: 1}) as peer:
        client = InferenceClient(peer.target, max_connections=connections)
        calls = [generate(client, request()) for _ in range(9)]
        assert {finished(call).status for call in calls} == {"OK"}
        client.close()
    assert len(peer.links) == connections
    assert [link.most_open for link in peer.links] == [1] * connections
    assert not peer.problems


def test_call_that_waits_for_a_stream_keeps_its_deadline() -> None:
    with Peer(lambda exchange: exchange.start(), {h2.settings.SettingCodes.MAX_CONCURRENT_STREAMS: 1}) as peer:
        client = InferenceClient(peer.target, max_connections=1)
        generate(client, request())
        waiting = finished(generate(client, request(), timeout_s=0.1))
        client.close()
    assert waiting.status == "DEADLINE_EXCEEDED"
    assert len(peer.requests) == 1


def test_large_request_follows_the_peers_window() -> None:
    with Peer(lambda exchange: exchange.answer(chunk([1]))) as peer:
        client = InferenceClient(peer.target)
        big = request(prompt=120_000)
        calls = [generate(client, big), generate(client, request()), generate(client, big)]
        statuses = [finished(call).status for call in calls]
        client.close()
    assert statuses == ["OK"] * 3, peer.problems  # h2 raises when a window is overrun
    assert sorted(len(item.body) for item in peer.requests)[1] > 4 * 65_535
    assert GenerateRequest.FromString(peer.requests[-1].body[5:]) == big


def test_answer_larger_than_the_window_keeps_flowing() -> None:
    chunks = [list(range(200))] * 1_000

    def answer(exchange: Exchange) -> None:
        exchange.start()
        exchange.all_data(b"".join(map(chunk, chunks)))

    with Peer(answer) as peer:
        client = InferenceClient(peer.target, stream_window=20_000, connection_window=65_535)
        call = finished(generate(client, request()))
        client.close()
    assert (call.status, call.output_tokens) == ("OK", 200_000)
    assert peer.links[0].window_updates > 10


def test_ping_is_answered() -> None:
    def answer(exchange: Exchange) -> None:
        exchange.link.state.ping(b"12345678")
        exchange.answer(chunk([1]))

    with Peer(answer) as peer:
        client = InferenceClient(peer.target)
        assert finished(generate(client, request())).status == "OK"
        assert peer.ping_seen.wait(PATIENCE_S)
        client.close()


def test_close_cancels_what_is_running() -> None:
    ended: list[str] = []
    with Peer(lambda exchange: exchange.start()) as peer:
        client = InferenceClient(peer.target)
        body = request().SerializeToString()
        client.start(body, on_done=lambda call: ended.append(call.status))
        until(lambda: peer.requests)
        client.close()
        client.start(body, on_done=lambda call: ended.append(call.status))
    assert ended == ["CANCELLED", "UNAVAILABLE"]


@pytest.fixture(scope="module")
def grpc_server() -> Iterator[ServedFake]:
    with serve(Behaviour(token_s=0.005, max_prompt_tokens=100)) as served:
        yield served


def test_real_grpc_server_answers_many_streams_on_one_connection(grpc_server: ServedFake) -> None:
    client = InferenceClient(grpc_server.target)
    calls = [generate(client, request(4), timeout_s=PATIENCE_S) for _ in range(100)]
    assert {(finished(call).status, call.output_tokens) for call in calls} == {("OK", 4)}
    assert len(client.connections) == 1
    trailing = calls[0].trailing_metadata
    assert trailing["tailgate-output-tokens"] == "4"
    assert trailing["tailgate-replica"] == "eager-0"
    client.close()


def test_real_grpc_server_errors_come_with_their_message(grpc_server: ServedFake) -> None:
    client = InferenceClient(grpc_server.target)
    call = finished(generate(client, request(prompt=101)))
    client.close()
    assert (call.status, call.error) == ("INVALID_ARGUMENT", "prompt has 101 tokens; the limit is 100")


def test_real_grpc_server_knows_no_other_path(grpc_server: ServedFake) -> None:
    client = InferenceClient(grpc_server.target, path="/tailgate.v1.Inference/Nothing")
    call = finished(generate(client, request()))
    client.close()
    assert call.status == "UNIMPLEMENTED"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("localhost:50051", ("localhost", 50051)),
        ("http://10.0.0.1:80/", ("10.0.0.1", 80)),
        ("grpc://[::1]:9", ("::1", 9)),
        ("https://arms.example:443/", ("arms.example", 443)),
        ("grpcs://[::1]:9", ("::1", 9)),
    ],
)
def test_targets_are_understood(text: str, expected: tuple[str, int]) -> None:
    assert (parse_target(text).host, parse_target(text).port) == expected
    assert parse_target(text).tls is text.startswith(("https", "grpcs"))


@pytest.mark.parametrize(
    "text", ["", "localhost", "host:0", "host:70000", "https://host", "ftp://h:1", "h:1/path", "a b:1"]
)
def test_bad_target_is_one_clear_line(text: str) -> None:
    with pytest.raises(ConfigError, match=f'^target "{text.replace("[", ".")}" ') as caught:
        parse_target(text)
    assert "\n" not in str(caught.value)


def test_a_target_with_a_password_is_refused_without_being_repeated() -> None:
    with pytest.raises(ConfigError, match='carries a user or password before "@": leave it out') as caught:
        parse_target("https://me:s3cret@arms.example:443")
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"), [("Upper", "x"), ("", "x"), (":path", "x"), ("key", "a\nb"), ("key", "\u00e9")]
)
def test_metadata_that_http2_cannot_carry_is_refused(key: str, value: str) -> None:
    with pytest.raises(ValueError, match="metadata"):
        encode_metadata([(key, value)])
