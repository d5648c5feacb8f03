"""What a Generate server without a library sends: token frames and header blocks as bytes. Pure."""

from __future__ import annotations

import struct
from typing import Final

from loadtests.clients.frames import DATA, END_HEADERS, END_STREAM, HEAD, HEADERS, UINT32, frame

FIXED64 = struct.Struct("<Q")


def text(value: bytes) -> bytes:
    """A header's name or value of at most 126 bytes, not Huffman coded, as gRPC writes it (RFC 7541, section 5.2)."""
    return bytes((len(value),)) + value


def literal(name: bytes, value: bytes) -> bytes:
    """One header that leaves no trace in the peer's table (RFC 7541, section 6.2.2)."""
    return b"\x00" + text(name) + text(value)


def token_head(stream_id: int, token: int) -> bytes:
    """All of a DATA frame with one token below 128 but its last 8 bytes, which are emit_ns as FIXED64."""
    # GenerateChunk: token_ids (field 1, packed varint), emit_ns (field 2, packed fixed64)
    message = bytes((0x0A, 1, token, 0x12, 8))
    size = len(message) + FIXED64.size
    return HEAD.pack(0, 5 + size, DATA, 0, stream_id) + b"\x00" + UINT32.pack(size) + message


# What stands in the trailers of every answer alike.
_TRAILERS: Final = {
    b"grpc-status": b"0",
    b"grpc-message": b"",
    b"tailgate-arm": b"null",
    b"tailgate-replica": b"null-0",
    b"tailgate-queue-ns": b"184203",
    b"tailgate-prefill-ns": b"2048113",
    b"tailgate-decode-ns": b"91820441",
    b"tailgate-compile-stall-ns": b"0",
    b"tailgate-batch-id": b"48213",
    b"tailgate-batch-size": b"7",
    b"tailgate-padded-batch": b"8",
    b"tailgate-padded-length": b"512",
    b"tailgate-prompt-tokens": b"16",
}


class Answers:
    """Response headers and trailers of gRPC answers whose trailing metadata are those of a tailgate server."""

    def __init__(self) -> None:
        # static table: ":status: 200"
        self._head = b"\x88" + literal(b"content-type", b"application/grpc")
        self._open = frame(HEADERS, END_HEADERS, 0, self._head)[:5]  # all but the stream
        self._alike = b"".join(literal(name, value) for name, value in _TRAILERS.items())
        self._tokens, self._recv, self._end = (
            b"\x00" + text(name) for name in (b"tailgate-output-tokens", b"tailgate-recv-ns", b"tailgate-end-ns")
        )

    def opening(self, stream_id: int) -> bytes:
        """The response headers of a stream."""
        return self._open + UINT32.pack(stream_id) + self._head

    def ending(self, stream_id: int, *, tokens: int, recv_ns: int, end_ns: int) -> bytes:
        """The trailers that end a good answer."""
        count, recv, end = text(b"%d" % tokens), text(b"%d" % recv_ns), text(b"%d" % end_ns)
        block = b"".join((self._alike, self._tokens, count, self._recv, recv, self._end, end))
        return frame(HEADERS, END_HEADERS | END_STREAM, stream_id, block)

    def healthy(self, stream_id: int) -> bytes:
        """A whole answer of grpc.health.v1: SERVING."""
        message = b"\x00" + UINT32.pack(2) + b"\x08\x01"
        end = frame(HEADERS, END_HEADERS | END_STREAM, stream_id, literal(b"grpc-status", b"0"))
        return self.opening(stream_id) + frame(DATA, 0, stream_id, message) + end
