"""A server's page for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus

from tests.fakes.http1 import HttpPeer, Request, plain


def vllm_page(*, running: int, waiting: int, cache: float, preemptions: int) -> str:
    labels = '{engine="0",model_name="llama"}'
    return (
        f"# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{labels} {running}\n"
        f"# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting{labels} {waiting}\n"
        f"# TYPE vllm:kv_cache_usage_perc gauge\nvllm:kv_cache_usage_perc{labels} {cache}\n"
        f"# TYPE vllm:num_preemptions_total counter\nvllm:num_preemptions_total{labels} {preemptions}\n"
    )


@contextmanager
def metrics_page(answer: Callable[[int], str | int]) -> Iterator[str]:
    """Serve a page until the block ends. `answer` returns the text, or the HTTP status, of each numbered request."""
    numbers = iter(range(1 << 30))

    def script(request: Request) -> None:
        content = answer(next(numbers))
        request.send(
            plain("200 OK", content.encode())
            if isinstance(content, str)
            else plain(f"{content} {HTTPStatus(content).phrase}")
        )

    with HttpPeer(script) as peer:
        yield f"http://127.0.0.1:{peer.port}/metrics"
