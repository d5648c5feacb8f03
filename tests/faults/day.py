"""A day of traffic in one run, compressed: does memory, or anything else, grow, and does its report stay small?

    python -m tests.faults.day --requests 1000000 --rate 600 --out day

One `tailgate run` with cheap paced arms, real Envoy, real Locust, the live page with a listener and the metrics page
with a reader; each of its processes is sampled every second. The last line on stdout is one JSON object. Exit code 0:
nothing grew, all files are closed, no process is left, the summary is complete and the report is small. Otherwise it is
1, and stderr names the misses.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import math
import os
import re
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
from scipy.stats import theilslopes

from tests.fakes.processes import free_port
from tests.fakes.screens import tailgate
from tests.fakes.whole_run import FAKE_ARM, ROOT

LARGEST_REPORT = 6_000_000  # bytes
STEPS = 40  # of the rate over the day
# What may grow by more than 2 %: the page's charts fill up to 900 samples, and an interim analysis holds all records.
PAGE, PAGE_BYTES = "tailgate run", 6 << 20  # whose threads serve the page
LOOKS, LOOKS_BYTES = "analysis.interim", 1000
WARM_SHARE = 0.1  # of the traffic, after which nothing is to grow
MOST_GROWTH = 0.02
_SHORTEST_S = 3.0  # stretch from which a median is taken: a busy machine samples every other second
_GONE_S = 10.0
_ENDING_S = 3.0  # that Locust takes to end
_PAGE = re.compile(r"live page: (http://[!-~]+)")

EXPERIMENT = """\
name = "day"
seed = 24
[model]
id = "random:tiny"
dtype = "float32"
device = "cpu"
[engine]
slots = 8
max_queue = 256
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
design = "mirrored"
duration_s = {duration_s:.3f}
{arrivals}
workload = "conversation"
length_scale = 0.01
timeout_s = 30
workers = {workers}
block_s = {block_s:g}
[gates]
margin = 0.10
metrics = ["ttft", "e2e"]
max_recompiles = 100000
max_stall_s = 5.0
"""


def day_rates(mean: float, duration_s: float) -> list[list[float]]:
    """Return [start in s, requests/s] of each step, as high at the end of the day as after its first tenth."""
    night = 0.05  # of the day
    return [
        [round(step * duration_s / STEPS, 3), round(mean * (1 - 0.4 * math.cos(2 * math.pi * (at - night))), 3)]
        for step, at in ((step, (step + 0.5) / STEPS) for step in range(STEPS))
    ]


def experiment(options: argparse.Namespace) -> str:
    """Return the experiment; with a concurrency the load is closed and may take twice as long."""
    duration_s = options.requests / options.rate
    rates = day_rates(options.rate / 2, duration_s)
    arrivals = f'arrivals = "piecewise"\nrates = {rates}\nturns_mean = 3\nthink_time_s = 5'
    if options.concurrency:
        duration_s *= 2
        count = options.requests // 2
        arrivals = f'arrivals = "closed"\nconcurrency = {options.concurrency}\nnum_prompts = {count}'
    block_s = max(0.5, min(30.0, duration_s / 40))
    return EXPERIMENT.format(duration_s=duration_s, arrivals=arrivals, workers=options.workers, block_s=block_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One process at one instant (seconds since the epoch); memory in bytes, `own` is that of no file (RssAnon)."""

    at_s: float
    rss: int
    own: int
    files: int
    threads: int


def tree(root: int) -> list[psutil.Process]:
    """Return the process and its descendants."""
    try:
        process = psutil.Process(root)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def sample(process: psutil.Process, at_s: float) -> Sample | None:
    try:
        with process.oneshot():
            lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
            rollup = {words[0].rstrip(":"): int(words[1]) for words in map(str.split, lines) if words[-1] == "kB"}
            return Sample(
                at_s=at_s,
                rss=rollup["Rss"] * 1024,
                own=rollup["Anonymous"] * 1024,
                files=process.num_fds(),
                threads=process.num_threads(),
            )
    except (psutil.Error, OSError, KeyError):
        return None


def name_of(command: Sequence[str]) -> str:
    """Name a process by its command line: the module that Python runs, or the program."""
    words = list(command)
    if "--replica" in words[:-1]:
        return f"arm {words[words.index('--replica') + 1]}"
    if "-m" in words[:-1]:
        return words[words.index("-m") + 1]
    if len(words) > 2 and "-c" in words[:3]:
        return "tailgate run"
    return words[0].rpartition("/")[2] if words else "gone"


def growth(samples: Sequence[Sample], figure: str, *, start_s: float, end_s: float) -> dict[str, float] | None:
    """Return the growth from `start_s` to `end_s` after the warm-up; None for a process that did not live so long.

    `first` and `last` are medians over the first and the last tenth. `growth` is their ratio, or the slope of Theil and
    Sen over all samples, whichever is larger.
    """
    warm_s = start_s + WARM_SHARE * (end_s - start_s)
    seen = [item for item in samples if warm_s <= item.at_s <= end_s]
    tenth = max(_SHORTEST_S, (end_s - warm_s) / 10)
    first = [getattr(item, figure) for item in seen if item.at_s <= warm_s + tenth]
    last = [getattr(item, figure) for item in seen if item.at_s >= end_s - tenth]
    if not first or not last:
        return None
    begin, end = statistics.median(first) or 1, statistics.median(last)
    every = max(1, len(seen) // 300)  # of all pairs there would be millions
    slope = theilslopes([getattr(item, figure) for item in seen[::every]], [item.at_s for item in seen[::every]])[0]
    return {"first": begin, "last": end, "growth": round(max(end / begin - 1.0, slope * (end_s - warm_s) / begin), 5)}


def table(kept: Mapping[str, Sequence[Sample]], *, start_s: float, end_s: float) -> list[dict[str, Any]]:
    """Return a row for each process that lived all through the traffic."""
    figures = ("rss", "own", "files", "threads")
    rows = ({key: growth(samples, key, start_s=start_s, end_s=end_s) for key in figures} for samples in kept.values())
    return [{"process": name, **row} for name, row in zip(kept, rows, strict=True) if None not in row.values()]


class Watch:
    """Sample the processes under `root` every second until `stop`."""

    def __init__(self, root: int) -> None:
        self.samples: dict[str, list[Sample]] = {}
        self.processes: dict[tuple[int, float], psutil.Process] = {}
        self._names: dict[tuple[int, float], str] = {}
        self._root = root
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def left(self) -> list[str]:
        """Return the processes that still run after `_GONE_S`."""
        _, alive = psutil.wait_procs(list(self.processes.values()), timeout=_GONE_S)
        return [self._names[process.pid, process.create_time()] for process in alive]

    def _run(self) -> None:
        while not self._stopped.is_set():
            began_s = time.time()
            for process in tree(self._root):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if (seen := sample(process, began_s)) is not None:
                        self.samples.setdefault(self._name(process), []).append(seen)
            self._stopped.wait(max(0.05, 1.0 - (time.time() - began_s)))

    def _name(self, process: psutil.Process) -> str:
        key = process.pid, process.create_time()
        name = name_of(process.cmdline())
        if self._names.get(key, "").rpartition(" #")[0] != name:  # the launcher has become what it launches
            number = sum(other.rpartition(" #")[0] == name for other in self._names.values())
            self._names[key] = f"{name} #{number}"
            self.processes[key] = process
        return self._names[key]


def listen(url: str, path: str, every_s: float, read: list[int]) -> None:
    """Read a stream, or a page every `every_s`, until the server ends."""
    address = http.client.urlsplit(url)
    with contextlib.suppress(OSError, http.client.HTTPException):
        while True:
            connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
            connection.request("GET", path)
            answer = connection.getresponse()
            while piece := answer.read1(65536):
                read[0] += len(piece)
            connection.close()
            if not every_s:
                return
            time.sleep(every_s)


def run_day(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run the day and return what was seen of it."""
    (folder / "day.toml").write_text(experiment(options))
    arm = [sys.executable, str(FAKE_ARM), "--whole", "--token-s", "0", "--stall-s", "0.1"]
    arm += ["--compile-every-s", str(options.compile_s)]
    words = ["run", "day.toml", "--out", "runs", "--set", "machines.reference_s=0", "--json", *options.arguments]
    metrics = f"127.0.0.1:{free_port()}"
    words += ["--metrics", metrics]
    given = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    log = folder / "run.log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", tailgate(*words, arm_command=arm)],
            cwd=folder,
            env={**os.environ, **given},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        watch = Watch(process.pid)
        page_bytes, metrics_bytes = [0], [0]
        while (page := _PAGE.search(log.read_text())) is None and process.poll() is None:
            time.sleep(0.5)
        if page is not None:
            for reader in (
                (page[1], "/events", 0.0, page_bytes),
                (f"http://{metrics}", "/metrics", 5.0, metrics_bytes),
            ):
                threading.Thread(target=listen, args=reader, daemon=True).start()
        output = process.communicate()[0]
        watch.stop()
    if not output:
        raise SystemExit(f"the run broke: {log.read_text()}")
    line = json.loads(output.splitlines()[-1])
    run_dir = folder / line["run_dir"]
    summary = json.loads((run_dir / "summary.json").read_text())
    trial = json.loads((run_dir / "trial-01" / "trial.json").read_text())
    start_s = trial["start_ns"] / 1e9
    loads = [item.at_s for name, kept in watch.samples.items() if name.startswith("locust") for item in kept]
    end_s = min(start_s + trial["duration_s"], max(loads) - _ENDING_S)
    return {
        "planned": trial["planned"] or dict.fromkeys(("eager", "compiled"), options.requests // 2),
        "verdict": line["verdict"],
        "complete": line["complete"],
        "exit_code": process.returncode,
        "requests": {arm["name"]: arm["requests"] for arm in summary["arms"]},
        "recompiles": {arm["name"]: (arm.get("compile") or {}).get("recompiles") for arm in summary["arms"]},
        "traffic_s": round(end_s - start_s, 1),
        "peak_mib": round(max(item.rss for item in watch.samples["tailgate run #0"]) / 2**20, 1),
        "page_bytes": page_bytes[0],
        "metrics_bytes": metrics_bytes[0],
        "processes": table(watch.samples, start_s=start_s, end_s=end_s),
        "left": watch.left(),
        "report_bytes": (run_dir / "report.html").stat().st_size,
    }


def misses(seen: dict[str, Any], *, memory: bool) -> list[str]:
    """Return what is not as it should be; of growth alone with `memory`, which a short run does not show."""
    found = []
    if seen["exit_code"] not in (0, 3, 99) or not seen["complete"]:
        found.append(f"the run ended with {seen['exit_code']}, complete: {seen['complete']}")
    if seen["requests"] != seen["planned"]:
        found.append(f"{seen['requests']} of {seen['planned']} requests are in the summary")
    allowed = {PAGE: PAGE_BYTES, LOOKS: LOOKS_BYTES * sum(seen["requests"].values())}
    for row in seen["processes"] if memory else ():
        most = allowed.get(row["process"].rpartition(" #")[0], 0)
        for figure in ("rss", "own"):
            first, last, growth = (row[figure][key] for key in ("first", "last", "growth"))
            if growth > MOST_GROWTH and growth * first > most:
                found.append(
                    f"{row['process']}: {figure} grew by {growth:.1%} ({first / 2**20:.1f} to {last / 2**20:.1f} MiB)"
                )
    for row in seen["processes"]:
        if row["files"]["last"] > row["files"]["first"]:
            found.append(f"{row['process']}: {row['files']['first']:g} files were open, and {row['files']['last']:g}")
    if seen["left"]:
        found.append(f"processes are left: {', '.join(seen['left'])}")
    if seen["report_bytes"] > LARGEST_REPORT:
        found.append(f"the report has {seen['report_bytes']} bytes, more than {LARGEST_REPORT}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.day", description=__doc__)
    parser.add_argument("--requests", type=int, default=1_000_000, help="to both arms together")
    parser.add_argument("--rate", type=float, default=600.0, help="of both, a second, on average over the day")
    parser.add_argument("--concurrency", type=int, default=0, help="keep so many under way to each arm")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--compile-s", type=float, default=10.0, help="the compiled arm compiles after so long")
    parser.add_argument("--out", type=Path, help="keep everything in this new folder")
    parser.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True, help="nothing may grow")
    parser.add_argument("arguments", nargs="*", help="more of `tailgate run`, after --")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="day-") as temporary:
        folder = options.out or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        seen = run_day(options, folder)
        wrong = misses(seen, memory=options.memory)
        for line in wrong:
            print(line, file=sys.stderr)
        print(json.dumps({**seen, "misses": wrong}), flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
