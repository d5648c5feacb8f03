from __future__ import annotations

import signal
from pathlib import Path

from tests.loadtests.commands.test_main import RUN, Command, nothing_left


def test_a_second_signal_kills_at_once(tmp_path: Path) -> None:
    command = Command(tmp_path, *RUN)
    command.wait_for("traffic")
    command.process.send_signal(signal.SIGINT)
    command.process.send_signal(signal.SIGTERM)
    code, _, _ = command.end(timeout_s=10.0)
    assert code == 1
    assert nothing_left(str(tmp_path))
