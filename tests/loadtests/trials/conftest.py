from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from loadtests.trials import preflight

UNKNOWN_OPTIONS = ("fastest", "triton.fastest", "triton")  # the last is a group of options


@pytest.fixture(scope="session")
def reply() -> dict[str, Any]:
    """What torch says: importing its compiler takes seconds."""
    options = json.dumps(dict.fromkeys(UNKNOWN_OPTIONS, True))
    command = [sys.executable, "-P", "-c", preflight._ASK_TORCH, "promised", "no_such.module", "cpu", options]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    told: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    assert told["import"] == "ModuleNotFoundError: No module named 'no_such'"
    return told


@pytest.fixture
def torch_asked_once(reply: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of torch is answered from one reply of it."""

    def answer(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        _, module, _, options = command[4:]
        told = {**reply, "unknown": [option for option in json.loads(options) if option in reply["unknown"]]}
        if not module:
            del told["import"]
        return subprocess.CompletedProcess(command, 0, json.dumps(told))

    monkeypatch.setattr(preflight.subprocess, "run", answer)
