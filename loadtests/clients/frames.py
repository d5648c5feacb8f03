"""HTTP/2 as written on the wire: frames, error codes and settings (RFC 9113, sections 6 and 7), and header blocks.

The header block of a request is made of literals, which need no compression state (RFC 7541, 6.2.2).
"""

from __future__ import annotations

import struct
from typing import Final

from hpack.hpack import encode_integer

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, ACK, END_HEADERS, PADDED, PRIORITY_FLAG = 0x1, 0x1, 0x4, 0x8, 0x20
NO_ERROR, PROTOCOL_ERROR, FRAME_SIZE_ERROR, REFUSED_STREAM = 0x0, 0x1, 0x6, 0x7
CANCEL, COMPRESSION_ERROR, ENHANCE_YOUR_CALM, INADEQUATE_SECURITY = 0x8, 0x9, 0xB, 0xC
ENABLE_PUSH, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE = 0x2, 0x3, 0x4
PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DEFAULT_WINDOW: Final = 65_535
DEFAULT_FRAME: Final = 16_384
LARGEST_STREAM_ID: Final = 2**31 - 1

HEAD = struct.Struct(">BHBBI")
UINT32 = struct.Struct(">I")
SETTING = struct.Struct(">HI")


class ProtocolError(Exception):
    """The peer broke HTTP/2; the connection cannot be used any more. `code` goes to the peer with GOAWAY."""

    def __init__(self, message: str, code: int = PROTOCOL_ERROR) -> None:
        super().__init__(message)
        self.code = code


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """Return the frame's bytes. `payload` has less than 16 MiB."""
    size = len(payload)
    return HEAD.pack(size >> 16, size & 0xFFFF, kind, flags, stream_id) + payload


def without_padding(payload: bytes) -> bytes:
    """Return the payload of a frame whose PADDED flag is set, less its padding."""
    if not payload or payload[0] >= len(payload):
        raise ProtocolError("padding is longer than its frame")
    return payload[1 : len(payload) - payload[0]]


def literal(name: str, value: str, *, secret: bool = False) -> bytes:
    """Return one ASCII field. Equal fields are equal bytes; a secret one is never indexed (6.2.3), by proxies too."""
    coded = (_length(len(text)) + text.encode("ascii") for text in (name, value))
    return (b"\x10" if secret else b"\x00") + b"".join(coded)


def request_prefix(path: str, authority: str, *, tls: bool, token: str) -> bytes:
    """Return the fields that all requests of a connection begin with; `token` is a bearer token, "" for none."""
    return (
        # From the static table: ":method: POST", then ":scheme: http" or "https".
        (b"\x83\x87" if tls else b"\x83\x86")
        + literal(":path", path)
        + literal(":authority", authority)
        + literal("te", "trailers")
        + literal("content-type", "application/grpc")
        + literal("user-agent", "tailgate")
        + (literal("authorization", f"Bearer {token}", secret=True) if token else b"")
    )


def grpc_timeout(left_ns: int) -> bytes:
    """Return the field with the time that the server has, in ms, of which eight digits are allowed: a day."""
    text = b"%dm" % min(max(1, left_ns // 1_000_000), 10**8 - 1)
    return b"%b%c%b" % (_GRPC_TIMEOUT, len(text), text)


def _length(value: int) -> bytes:
    return bytes((value,)) if value < 127 else bytes(encode_integer(value, 7))


_GRPC_TIMEOUT = literal("grpc-timeout", "")[:-1]
