from __future__ import annotations

import pytest
from hpack import Decoder
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import frames
from loadtests.clients.frames import HEAD, UINT32
from servers.rpc.inference_pb2 import GenerateChunk


def body_of(frame: bytes) -> bytes:
    high, low, _, _, _ = HEAD.unpack_from(frame)
    assert len(frame) == 9 + (high << 16 | low)
    return frame[9:]


def test_a_token_frame_is_one_generate_chunk() -> None:
    frame = frames.token_head(7, 42) + frames.FIXED64.pack(1_790_000_000_000_000_001)
    assert len(frame) == frames.TOKEN_BYTES
    payload = body_of(frame)
    assert len(payload) == frames.TOKEN_WINDOW
    assert payload[0] == 0
    assert UINT32.unpack_from(payload, 1)[0] == len(payload) - 5
    chunk = GenerateChunk.FromString(payload[5:])
    assert list(chunk.token_ids) == [42]
    assert list(chunk.emit_ns) == [1_790_000_000_000_000_001]


@pytest.mark.parametrize("huffman", [False, True])
@given(recv_ns=st.integers(0, 2**63 - 1), took_ns=st.integers(0, 10**12), tokens=st.integers(0, 10**9))
def test_trailers_say_what_a_tailgate_server_says(huffman: bool, recv_ns: int, took_ns: int, tokens: int) -> None:
    block = frames.Answers(huffman=huffman).trailers(tokens=tokens, recv_ns=recv_ns, end_ns=recv_ns + took_ns)
    fields = dict(Decoder().decode(block))
    assert fields["grpc-status"] == "0"
    assert fields["tailgate-output-tokens"] == str(tokens)
    assert fields["tailgate-recv-ns"] == str(recv_ns)
    assert fields["tailgate-end-ns"] == str(recv_ns + took_ns)
    assert sum(key.startswith("tailgate-") for key in fields) == 14


def test_huffman_saves_bytes() -> None:
    plain, packed = (
        frames.Answers(huffman=huffman).trailers(tokens=1, recv_ns=2, end_ns=3) for huffman in (False, True)
    )
    assert len(packed) < 0.8 * len(plain)
