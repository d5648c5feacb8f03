"""The workflow for GitHub installs tailgate from a path or a URL: nobody here owns the name in the public index."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

WORKFLOW: dict[str, Any] = yaml.safe_load(
    (Path(__file__).resolve().parents[2] / "deploy" / "github" / "rollout.yml").read_text()
)


def installed(source: str, folder: Path) -> int:
    """The exit code of the step, with a program in place of Python."""
    (step,) = [step for step in WORKFLOW["jobs"]["judge"]["steps"] if step.get("name") == "Install"]
    (folder / "python3").write_text('#!/bin/sh\n[ -x .tailgate/bin/python ] || { mkdir -p .tailgate/bin; cp "$0" .tailgate/bin/python; }\n')
    (folder / "python3").chmod(0o755)
    environment = {"PATH": f"{folder}:/usr/bin:/bin", "TAILGATE": source}
    return subprocess.run(["bash", "-e", "-c", step["run"]], cwd=folder, env=environment, check=False).returncode


@pytest.mark.parametrize(
    ("source", "code"),
    [("tailgate", 2), ("", 2), ("./vendor/tailgate", 0), ("git+https://host/org/tailgate@0e45b0b0", 0)],
)
def test_a_bare_name_is_refused(source: str, code: int, tmp_path: Path) -> None:
    assert installed(source, tmp_path) == code


def test_the_workflow_as_it_is_names_no_index() -> None:
    assert "/" in WORKFLOW["env"]["TAILGATE"]
