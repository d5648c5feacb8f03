"""A server of somebody else that answers greedily, as a made-up server of the simulation does, and tells how likely."""

from __future__ import annotations

import json
import threading
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from benchmarks.simulation.greedy import Server
from tests.fakes.http1 import DONE, END, STREAM_HEAD, chunked, event, plain, usage


@dataclass
class GreedyServer:
    """Answers as `server` does. It `refuses` requests for log-probabilities, wants the bearer token `token` where there
    is one and repeats it in every error, and keeps the bodies that it got."""

    server: Server
    refuses: bool = False
    token: str = ""
    empty: bool = False
    bodies: list[dict[str, Any]] = field(default_factory=list)
    _times: Counter[int] = field(default_factory=Counter)

    def reply(self, body: dict[str, Any], authorization: str) -> bytes:
        """The whole answer to one request."""
        self.bodies.append(body)
        if self.token and authorization != f"Bearer {self.token}":
            return plain("401 No", json.dumps({"error": {"message": f"{authorization} is not {self.token}"}}).encode())
        if self.refuses and "logprobs" in body:
            problem = f"logprobs are not supported, {self.token}"
            return plain("400 No", json.dumps({"error": {"message": problem}}).encode())
        prompt = zlib.crc32(json.dumps(body.get("prompt") or body.get("messages")).encode())
        self._times[prompt] += 1
        made = self.server.answer(0, prompt, self._times[prompt])
        count = 0 if self.empty else min(int(body["max_tokens"]), made.asked)
        words = made.text.split()[:count]
        events = []
        for place, word in enumerate(words):
            choice: dict[str, Any] = {"index": 0, "text": f" {word}", "finish_reason": None}
            if "logprobs" in body and made.tokens:
                top = {f" {other}": value for other, value in made.likeliest[place].items()}
                choice["logprobs"] = {
                    "tokens": [f" {word}"],
                    "token_logprobs": [made.log_probs[place]],
                    "top_logprobs": [top],
                }
            events.append(event({"choices": [choice]}))
        events.append(event({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}))
        return STREAM_HEAD + chunked(*events, usage(count), DONE) + END


@contextmanager
def serving(server: GreedyServer) -> Iterator[str]:
    """http://host:port/v1 of the server."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.wfile.write(plain("200 OK", b"{}"))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.wfile.write(server.reply(body, self.headers.get("Authorization", "")))

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listener:
        listener.daemon_threads = True
        threading.Thread(target=listener.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{listener.server_address[1]}/v1"
        listener.shutdown()
