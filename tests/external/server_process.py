"""Servers of other projects, each in a process of its own, and what a short run against them leaves."""

from __future__ import annotations

import json
import os
import subprocess
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tailgate.analysis.checks.table import RULES
from tests.fakes.processes import free_port, wait_for
from tests.fakes.whole_run import console_script, last_line, requests

__all__ = ["answers", "assert_counted_alike", "free_port", "run_experiment", "running", "settings"]


# A run of seconds cannot pass the first ones; the others fail where two servers and their load share two processors.
EXCUSED = {rule.name for rule in RULES if rule.fixed_by_length} | {"block autocorrelation"}
EXCUSED |= {"other work", "interference", "load generator"}


def answers(url: str) -> bool:
    """Return whether a GET of `url` is answered with 2xx."""
    try:
        urllib.request.urlopen(url, timeout=5).close()
    except OSError:
        return False
    return True


@contextmanager
def running(
    command: Sequence[str],
    *,
    log: Path,
    ready: Callable[[], bool],
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
) -> Iterator[None]:
    """Run `command` until the block ends, which begins once it is ready."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
    with log.open("wb") as file:
        process = subprocess.Popen(command, env=variables, stdout=file, stderr=file)

    def is_ready() -> bool:
        assert process.poll() is None, log.read_text()[-5000:]
        return ready()

    try:
        wait_for(is_ready, timeout_s, every_s=0.1, otherwise=lambda: log.read_text()[-5000:])
        yield
    finally:
        process.terminate()
        process.wait(60)


def settings(changes: Sequence[str]) -> list[str]:
    """Return the arguments that set `changes`, for a run of 16 seconds."""
    short = ["engine.max_prompt_tokens=256", "engine.max_new_tokens=64", "traffic.length_scale=0.1"]
    short += ["traffic.duration_s=16", "traffic.block_s=2", "machines.reference_s=0"]
    return [word for change in (*short, *changes) for word in ("--set", change)]


def run_experiment(
    arguments: Sequence[str], folder: Path, codes: Sequence[int]
) -> tuple[dict[str, Any], list[dict[str, dict[str, Any]]], Path]:
    """Run the experiment to its end. Return its summary, the rows of each pair by arm, and its directory.

    The run ends with one of `codes`, all of its requests succeed, and it fails only checks that its length excuses.
    """
    done = console_script(["run", *arguments, "--out", "out"], folder)
    line = last_line(done)
    assert done.returncode in codes, done.stderr
    assert line["complete"], done.stderr
    run_dir = folder / line["run_dir"]
    by_pair: dict[str, dict[str, dict[str, Any]]] = {}
    for row in requests(run_dir):
        assert row["status"] == "OK", row
        by_pair.setdefault(row["pair_id"], {})[row["arm"]] = row
    assert len(by_pair) > 10
    summary = json.loads((run_dir / "summary.json").read_text())
    assert [row for row in summary["validity"] if not row["ok"] and row["check"] not in EXCUSED] == []
    return summary, list(by_pair.values()), run_dir


def assert_counted_alike(pairs: Sequence[dict[str, dict[str, Any]]]) -> None:
    """Assert that both servers counted equal prompts, and as many tokens as were asked for, one in each chunk."""
    for pair in pairs:
        assert len(pair) == 2
        assert len({row["prompt_tokens"] for row in pair.values()}) == 1
        assert all(row["output_tokens"] == row["max_tokens"] == len(row["token_ns"]) for row in pair.values())
