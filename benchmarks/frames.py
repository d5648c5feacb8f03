"""The bytes of HTTP/2 and gRPC that a server without a library sends: frames, literal headers, token messages. Pure."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final

from hpack.huffman import HuffmanEncoder
from hpack.huffman_constants import REQUEST_CODES, REQUEST_CODES_LENGTH

# RFC 9113, section 6.
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, ACK, END_HEADERS, PADDED, PRIORITY_FLAG = 0x1, 0x1, 0x4, 0x8, 0x20
MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE = 0x3, 0x4
PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DEFAULT_WINDOW: Final = 65_535
LARGEST_WINDOW: Final = 2**31 - 1

HEAD = struct.Struct(">BHBBI")
UINT32 = struct.Struct(">I")
SETTING = struct.Struct(">HI")
FIXED64 = struct.Struct("<Q")

_huffman = HuffmanEncoder(REQUEST_CODES, REQUEST_CODES_LENGTH)


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """One HTTP/2 frame."""
    size = len(payload)
    return HEAD.pack(size >> 16, size & 0xFFFF, kind, flags, stream_id) + payload


def text(value: bytes, *, huffman: bool) -> bytes:
    """A header's name or value as HPACK writes it (RFC 7541, section 5.2); below 127 bytes, Huffman when it is asked.

    gRPC's own library writes metadata without Huffman coding, a proxy such as Envoy writes it with.
    """
    if huffman:
        packed = bytes(_huffman.encode(value))
        if len(packed) < len(value):
            return bytes((0x80 | _short(packed),)) + packed
    return bytes((_short(value),)) + value


def _short(value: bytes) -> int:
    if len(value) > 126:
        raise ValueError(f"a header of {len(value)} bytes: this server writes at most 126")
    return len(value)


def literal(name: bytes, value: bytes, *, huffman: bool = False) -> bytes:
    """One header that leaves no trace in the peer's table (RFC 7541, section 6.2.2)."""
    return b"\x00" + text(name, huffman=huffman) + text(value, huffman=huffman)


def token_head(stream_id: int, token: int) -> bytes:
    """All of a DATA frame with one token but its last 8 bytes, which are emit_ns as FIXED64."""
    if not 0 <= token < 128:
        raise ValueError(f"token {token}: one byte holds 0 to 127")
    # GenerateChunk: token_ids (field 1, packed varint), emit_ns (field 2, packed fixed64)
    message = bytes((0x0A, 1, token, 0x12, 8))
    size = len(message) + FIXED64.size
    return HEAD.pack(0, 5 + size, DATA, 0, stream_id) + b"\x00" + UINT32.pack(size) + message


TOKEN_BYTES: Final = len(token_head(1, 1)) + FIXED64.size  # a whole frame
TOKEN_WINDOW: Final = TOKEN_BYTES - HEAD.size  # what it takes of the windows


class Answers:
    """Response headers and trailers of gRPC answers whose trailing metadata are those of a tailgate server."""

    def __init__(self, *, huffman: bool) -> None:
        def one(name: str, value: str) -> bytes:
            return literal(name.encode(), value.encode(), huffman=huffman)

        # static table: ":status: 200"
        head = b"\x88" + one("content-type", "application/grpc")
        self._open = frame(HEADERS, END_HEADERS, 0, head)[:5], head
        before = {
            "arm": "null",
            "replica": "null-0",
            "queue-ns": "184203",
            "prefill-ns": "2048113",
            "decode-ns": "91820441",
            "compile-stall-ns": "0",
            "batch-id": "48213",
            "batch-size": "7",
            "padded-batch": "8",
            "padded-length": "512",
            "prompt-tokens": "16",
        }
        self._fixed = b"".join(
            (one("grpc-status", "0"), one("grpc-message", ""), *(one(f"tailgate-{k}", v) for k, v in before.items()))
        )
        self._huffman = huffman
        self._names = [
            b"\x00" + text(name, huffman=huffman)
            for name in (b"tailgate-output-tokens", b"tailgate-recv-ns", b"tailgate-end-ns")
        ]
        self._health = frame(HEADERS, END_HEADERS, 0, head)
        self._refused = b"\x88" + one("content-type", "application/grpc") + one("grpc-status", "8")

    def opening(self, stream_id: int) -> bytes:
        """The response headers of a stream."""
        start, head = self._open
        return start + UINT32.pack(stream_id) + head

    def ending(self, stream_id: int, *, tokens: int, recv_ns: int, end_ns: int) -> bytes:
        """The trailers that end a good answer."""
        block = self.trailers(tokens=tokens, recv_ns=recv_ns, end_ns=end_ns)
        return frame(HEADERS, END_HEADERS | END_STREAM, stream_id, block)

    def trailers(self, *, tokens: int, recv_ns: int, end_ns: int) -> bytes:
        """The header block of `ending`."""
        count, recv, end = self._names
        return b"".join(
            (
                *(self._fixed, count, _digits(tokens, self._huffman)),
                *(recv, _digits(recv_ns, self._huffman)),
                *(end, _digits(end_ns, self._huffman)),
            )
        )

    def healthy(self, stream_id: int) -> bytes:
        """A whole answer of grpc.health.v1: SERVING."""
        message = b"\x00" + UINT32.pack(2) + b"\x08\x01"
        end = frame(HEADERS, END_HEADERS | END_STREAM, stream_id, literal(b"grpc-status", b"0"))
        return self.opening(stream_id) + frame(DATA, 0, stream_id, message) + end

    def refused(self, stream_id: int, message: str) -> bytes:
        """A trailers-only answer: RESOURCE_EXHAUSTED."""
        block = self._refused + literal(b"grpc-message", message.encode())
        return frame(HEADERS, END_HEADERS | END_STREAM, stream_id, block)


# Ten thousand groups of four digits, each as (bits, how many): a time of 19 digits is five of them.
def _groups() -> list[tuple[int, int]]:
    codes = [(REQUEST_CODES[ord(digit)], REQUEST_CODES_LENGTH[ord(digit)]) for digit in "0123456789"]
    out = []
    for number in range(10_000):
        bits, length = 0, 0
        for digit in f"{number:04d}":
            code, width = codes[int(digit)]
            bits, length = bits << width | code, length + width
        out.append((bits, length))
    return out


_GROUPS = _groups()


def _digits(value: int, huffman: bool) -> bytes:
    """A number as a header's value."""
    plain = b"%d" % value
    if not huffman:
        return bytes((len(plain),)) + plain
    if len(plain) != 19:
        return text(plain, huffman=True)
    bits, length = 0, 0
    for group in (plain[0:4], plain[4:8], plain[8:12], plain[12:16]):
        code, width = _GROUPS[int(group)]
        bits, length = bits << width | code, length + width
    for digit in plain[16:]:
        bits, length = bits << REQUEST_CODES_LENGTH[digit] | REQUEST_CODES[digit], length + REQUEST_CODES_LENGTH[digit]
    spare = -length % 8
    packed = (bits << spare | (1 << spare) - 1).to_bytes((length + spare) // 8, "big")
    return bytes((0x80 | len(packed),)) + packed


def without_padding(flags: int, payload: bytes) -> bytes:
    """What a DATA frame carries."""
    return payload[1 : len(payload) - payload[0]] if flags & PADDED else payload


def settings(values: Iterable[tuple[int, int]]) -> bytes:
    """A SETTINGS frame."""
    return frame(SETTINGS, 0, 0, b"".join(SETTING.pack(key, value) for key, value in values))
