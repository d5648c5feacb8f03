from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tailgate.loadtests.page.server import PageServer

Serve = Callable[..., PageServer]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serves the page of a run directory until the test ends."""
    with ExitStack() as stack:

        def start(run_dir: Path) -> PageServer:
            server = PageServer(run_dir, 0)
            stack.callback(server.close)
            server.open()
            return server

        yield start
