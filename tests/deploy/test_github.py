"""The workflow in deploy/github: its steps in order, with a stand-in for tailgate, and how the job ends."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from loadtests.commands.command_line import CommandParser
from loadtests.commands.run import add_arguments

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "github"
WORKFLOW: dict[str, Any] = yaml.safe_load((FOLDER / "rollout.yml").read_text())
STEPS: list[dict[str, Any]] = WORKFLOW["jobs"]["judge"]["steps"]
STAND_IN = """#!/bin/sh
[ "$1 $2 $3 $4 $5" = "run serving/canary.toml --out runs --json" ] || exit 64
LEAVES
exit CODE
"""
JUDGED = """mkdir -p runs/one; echo "# report" > runs/one/report.md
echo '{"verdict": "X", "run_dir": "runs/one"}'"""
BROKEN = """mkdir -p runs/one
echo '{"verdict": null, "run_dir": "runs/one", "report": null}'"""
REFUSED = "echo 'tailgate: canary.toml does not exist' >&2"


def outputs(folder: Path) -> dict[str, str]:
    lines = (folder / "output").read_text().splitlines() if (folder / "output").exists() else []
    return dict(line.split("=", 1) for line in lines)


def filled(text: str, folder: Path) -> str:
    return re.sub(r"\$\{\{ steps\.run\.outputs\.(\w+) \}\}", lambda match: outputs(folder).get(match[1], ""), str(text))


def asks(step: dict[str, Any], folder: Path, *, succeeded: bool) -> bool:
    """Whether GitHub runs the step after steps that all `succeeded`, or not."""
    *first, last = str(step.get("if", "")).split(" && ")
    wanted = re.fullmatch(r"steps\.run\.outputs\.(\w+)", last)
    always = "always()" in (*first, last)
    return (succeeded or always) and (wanted is None or bool(outputs(folder).get(wanted[1])))


def job(folder: Path, code: int, leaves: str = JUDGED, **changed: str) -> tuple[bool, str]:
    """Whether the job succeeds, and what its steps printed; `tailgate` leaves that and ends with `code`."""
    program = folder / ".tailgate" / "bin" / "tailgate"
    program.parent.mkdir(parents=True)
    program.write_text(STAND_IN.replace("LEAVES", leaves).replace("CODE", str(code)))
    program.chmod(0o755)
    succeeded, printed = True, ""
    for step in STEPS:
        if "run" not in step or step["name"] == "Install" or not asks(step, folder, succeeded=succeeded):
            continue
        variables = {
            **os.environ,
            **WORKFLOW["env"],
            **{name: filled(value, folder) for name, value in step.get("env", {}).items()},
            **changed,
            "GITHUB_OUTPUT": str(folder / "output"),
            "GITHUB_STEP_SUMMARY": str(folder / "summary.md"),
        }
        done = subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", step["run"]],
            cwd=folder,
            env=variables,
            capture_output=True,
            text=True,
            check=False,
        )
        succeeded &= done.returncode == 0
        printed += done.stdout
    return succeeded, printed


@pytest.mark.parametrize(
    ("code", "succeeds", "says"),
    [(0, True, "PASS"), (99, False, "FAIL"), (3, False, "INCONCLUSIVE"), (1, False, "broke (exit code 1)")],
)
def test_the_job_ends_as_the_verdict_does(code: int, succeeds: bool, says: str, tmp_path: Path) -> None:
    succeeded, printed = job(tmp_path, code)
    assert succeeded is succeeds
    assert says in printed
    assert (tmp_path / "summary.md").read_text() == "# report\n", "whatever the verdict"
    assert outputs(tmp_path) == {"code": str(code), "report": "runs/one"}


@pytest.mark.parametrize(("code", "leaves"), [(1, BROKEN), (2, REFUSED), (1, REFUSED)])
def test_a_run_that_broke_says_so_and_nothing_else_fails_of_it(code: int, leaves: str, tmp_path: Path) -> None:
    succeeded, printed = job(tmp_path, code, leaves)
    assert not succeeded
    assert printed == f"::error::the run itself broke (exit code {code})\n"
    assert outputs(tmp_path) == {"code": str(code)}
    assert not (tmp_path / "summary.md").exists()


def test_what_a_run_left_is_kept_however_it_ended() -> None:
    (keep,) = [step for step in STEPS if "upload-artifact" in step.get("uses", "")]
    assert (keep["if"], keep["with"]["path"]) == ("always()", "runs")


def test_the_token_reads_the_code_and_writes_checks_alone() -> None:
    assert WORKFLOW["permissions"] == {"contents": "read", "checks": "write"}
    assert "pull_request_target" not in str(WORKFLOW), "a fork's code would run with the repository's secrets"


def test_a_pull_request_that_waits_is_not_cancelled_by_another() -> None:
    assert "${{ github.ref }}" in WORKFLOW["concurrency"]["group"]


def test_an_undecided_run_lets_the_merge_pass_where_it_is_told_to(tmp_path: Path) -> None:
    succeeded, printed = job(tmp_path, 3, HOLD_WHEN_INCONCLUSIVE="0")
    assert succeeded
    assert "::warning::INCONCLUSIVE" in printed


def test_its_command_line_is_one_of_tailgates() -> None:
    parser = CommandParser(prog="run")
    add_arguments(parser)
    (line,) = re.findall(r"bin/tailgate run (.+) > line\.json", str(STEPS))
    parser.parse_args(line.replace('"$EXPERIMENT"', "demo").split())


def test_the_page_names_every_exit_code() -> None:
    page = (FOLDER / "README.md").read_text()
    assert all(f"| {code} " in page for code in ("0 PASS", "3 INCONCLUSIVE", "99 FAIL", "1, 2"))
