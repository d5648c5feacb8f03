from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from loadtests.provider.observed import Observed
from loadtests.provider.server import ProviderServer
from tests.fakes.live_runs import Rollout

Serve = Callable[..., ProviderServer]


@pytest.fixture
def run(tmp_path: Path) -> Rollout:
    return Rollout(folder=tmp_path / "20260101T120000Z-canary")


@pytest.fixture
def serve(run: Rollout) -> Iterator[Serve]:
    """Answers for `run`, by the run's own clock, until the test ends."""
    with ExitStack() as stack:

        def start(*, token: str = "", folder: Path = run.folder, notes: list[str] | None = None) -> ProviderServer:
            observed = Observed(folder, clock=run.now_ns)
            said = notes if notes is not None else []
            server = stack.enter_context(ProviderServer(observed, "127.0.0.1", 0, token=token, note=said.append))
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
            thread.start()
            stack.callback(server.shutdown)
            return server

        yield start
