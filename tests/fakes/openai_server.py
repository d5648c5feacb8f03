"""A server of another project: it streams completions, shows its load, and logs what it compiles as vLLM does."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from tests.fakes.http1 import DONE, END, STREAM_HEAD, Request, chunked, plain, said, serving, usage
from tests.fakes.metrics_page import vllm_page

__all__ = ["CompilingServer", "serving"]
_STEP_S = 0.004


class CompilingServer:
    """At its request number `compiles_at` it compiles for `compile_s`: every request waits, and `log` gets a line."""

    path = ""

    def __init__(self, log: Path, *, compiles_at: int, compile_s: float) -> None:
        self._log, self._at, self._seconds = log, compiles_at, compile_s
        self._device = threading.Lock()
        self._requests = iter(range(1 << 30))
        self._running: set[int] = set()
        self.log("non-default args: {'model': 'llama'}")
        self.log("Kernel JIT monitor activated; monitored JIT compilations during inference will use mode=warn.")

    def log(self, message: str) -> None:
        moment = datetime.now().strftime("%m-%d %H:%M:%S")
        with self._log.open("a") as file:
            file.write(f"(EngineCore pid=77) INFO {moment} [fake.py:1] {message}\n")

    def tokens(self, count: int) -> Iterator[bytes]:
        number = next(self._requests)
        self._running.add(number)
        for step in range(count):
            with self._device:
                if number == self._at and step == 0:
                    time.sleep(self._seconds)
                    self.log(f"Compiling a graph for compile range (1, 8192) takes {self._seconds:.2f} s")
                time.sleep(_STEP_S)
            yield said("word ", finish="length" if step == count - 1 else None)
        self._running.discard(number)
        yield usage(count)

    def script(self, request: Request) -> None:
        if not request.line.startswith("POST"):
            request.send(plain("200 OK", self.page().encode() if "/metrics" in request.line else b"{}"))
            return
        request.send(STREAM_HEAD)
        for piece in self.tokens(request.json["max_tokens"]):
            request.send(chunked(piece))
        request.send(chunked(DONE) + END)

    def page(self) -> str:
        running = len(self._running)
        return vllm_page(running=min(running, 4), waiting=max(0, running - 4), cache=0.25, preemptions=0)
