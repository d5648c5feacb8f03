from __future__ import annotations

import io
import logging

import pytest
from locust.env import Environment

from loadtests.workers.load_process import LoadProcess


def test_a_log_that_cannot_be_written_gets_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", True)  # and as it was after the test
    LoadProcess(Environment())
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)

    def fail(_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(logging.StreamHandler, "flush", fail)
    handler.emit(logging.LogRecord("x", logging.INFO, "", 0, "a line", None, None))
    assert capsys.readouterr().err == ""
