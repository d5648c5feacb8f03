"""The engine process, as its front sees it."""

from __future__ import annotations

import multiprocessing

from servers.engine.device import serve_engine
from servers.engine.messages import Progress


def test_an_engine_that_cannot_start_says_so_and_ends_at_once() -> None:
    """It stayed for five seconds, and its replica with it."""
    spawn = multiprocessing.get_context("spawn")
    front_end, engine_end = spawn.Pipe()
    engine = spawn.Process(target=serve_engine, args=(engine_end, {"engine": {"slots": -1}}, ""))
    engine.start()
    engine_end.close()
    (failed,) = front_end.recv()
    assert isinstance(failed, Progress)
    assert (failed.stage, "slots" in failed.detail) == ("failed", True)
    engine.join(4.0)
    assert engine.exitcode == 0
