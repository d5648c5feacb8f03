from __future__ import annotations

import json
import subprocess
import sys

from tests.loadtests.commands.test_main import ROOT


def test_the_command_prints_tables_and_one_json_line() -> None:
    command = [sys.executable, "-m", "loadtests.commands.main", "inspect", "--arm", "eager", "--slots", "2"]
    command += ["--shapes", "prefill 1x12, decode 2@30"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    found = json.loads(lines[-1])
    assert [(row["shape"], row["outcome"]) for row in found["shapes"]] == [
        ("prefill 1x12", "off"),
        ("decode 2@30", "off"),
    ]
    assert lines[-2] == "This arm compiles nothing: all 2 shapes run eagerly."
    assert found["startup_ns"]["load"] > 0
    assert {"weights", "kv_cache", "process_peak"} <= set(found["memory_bytes"])
    assert "loading random:tiny" in ended.stderr
