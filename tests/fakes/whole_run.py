"""Run tailgate as a user does, in its own process, with paced fake arms."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from analysis.records.schemas import REQUESTS
from analysis.records.tables import read_table

ROOT = Path(__file__).resolve().parents[2]


FAKE_ARM = ROOT / "tests" / "fakes" / "arm.py"


SCRIPT = Path(sys.executable).with_name("tailgate")


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280, check=False
    )


# A machine that is busy with other tests sends late, and of the slowest 1 % it may make one bunch.
LOOSE = ["--set", "gates.max_generator_lag_ms=2000", "--set", "gates.margin=3.0"]


LOOSE += ["--set", "slo={p50_ttft_ms=2000,p50_e2e_ms=6000}"]


def with_fake_arms(arguments: list[str], folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    if not any("bed.reference_s" in argument for argument in arguments):
        arguments = [*arguments, "--set", "bed.reference_s=0"]  # it would take longer than the fakes
    code = (
        "import sys; from loadtests.commands.main import main; "
        f"sys.exit(main({arguments!r}, arm_command={[sys.executable, str(FAKE_ARM), *flags]!r}))"
    )
    return run([sys.executable, "-c", code], folder)


def console_script(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    start = [str(SCRIPT)] if SCRIPT.exists() else [sys.executable, "-m", "loadtests.commands.main"]
    return run([*start, *arguments], folder)


def last_line(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    line: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return line


def requests(run_dir: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for path in sorted(run_dir.glob("trial-*/requests*.arrow")):
        rows += read_table(path, REQUESTS)[0].to_pylist()
    return rows


def ramp_with(
    tmp_path: Path, candidate: str, *more: str, flags: Sequence[str] = ()
) -> tuple[dict[str, Any], Path, list[dict[str, Any]]]:
    settings = ["--out", "out", "--seed", "3", "--set", f"ramp.candidate={candidate}", "--set", "traffic.block_s=1"]
    settings += ["--set", "traffic.rate=40", "--set", "gates.cold_s=1", "--set", "trials.starting_at_once=2"]
    done = with_fake_arms(["ramp", "demo", *settings, *more], tmp_path, *flags)
    line = last_line(done)
    run_dir = tmp_path / line["run_dir"]
    return line, run_dir, [json.loads(text) for text in (run_dir / "weights.jsonl").read_text().splitlines()]
