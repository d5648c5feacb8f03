"""HTTP/2 as written on the wire: frame types, flags, error codes and settings (RFC 9113, sections 6 and 7)."""

from __future__ import annotations

import struct
from typing import Final

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, ACK, END_HEADERS, PADDED, PRIORITY_FLAG = 0x1, 0x1, 0x4, 0x8, 0x20
NO_ERROR, PROTOCOL_ERROR, FLOW_CONTROL_ERROR, FRAME_SIZE_ERROR, REFUSED_STREAM = 0x0, 0x1, 0x3, 0x6, 0x7
CANCEL, COMPRESSION_ERROR, ENHANCE_YOUR_CALM, INADEQUATE_SECURITY = 0x8, 0x9, 0xB, 0xC
ENABLE_PUSH, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE = 0x2, 0x3, 0x4, 0x5
PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DEFAULT_WINDOW: Final = 65_535
LARGEST_WINDOW: Final = 2**31 - 1
DEFAULT_FRAME: Final = 16_384
LARGEST_FRAME: Final = 2**24 - 1
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
    """The frame's bytes. `payload` has less than 16 MiB."""
    size = len(payload)
    return HEAD.pack(size >> 16, size & 0xFFFF, kind, flags, stream_id) + payload


def without_padding(payload: bytes) -> bytes:
    """The payload of a frame whose PADDED flag is set, less its padding."""
    if not payload or payload[0] >= len(payload):
        raise ProtocolError("padding is longer than its frame")
    return payload[1 : len(payload) - payload[0]]
