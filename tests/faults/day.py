"""A day of traffic in one run: `python -m tests.faults.day --requests 1000000`. What grows?

Two paced arms, of which one compiles every `--compile-s`, get `--rate` requests/s each. Every process of the run is
sampled each second. The exit status is 0 where the summary is complete, no process is left and nothing grew; stderr
names the misses.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.fakes.whole_run import ROOT, tailgate

WARM_SHARE = 0.1  # of the traffic, after which nothing is to grow
MOST_GROWTH = 0.02
# What may grow by more: the page's charts fill up to 900 samples, and an interim analysis holds all records.
PAGE_BYTES = 6 << 20
INTERIM_BYTES = 1000  # a request
_GONE_S = 10.0

EXPERIMENT = """\
name = "day"
seed = 24
[model]
dtype = "float32"
device = "cpu"
[engine]
max_prompt_tokens = 192
max_new_tokens = 4
[[arms]]
name = "eager"
preset = "eager"
control = true
[[arms]]
name = "compiled"
preset = "compiled-padded"
[traffic]
duration_s = {duration_s}
rate = {rate}
length_scale = 0.01
timeout_s = 30
workers = 2
block_s = {block_s:g}
[gates]
max_recompiles = 100000
[machines]
reference_s = 0
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A process at one instant: seconds since the epoch, memory of no file in bytes, and open files."""

    at_s: float
    memory: int
    files: int


def name_of(command: Sequence[str]) -> str:
    """Name a process by its command line: the module that Python runs, or the program."""
    words = list(command)
    if "--replica" in words[:-1]:
        return f"arm {words[words.index('--replica') + 1]}"
    if "-m" in words[:-1]:
        return words[words.index("-m") + 1]
    if "-c" in words[:3]:
        return "tailgate run"
    return words[0].rpartition("/")[2] if words else "gone"


class Watch:
    """Sample the processes under `root` every second until `stop`."""

    def __init__(self, root: int) -> None:
        self.samples: dict[str, list[Sample]] = {}
        self._root = root
        self._seen: dict[psutil.Process, str] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> list[str]:
        """Return the processes that still run after `_GONE_S`."""
        self._stopped.set()
        self._thread.join()
        _, alive = psutil.wait_procs(list(self._seen), timeout=_GONE_S)
        return [self._seen[process] for process in alive]

    def _run(self) -> None:
        while not self._stopped.wait(1.0):
            with contextlib.suppress(psutil.Error):
                above = psutil.Process(self._root)
                for process in (above, *above.children(recursive=True)):
                    self._sample(process)

    def _sample(self, process: psutil.Process) -> None:
        with contextlib.suppress(psutil.Error, OSError):
            memory = process.memory_full_info().uss
            sample = Sample(at_s=time.time(), memory=memory, files=process.num_fds())
            name = f"{name_of(process.cmdline())} #{process.pid}"
            self._seen[process] = name  # the launcher becomes what it launches
            self.samples.setdefault(name, []).append(sample)


def growth(samples: Sequence[Sample], figure: str, *, start_s: float, end_s: float) -> tuple[float, float] | None:
    """Return the medians of the first and the last tenth after the warm-up; None for a process that was not there."""
    warm_s = start_s + WARM_SHARE * (end_s - start_s)
    tenth = max(3.0, (end_s - warm_s) / 10)  # a busy machine samples every other second
    first = [getattr(item, figure) for item in samples if warm_s <= item.at_s <= warm_s + tenth]
    last = [getattr(item, figure) for item in samples if end_s - tenth <= item.at_s <= end_s]
    return (statistics.median(first), statistics.median(last)) if first and last else None


def run_day(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run the day in the folder and return what was seen of it."""
    duration_s = options.requests / 2 / options.rate
    block_s = max(0.5, min(30.0, duration_s / 40))
    (folder / "day.toml").write_text(EXPERIMENT.format(rate=options.rate, duration_s=duration_s, block_s=block_s))
    flags = ("--whole", "--token-s", "0", "--stall-s", "0.1", "--compile-every-s", str(options.compile_s))
    log = folder / "run.log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            tailgate("run", "day.toml", "--out", "runs", "--json", flags=flags),
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        watch = Watch(process.pid)
        output = process.communicate()[0]
        left = watch.stop()
    if not output:
        raise SystemExit(f"the run broke: {log.read_text()}")
    line = json.loads(output.splitlines()[-1])
    run_dir = folder / line["run_dir"]
    summary = json.loads((run_dir / "summary.json").read_text())
    trial = json.loads((run_dir / "trial-01" / "trial.json").read_text())
    start_s = trial["start_ns"] / 1e9
    end_s = max(item.at_s for name, kept in watch.samples.items() if name.startswith("locust") for item in kept)
    return {
        **{"complete": line["complete"], "exit_code": process.returncode, "left": left},
        "planned": trial["planned"],
        "requests": {arm["name"]: arm["requests"] for arm in summary["arms"]},
        "recompiles": {arm["name"]: (arm.get("compile") or {}).get("recompiles") for arm in summary["arms"]},
        "processes": {
            name: {figure: growth(kept, figure, start_s=start_s, end_s=end_s) for figure in ("memory", "files")}
            for name, kept in watch.samples.items()
        },
    }


def misses(seen: Mapping[str, Any], *, memory: bool) -> list[str]:
    """Return what is not as it should be; growth of memory only with `memory`, as a short run does not show it."""
    found = []
    if seen["exit_code"] not in (0, 3, 99) or not seen["complete"]:
        found.append(f"the run ended with {seen['exit_code']}, complete: {seen['complete']}")
    if seen["requests"] != seen["planned"]:
        found.append(f"{seen['requests']} of {seen['planned']} requests are in the summary")
    allowed = {"tailgate run": PAGE_BYTES, "tailgate.analysis.interim": INTERIM_BYTES * sum(seen["requests"].values())}
    for name, figures in seen["processes"].items():
        if None in figures.values():
            continue  # it was not there all the time
        (first, last), (files, files_last) = figures["memory"], figures["files"]
        grown = last - first
        if memory and grown > max(MOST_GROWTH * first, allowed.get(name.rpartition(" #")[0], 0)):
            found.append(f"{name}: memory grew by {grown / first:.1%} ({first / 2**20:.1f} to {last / 2**20:.1f} MiB)")
        if files_last > files:
            found.append(f"{name}: {files:g} files were open, and {files_last:g}")
    if seen["left"]:
        found.append(f"processes are left: {', '.join(seen['left'])}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.day", description=__doc__)
    parser.add_argument("--requests", type=int, default=1_000_000, help="to both arms together, on average")
    parser.add_argument("--rate", type=float, default=300.0, help="requests/s to each arm")
    parser.add_argument("--compile-s", type=float, default=10.0, help="the compiled arm compiles after so long")
    parser.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True, help="nothing may grow")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="day-") as folder:
        seen = run_day(options, Path(folder))
    wrong = misses(seen, memory=options.memory)
    for line in wrong:
        print(line, file=sys.stderr)
    print(json.dumps({**seen, "misses": wrong}), flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
