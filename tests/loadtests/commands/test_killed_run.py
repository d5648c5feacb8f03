from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.fakes.certificates import Certificates
from tests.fakes.listening import command_of, family
from tests.fakes.planted_secrets import Watched, ended, pem, search, start_run, trial_rows

__all__ = ["pem"]


@pytest.mark.process
def test_a_run_that_is_killed_leaves_no_secret(pem: Certificates, tmp_path: Path) -> None:
    run = start_run(tmp_path, duration_s=60.0, traffic="workers = 2", token='token_file = "given/token"')
    with ended(run), Watched(tmp_path / "tmp") as watched:
        watched.pids.append(run.pid)
        deadline = time.monotonic() + 200
        while len(trial_rows(tmp_path)) < 30:
            assert run.poll() is None, (tmp_path / "run.output").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        children = family(run.pid)
        run.send_signal(signal.SIGKILL)
        run.wait()
        while any(command_of(pid) for pid in children):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    search(tmp_path, watched, pem)
