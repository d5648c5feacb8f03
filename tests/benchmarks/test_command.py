from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.command import run_command
from benchmarks.environment import ROOT
from servers.fields import ConfigError

SCRIPTS = ("analysis.py", "damage.py", "generator.py", "judging.py", "recorder.py", "splitter.py")


def test_every_script_starts_from_anywhere_by_its_path(tmp_path: Path) -> None:
    commands = [[sys.executable, str(ROOT / "benchmarks" / script), "--help"] for script in SCRIPTS]
    processes = [
        subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for command in commands
    ]
    errors = {script: process.communicate()[1] for script, process in zip(SCRIPTS, processes, strict=True)}
    assert errors == dict.fromkeys(SCRIPTS, "")


def test_bad_usage_is_one_line_and_the_result_another(capsys: pytest.CaptureFixture[str]) -> None:
    def measure(arguments: object) -> dict[str, object]:
        if arguments:
            raise ConfigError("two\nlines")
        return {"ok": False}

    assert run_command("some.py", measure, ["bad"]) == 2
    assert run_command("some.py", measure, []) == 1
    captured = capsys.readouterr()
    assert captured.out == '{"ok": false}\n'
    assert captured.err.startswith("benchmarks/some.py: two")
    assert captured.err.count("\n") == 1
