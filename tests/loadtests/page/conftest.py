from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tailgate.loadtests.page.server import PageServer

Serve = Callable[..., PageServer]


@contextmanager
def serving(run_dir: Path, host: str) -> Iterator[PageServer]:
    server = PageServer(run_dir, host, 0)
    server.open()
    try:
        yield server
    finally:
        server.close()


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serves the page of a run directory until the test ends."""
    with ExitStack() as stack:

        def start(run_dir: Path, *, host: str = "127.0.0.1") -> PageServer:
            return stack.enter_context(serving(run_dir, host))

        yield start
