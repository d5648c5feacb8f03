"""One request to an OpenAI-compatible server, and what the bytes of its answer mean.

HTTP/1.1 itself is parsed by geventhttpclient (llhttp).
"""

from __future__ import annotations

from typing import Any, Final

import gevent
from geventhttpclient.response import HTTPParseError, HTTPResponse

from loadtests.clients.call import Call
from loadtests.external.openai_wire import (
    DONE,
    LARGEST_ERROR,
    EventStream,
    encoding_problem,
    error_of_body,
    is_event_stream,
    read_event,
    shortened,
)
from servers.metadata import trailing_key

_LARGEST_HEADERS: Final = 256 * 1024


class _Response(HTTPResponse):
    """llhttp's view of one answer; `pieces` are the parts of its body since they were last taken."""

    def __init__(self) -> None:
        super().__init__("POST")
        self.pieces: list[bytes] = []

    def _on_body(self, buf: bytearray) -> None:
        self.pieces.append(bytes(buf))

    def header(self, name: str) -> str:
        value = self.get(name)
        return value if isinstance(value, str) else ",".join(value) if value else ""


class OpenAiCall(Call):
    """One request. Its connection is closed when it is cancelled.

    `token_ns` has one time for each event that carried text, so for each chunk and not for each token, unless the
    server tells how many tokens a chunk brought (usage in every event): then a chunk's tokens all have its time.
    `output_tokens` is the server's count where it gave one.
    """

    __slots__ = (
        *("_body", "_calls", "_counts", "_events", "_head_bytes", "_is_stream"),
        *("chunks", "counted_tokens", "ended_ns", "greenlet", "request", "response"),
    )

    def __init__(self, *, request: bytes, calls: set[OpenAiCall], token: str = "", **settings: Any) -> None:
        super().__init__(**settings)
        self.token = token
        self.response = _Response()
        self.ended_ns = 0  # when the finish_reason came; 0: not yet
        self._events = EventStream()
        self._is_stream: bool | None = None  # None: headers have not come
        self._counts = True  # every event with text so far had a count of tokens
        self._body = b""
        self._head_bytes = 0  # before the end of the headers
        self.chunks = 0
        self.counted_tokens: int | None = None  # by the server
        self.request = request
        self.greenlet: gevent.Greenlet[..., None] | None = None
        self._calls = calls  # of the client, while they run
        calls.add(self)

    @property
    def output_tokens(self) -> int:
        """Tokens of the answer by the server's count, else the chunks that carried text."""
        return len(self.token_ns) if self.counted_tokens is None else self.counted_tokens

    def _withdraw(self) -> None:
        """Its connection is closed."""
        if self.greenlet is not None and self.greenlet is not gevent.getcurrent():
            self.greenlet.kill(block=False)

    def _release(self) -> None:
        self.request = b""
        self._calls.discard(self)

    def feed(self, data: bytes, at_ns: int) -> None:
        """`data` was read at `at_ns`; empty means that the server closed its side."""
        response = self.response
        try:
            response.feed(data)
        except HTTPParseError as problem:
            where = "inside its answer" if response.message_begun else "instead of an answer"
            what = "closed the connection" if not data else f"does not speak HTTP/1.1 ({shortened(str(problem))})"
            self.finish("UNAVAILABLE", f"the server {what} {where}", at_ns)
            return
        if not response.headers_complete or response.get_code() < 200:
            self._head_bytes += len(data)
            if not data or self._head_bytes > _LARGEST_HEADERS:
                self.finish("UNAVAILABLE", "the server closed the connection without an answer", at_ns)
            return
        if self._is_stream is None:
            self._is_stream = response.get_code() == 200 and is_event_stream(response.header("content-type"))
            if self._is_stream and (encoded := encoding_problem(response.header("content-encoding"))):
                self.finish("INTERNAL", encoded, at_ns)
                return
        pieces, response.pieces = response.pieces, []
        if self._is_stream:
            for piece in pieces:
                try:
                    events = self._events.feed(piece)
                except ValueError as error:
                    self.finish("INTERNAL", str(error), at_ns)
                    break
                for event in events:
                    self._event(event, at_ns)
        else:
            self._body += b"".join(pieces)
        if response.message_complete or len(self._body) >= LARGEST_ERROR:
            self._complete(at_ns)
        elif not data:
            self.break_off("the server closed the connection inside its answer", at_ns)

    def break_off(self, error: str, at_ns: int) -> None:
        """No more will come: the answer is whole if its finish_reason came, and ended then."""
        if self.ended_ns:
            self.finish("OK", "", self.ended_ns)
        else:
            self.finish("UNAVAILABLE", error, at_ns)

    def _event(self, data: bytes, at_ns: int) -> None:
        if self.status:
            return
        if data == DONE or data.strip() == DONE:
            self._end_stream(at_ns)
            return
        try:
            chunk = read_event(data)
        except (ValueError, AttributeError, LookupError, TypeError, RecursionError) as problem:
            what = shortened(data[:200].decode("utf-8", "replace"))
            self.finish("INTERNAL", f"an event has an unknown form ({type(problem).__name__}): {what}", at_ns)
            return
        if chunk.failed is not None:
            self.finish(*chunk.failed, at_ns)
            return
        if chunk.ended and not self.ended_ns:
            self.ended_ns = at_ns
        total = chunk.completion_tokens
        if chunk.text:
            self.chunks += 1
            # A count in each event says how many tokens this chunk brought. One at the end alone does not, nor does one
            # below the number of chunks.
            self._counts = (
                self._counts and total is not None and total >= self.chunks and (self.chunks > 1 or not chunk.ended)
            )
            self.add_tokens(total - len(self.token_ns) if total is not None and self._counts else 1, at_ns)
        elif total is not None and self._counts and total > len(self.token_ns) and (self.chunks or chunk.goes_on):
            # The model made tokens whose text the server holds back.
            self.add_tokens(total - len(self.token_ns), at_ns)
        if total is not None:
            self.counted_tokens = total
        if chunk.prompt_tokens is not None:
            self.trailing_metadata[trailing_key("prompt_tokens")] = str(chunk.prompt_tokens)

    def _complete(self, at_ns: int) -> None:
        """The whole answer is here."""
        if self.status:
            return
        code = self.response.get_code()
        if not self._is_stream:
            location, kind = map(self.response.header, ("location", "content-type"))
            self.finish(*error_of_body(code, self._body, location, kind), at_ns)
        elif self.ended_ns or self._events.close() == DONE:
            self._end_stream(at_ns)
        else:
            self.finish("UNAVAILABLE", "the stream ended without a finish_reason and without [DONE]", at_ns)

    def _end_stream(self, at_ns: int) -> None:
        """The stream came to its end."""
        if self.ended_ns or self.chunks or self.token_ns:
            self.finish("OK", "", at_ns)
        else:
            self.finish("INTERNAL", "the stream held neither text nor a finish_reason", at_ns)
