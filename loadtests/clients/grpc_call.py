"""Calls of gRPC methods (grpc/doc/PROTOCOL-HTTP2.md): messages cut out of DATA frames, and what their end means."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

from google.protobuf.message import DecodeError

from tailgate.loadtests.clients import frames
from tailgate.loadtests.clients.call import Call
from tailgate.loadtests.clients.frames import UINT32
from tailgate.loadtests.external.openai_wire import http_status_name
from tailgate.servers.metadata import INFERENCE_SERVICE, STATUS_NAMES, whole_number
from tailgate.servers.rpc.inference_pb2 import EmbedResponse, GenerateChunk

if TYPE_CHECKING:
    from tailgate.loadtests.clients.connection import Connection

GENERATE_PATH: Final = f"/{INFERENCE_SERVICE}/Generate"
EMBED_PATH: Final = f"/{INFERENCE_SERVICE}/Embed"
LARGEST_MESSAGE: Final = 4 * 1024 * 1024

_STATUS: Final = {str(code): name for code, name in enumerate(STATUS_NAMES)}
# Codes not listed are INTERNAL and UNKNOWN.
RESET_STATUS: Final = {
    frames.REFUSED_STREAM: "UNAVAILABLE",
    frames.CANCEL: "CANCELLED",
    frames.ENHANCE_YOUR_CALM: "RESOURCE_EXHAUSTED",
    frames.INADEQUATE_SECURITY: "PERMISSION_DENIED",
}


class GrpcCall(Call):
    """One Generate call, and its stream while it is on a connection.

    A chunk's last token has the time its frame was read; earlier tokens of a coalesced chunk are set back by the
    server's own emit gaps, but never before the previous chunk's arrival. All tokens of the first chunk have its
    arrival time, so that time to first token is what a user would see.
    """

    _needed: int  # bytes of `_partial` that make its message whole; set along with it

    def __init__(self, *, headers: bytes, body: bytes, **settings: Any) -> None:
        super().__init__(**settings)
        self.headers = headers
        self.body = b"\x00" + UINT32.pack(len(body)) + body
        self.position = 0  # bytes of the body already sent
        self.connection: Connection | None = None
        self.stream_id = 0
        self.send_window = 0
        self.unacknowledged = 0  # bytes received since the stream's window was last refilled
        self.answered = False  # the server's headers have come
        self.restarted = False  # a server refused it once without processing it
        self._partial: bytearray | None = None  # the beginning of a message
        self._http_status = "200"
        self._last_chunk_ns = 0

    def on_data(self, payload: bytes, at_ns: int) -> None:
        """Take the payload of a DATA frame that was read at `at_ns`."""
        if self._partial is not None:
            self._partial += payload
            if len(self._partial) < self._needed:
                return
            payload, self._partial = bytes(self._partial), None
        position, size = 0, len(payload)
        while size - position >= 5:
            length = UINT32.unpack_from(payload, position + 1)[0]
            if payload[position] or length > LARGEST_MESSAGE:
                return self._refuse(payload[position], length, at_ns)
            end = position + 5 + length
            if end > size:
                break
            self.on_message(payload[position + 5 : end], at_ns)
            if self.status:
                return
            position = end
        if position < size:
            # Joined only once the message is whole: it may come in hundreds of frames.
            self._partial = bytearray(payload[position:])
            self._needed = 5 + UINT32.unpack_from(payload, position + 1)[0] if size - position >= 5 else 5

    def on_message(self, message: bytes, at_ns: int) -> None:
        """Take a whole message that came at `at_ns`."""
        try:
            chunk = GenerateChunk.FromString(message)
        except DecodeError as problem:
            return self.cancel("INTERNAL", f"a message is not a GenerateChunk: {problem}")
        count = len(chunk.token_ids)
        if not count:
            return None
        if count == 1:
            self.token_ns.append(at_ns)
        elif not self.token_ns or len(chunk.emit_ns) != count:
            self.add_tokens(count, at_ns)
        else:
            last, earliest = chunk.emit_ns[-1], self._last_chunk_ns
            for emit in chunk.emit_ns:
                earliest = min(at_ns, max(earliest, at_ns - (last - emit)))
                self.token_ns.append(earliest)
        self._last_chunk_ns = at_ns
        return None

    def on_headers(self, fields: dict[str, str], ended: bool, at_ns: int) -> None:
        """Take a whole header block that came at `at_ns`; `ended` says that nothing follows it."""
        http_status = fields.pop(":status", "")
        if not self.answered:
            if http_status.startswith("1"):
                return  # an informational response; the real one follows
            self.answered = True
            if self.position == len(self.body):
                self.body, self.position = b"", 0  # kept until here for a server that goes away unread
            self._http_status = http_status
            self.initial_metadata = fields
        elif not ended:
            return self.cancel("INTERNAL", "a second header block came before the end of the stream")
        if ended:
            self.trailing_metadata = fields
            self.on_end(at_ns)
        return None

    def on_end(self, at_ns: int) -> None:
        """End the call as the trailers say, or as HTTP does where they do not."""
        code = self.trailing_metadata.get("grpc-status")
        if code is not None:
            status = _STATUS.get(code, "UNKNOWN")
            error = self.trailing_metadata.get("grpc-message", "")
            if error:
                # Percent-encoded ASCII by the protocol; servers that send UTF-8 as it is are understood too.
                error = unquote(error.encode("latin-1").decode("utf-8", "replace"), errors="replace")
            if status == "OK" and self._partial:
                status, error = "INTERNAL", f"the stream ended inside a message ({len(self._partial)} bytes left over)"
            self.finish(status, error, at_ns)
        elif self._http_status != "200":
            status = http_status_name(whole_number(self._http_status) or 0)
            self.finish(status, f"HTTP status {self._http_status}", at_ns)
        else:
            self.finish("UNKNOWN", "the stream ended without grpc-status", at_ns)

    def _refuse(self, flag: int, length: int, at_ns: int) -> None:
        """Refuse bytes that cannot be a message: a proxy's page, a compressed message or one that is too large."""
        if self._http_status != "200":
            self.on_end(at_ns)  # the body of an error page says nothing
            return self._withdraw()
        kind = self.initial_metadata.get("content-type", "application/grpc")
        if not kind.startswith("application/grpc"):
            self.cancel("INTERNAL", f'the answer is "{kind}" and not gRPC: is the target a gRPC server?')
        elif flag:
            self.cancel("INTERNAL", "a message is compressed although no compression was offered")
        else:
            self.cancel("INTERNAL", f"a message has {length} bytes; the limit is {LARGEST_MESSAGE}")

    def _withdraw(self) -> None:
        if self.connection is not None:
            self.connection.abandon(self.stream_id, frames.CANCEL)

    def _release(self) -> None:
        self.body = self.headers = b""
        self._partial = None


class EmbedCall(GrpcCall):
    """One Embed call. It has an end and no tokens: `token_ns` stays empty. OK without one vector is INTERNAL.

    The vector is not kept: the load does not read it, and parity sends its own requests.
    """

    _vectors = 0

    def on_message(self, message: bytes, at_ns: int) -> None:
        """Take the answer, a whole message that came at `at_ns`."""
        try:
            self._vectors += bool(EmbedResponse.FromString(message).values)
        except DecodeError as problem:
            self.cancel("INTERNAL", f"a message is not an EmbedResponse: {problem}")

    def finish(self, status: str, error: str, at_ns: int) -> None:
        """End the call as any other."""
        if status == "OK" and self._vectors != 1:
            status, error = "INTERNAL", f"the answer ended with OK and holds {self._vectors} vectors: one was asked for"
        super().finish(status, error, at_ns)
