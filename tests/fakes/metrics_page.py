"""A server's page for Prometheus that answers as it is told to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def vllm_page(*, running: int, waiting: int, cache: float, preemptions: int) -> str:
    """vLLM's page with this load."""
    labels = '{engine="0",model_name="llama"}'
    return (
        f"# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{labels} {running}\n"
        f"# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting{labels} {waiting}\n"
        f"# TYPE vllm:kv_cache_usage_perc gauge\nvllm:kv_cache_usage_perc{labels} {cache}\n"
        f"# TYPE vllm:num_preemptions_total counter\nvllm:num_preemptions_total{labels} {preemptions}\n"
    )


@contextmanager
def metrics_page(answer: Callable[[int], str | int]) -> Iterator[str]:
    """The address of a page. `answer` gives the text, or the HTTP status, of the request with that number."""
    asked = iter(range(1 << 30))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            what = answer(next(asked))
            body = what.encode() if isinstance(what, str) else b""
            self.send_response(200 if isinstance(what, str) else what)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/metrics"
        server.shutdown()
