"""Compiled code that is shipped, as a user ships it: `tailgate precompile`, then a start elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from servers import artifact

ROOT = Path(__file__).resolve().parents[2]
ARM = ("--arm", "compiled-padded", "--slots", "1", "--max-prompt-tokens", "16", "--max-new-tokens", "4")


def tailgate(*words: str, code: int | None = 0, **environment: str) -> Any:
    """What `tailgate` says as JSON, or its stderr where it is to refuse. Any exit code will do where it is None."""
    command = [sys.executable, "-m", "loadtests.commands.main", *words]
    ended = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, timeout=500, check=False, env={**os.environ, **environment}
    )
    assert code in (None, ended.returncode), ended.stderr
    return ended.stderr if code == 2 else json.loads(ended.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shipped") / "padded.compiled"
    said = tailgate("precompile", *ARM, "--out", str(path))
    assert said["artifact"] == str(path)
    assert (said["graphs"], said["compiles"], said["unkept"]) == (2, 2, 0)
    return path


def test_code_that_is_kept_nowhere_is_not_written(tmp_path: Path) -> None:
    setting = ("--set", "compile.background=true")
    said = tailgate("precompile", "--arm", "compiled-naive", *setting, "--out", str(tmp_path / "a"), code=2)
    assert 'arm "compiled-naive": compile.background is true, and code that is compiled so is kept nowhere' in said
    assert not (tmp_path / "a").exists()


def test_what_was_compiled_behind_a_hit_is_counted(tmp_path: Path) -> None:
    from servers.compiler.artifacts import Loaded

    shipped = tmp_path / "ab" / "kernel.so"
    shipped.parent.mkdir()
    shipped.touch()
    written = artifact.Artifact(path="a", checksum="0" * 64, facts={})
    loaded = Loaded(artifact=written, folder=tmp_path, files=frozenset([shipped]))
    (tmp_path / "ab" / "graph.py").touch()
    assert loaded.compiled_anew() == 0
    for name in ("other.so", "kernel.cubin"):
        (tmp_path / "ab" / name).touch()
    assert loaded.compiled_anew() == 2
