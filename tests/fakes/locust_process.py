"""Locust as users start it: a process of its own with a locustfile, and the records that it leaves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from analysis.records.schemas import REQUESTS
from analysis.records.tables import read_table

ROOT = Path(__file__).resolve().parents[2]


def locust_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "locust", "--only-summary", *arguments]


def start_locust(*arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        locust_command(*arguments),
        cwd=ROOT,
        env=environment,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def run_locust(*arguments: str) -> tuple[int, str]:
    process = start_locust(*arguments)
    try:
        output, _ = process.communicate(timeout=90)
    finally:
        process.kill()
    return process.returncode, output


def records(directory: Path) -> list[dict[str, Any]]:
    """Return what has been recorded so far; a file that is being written may end anywhere."""
    rows: list[dict[str, Any]] = []
    for path in sorted(directory.glob("requests-*.arrow")):
        rows += read_table(path, REQUESTS)[0].to_pylist()
    return rows
