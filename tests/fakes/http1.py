"""A scripted HTTP/1.1 server on threads: it reads whole requests and answers with whatever bytes a test wants."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def event(content: object) -> bytes:
    """Return `content` as one server-sent event; text is taken as it is."""
    return b"data: " + (content if isinstance(content, str) else json.dumps(content)).encode() + b"\n\n"


def said(text: str, *, finish: str | None = None, usage: dict[str, int] | None = None, chat: bool = False) -> bytes:
    choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
    choice |= {"delta": {"content": text}} if chat else {"text": text}
    return event({"object": "x", "choices": [choice], **({"usage": usage} if usage else {})})


def usage(tokens: int, prompt: int = 4) -> bytes:
    return event({"choices": [], "usage": {"completion_tokens": tokens, "prompt_tokens": prompt}})


DONE = event("[DONE]")


def chunked(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts if part)


def plain(status: str, body: bytes = b"", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def answer(*parts: bytes) -> bytes:
    return STREAM_HEAD + chunked(*parts) + END


@dataclass
class Request:
    """One request, and the connection to answer it on."""

    link: socket.socket
    line: str
    headers: dict[str, str]
    body: bytes
    connection: int

    @property
    def json(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(self.body)
        return content

    def send(self, data: bytes) -> None:
        with contextlib.suppress(OSError):
            self.link.sendall(data)


Script = Callable[[Request], object]


@dataclass
class HttpPeer:
    """Listens on loopback. `script` answers each request; when it returns False, the connection is closed."""

    script: Script
    tls: ssl.SSLContext | None = None
    requests: list[Request] = field(default_factory=list)
    connections: int = 0

    def __enter__(self) -> Self:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._links: list[socket.socket] = []
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()
        return self

    def __exit__(self, *_: object) -> None:
        # Ends the thread before its socket's number is free: it took the connections of the next peer that got it.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        self._listener.close()
        for link in self._links:
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
            link.close()

    @property
    def address(self) -> str:
        return f"http{'s' if self.tls else ''}://127.0.0.1:{self.port}/v1"

    def _accept(self) -> None:
        while True:
            try:
                link, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._serve, args=(link, self.connections), daemon=True).start()

    def _serve(self, link: socket.socket, number: int) -> None:
        with contextlib.suppress(OSError, ValueError):
            if self.tls is not None:
                link = self.tls.wrap_socket(link, server_side=True)
            self._links.append(link)
            reader = link.makefile("rb")
            while line := reader.readline():
                headers = {}
                while (field_line := reader.readline()) not in (b"\r\n", b""):
                    name, _, value = field_line.decode().partition(":")
                    headers[name.strip().lower()] = value.strip()
                body = reader.read(int(headers.get("content-length", 0)))
                request = Request(link, line.decode().strip(), headers, body, number)
                self.requests.append(request)
                if self.script(request) is False:
                    break
        with contextlib.suppress(OSError):
            link.shutdown(socket.SHUT_RDWR)
        link.close()


class Scripted(Protocol):
    """A server whose `script` answers each request; clients find it at `path`."""

    path: str

    def script(self, request: Request) -> object: ...


@contextlib.contextmanager
def serving(server: Scripted) -> Iterator[str]:
    """Serve until the block ends; yield the address."""
    with HttpPeer(server.script) as peer:
        yield f"http://127.0.0.1:{peer.port}{server.path}"


def scripted(answers: Sequence[bytes]) -> Script:
    """Answer each request with the next of `answers`, and further ones with the last."""
    left = list(answers)

    def script(request: Request) -> None:
        request.send(left.pop(0) if len(left) > 1 else left[0])

    return script
