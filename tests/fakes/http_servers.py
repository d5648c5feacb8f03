"""A scripted HTTP/1.1 server on threads: it reads whole requests and answers with whatever bytes a test wants.

`python -m tests.fakes.http_servers PORT LOG [SECONDS]` stands in for a vLLM server, which compiles once for so long.
"""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Self

__all__ = ["CompilingServer", "serving"]


STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def event(content: object) -> bytes:
    """Return `content` as one server-sent event; text is taken as it is."""
    return b"data: " + (content if isinstance(content, str) else json.dumps(content)).encode() + b"\n\n"


def said(text: str, *, finish: str | None = None) -> bytes:
    return event({"object": "x", "choices": [{"index": 0, "finish_reason": finish, "text": text}]})


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
        return json.loads(self.body)

    def send(self, data: bytes) -> None:
        with contextlib.suppress(OSError):
            self.link.sendall(data)


Script = Callable[[Request], object]


class Listening:
    """Accepts connections on a port of its own until the block ends. Each is served on a thread."""

    def __init__(self, port: int = 0) -> None:
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port: int = self._listener.getsockname()[1]
        self.target = f"127.0.0.1:{self.port}"
        self.socks: list[socket.socket] = []
        self.threads = [threading.Thread(target=self._accept, daemon=True)]
        self.threads[0].start()

    def connected(self, sock: socket.socket, number: int) -> Callable[[], object] | None:
        """Return what serves the connection `number`, from 1 on, or None."""
        raise NotImplementedError

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self.socks.append(sock)
                if (serve := self.connected(sock, len(self.threads))) is not None:
                    self.threads.append(threading.Thread(target=serve, daemon=True))
                    self.threads[-1].start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # Ends the accepting thread before its socket's number is free: it took the connections of the next peer.
        self._listener.shutdown(socket.SHUT_RDWR)
        self.threads[0].join()
        self._listener.close()
        for sock in self.socks:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


class HttpPeer(Listening):
    """`script` answers each request; when it returns False, the connection is closed."""

    def __init__(self, script: Script, tls: ssl.SSLContext | None = None, port: int = 0) -> None:
        self.script = script
        self.tls = tls
        self.requests: list[Request] = []
        self.connections = 0
        super().__init__(port)

    @property
    def address(self) -> str:
        return f"http{'s' if self.tls else ''}://127.0.0.1:{self.port}/v1"

    def connected(self, sock: socket.socket, number: int) -> Callable[[], object]:
        self.connections = number
        return partial(self._serve, sock, number)

    def _serve(self, link: socket.socket, number: int) -> None:
        with contextlib.suppress(OSError, ValueError):
            if self.tls is not None:
                link = self.tls.wrap_socket(link, server_side=True)
                self.socks.append(link)
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


@contextlib.contextmanager
def serving(server: Any) -> Iterator[str]:
    """Let `server.script` answer each request until the block ends; yield the address with `server.path`."""
    with HttpPeer(server.script) as peer:
        yield f"http://127.0.0.1:{peer.port}{server.path}"


def scripted(answers: Sequence[bytes]) -> Script:
    """Answer each request with the next of `answers`, and further ones with the last."""
    left = list(answers)

    def script(request: Request) -> None:
        request.send(left.pop(0) if len(left) > 1 else left[0])

    return script


_STEP_S = 0.004


class CompilingServer:
    """At its request number `compiles_at` it compiles for `compile_s`: every request waits, and `log` gets a line."""

    path = ""

    def __init__(self, log: Path, *, compiles_at: int, compile_s: float) -> None:
        self._log, self._at, self._seconds = log, compiles_at, compile_s
        log.parent.mkdir(exist_ok=True)
        self._device = threading.Lock()
        self._requests = iter(range(1 << 30))
        self.log("non-default args: {'model': 'llama', 'jit_monitor_verbose': True}")
        self.log("Kernel JIT monitor activated; monitored JIT compilations during inference will use mode=warn.")

    def log(self, message: str) -> None:
        moment = datetime.now().strftime("%m-%d %H:%M:%S")
        with self._log.open("a") as file:
            file.write(f"(EngineCore pid=77) INFO {moment} [fake.py:1] {message}\n")

    def tokens(self, prompt: str, count: int) -> Iterator[bytes]:
        number = next(self._requests)
        for step in range(count):
            with self._device:
                if number == self._at and step == 0:
                    time.sleep(self._seconds)
                    self.log(f"Compiling a graph for compile range (1, 8192) takes {self._seconds:.2f} s")
            time.sleep(_STEP_S)
            yield said(f"{prompt[step % len(prompt)]} ", finish="length" if step == count - 1 else None)
        yield usage(count, prompt=len(prompt.split()))

    def script(self, request: Request) -> None:
        if not request.line.startswith("POST"):
            request.send(plain("200 OK", b"{}"))
            return
        request.send(STREAM_HEAD)
        asked = request.json
        prompt = asked.get("prompt") or asked["messages"][0]["content"]  # its tokens are its words
        for piece in self.tokens(prompt, asked["max_tokens"]):
            request.send(chunked(piece))
        request.send(chunked(DONE) + END)
        self.log(f'"{request.line}" 200 OK')


if __name__ == "__main__":
    port, log, *compiles = sys.argv[1:]
    server = CompilingServer(Path(log), compiles_at=60 if compiles else -1, compile_s=float(*compiles or ["0"]))
    with HttpPeer(server.script, port=int(port)) as peer:
        print(f"serving {peer.address}, log {log}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            peer.threads[0].join()
