from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.loadtests.commands.test_main import RUN, Command, nothing_left


def test_a_second_signal_kills_at_once(tmp_path: Path) -> None:
    command = Command(tmp_path, *RUN)
    command.wait_for("traffic")
    command.process.send_signal(signal.SIGINT)
    command.process.send_signal(signal.SIGTERM)
    code, _, _ = command.end(timeout_s=10.0)
    assert code == 1
    assert nothing_left(str(tmp_path))


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_interrupted_at_start_up_leaves_no_process_and_says_so(number: signal.Signals, tmp_path: Path) -> None:
    command = Command(tmp_path, *RUN, fake_flags=("--never-ready", "eager-0"))
    command.wait_for("starting arms")
    command.process.send_signal(number)
    code, out, err = command.end()
    assert code == 1
    line = json.loads(out[-1])
    assert (line["verdict"], line["exit_code"], line["complete"], line["interrupted"]) == (None, 1, False, True)
    assert "interrupted: what was recorded is in runs/" in err
    assert nothing_left(str(tmp_path))
    (facts,) = tmp_path.glob("runs/*/trial-01/trial.json")
    assert json.loads(facts.read_text())["complete"] is False
