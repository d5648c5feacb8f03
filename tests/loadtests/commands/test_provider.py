import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from loadtests.commands.main import main
from servers.address import host_port
from tests.fakes.controllers import asked
from tests.fakes.patience import PATIENCE_S
from tests.fakes.rollout import Rollout

ROOT = Path(__file__).resolve().parents[3]
TOKEN = "0123456789abcdef"


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    code = main(["provider", *arguments])
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1)
    return err


def test_beyond_this_machine_it_takes_a_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, file = str(tmp_path), tmp_path / "token"
    assert "add --token-file" in refusal(capsys, run, "--listen", "0.0.0.0:9466")
    assert "is empty" in refusal(capsys, run, "--token-file", "")
    file.write_text("short\n")
    found = refusal(capsys, run, "--token-file", str(file))
    assert ("holds 5 characters; the least is 16" in found, "short" in found) == (True, False)
    assert "does not exist: give a directory" in refusal(capsys, str(tmp_path / "none"))
    assert "is not HOST:PORT: give 127.0.0.1:9466" in refusal(capsys, run, "--listen", "9466")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert f"--listen {address} cannot be used" in refusal(capsys, run, "--listen", address)


@pytest.mark.process
def test_it_answers_until_it_is_stopped(tmp_path: Path) -> None:
    run = Rollout(folder=tmp_path / "runs" / "20260101T120000Z-canary")
    run.died()
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    command = [sys.executable, "-m", "loadtests.commands.main", "provider", str(tmp_path / "runs")]
    command += ["--listen", "127.0.0.1:0", "--token-file", str(tmp_path / "token")]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ)
    ) as process:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        _, port = host_port(told["url"].removeprefix("http://"))
        status, body = asked(port, "GET", "/v1/judgement", headers={"Authorization": f"Bearer {TOKEN}"})
        assert (status, json.loads(body)["verdict"], json.loads(body)["reasons"]) == (200, "FAIL", ["new-0 died"])
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (0, "")
    assert "promotion new: FAIL: new-0 died" in err
    assert TOKEN not in err
