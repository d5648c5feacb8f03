"""A day of traffic in one run, compressed: does anything grow with it, and is what it leaves small enough to read?

    python -m tests.faults.day --requests 1000000 --rate 600 --out day

One `tailgate run` with paced arms that cost little, real Envoy, real Locust, the live page with a listener and the page
for Prometheus with a reader. Each process of it is sampled every second. The last line on stdout is one JSON object;
exit code 0: nothing grew, all files are closed, no process is left, the summary is complete and the report is small and
soon drawn; 1: one of these is not so, and stderr says which.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.fakes.browser import CHROMIUM
from tests.fakes.terminal import tailgate
from tests.fakes.users_house import free_port
from tests.faults.drawing import LARGEST_REPORT, LONGEST_DRAWING_S, drawn_s
from tests.faults.process_samples import MOST_GROWTH, Sample, name_of, sample, table, tree

ROOT = Path(__file__).resolve().parents[2]
STEPS = 40  # of the rate over the day
# What may grow by more than 2 %: the page's charts fill up to 900 samples, and whoever looks at a run that goes on
# holds all of its records, so many bytes a request.
PAGE, PAGE_BYTES = "loadtests.page", 6 << 20
LOOKS, LOOKS_BYTES = "analysis.looks", 1000
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
    """[start in s, requests/s] of each step: least at night, most in the afternoon, and as much at the end of the day
    as after its first tenth, so that what is held at these two may be compared."""
    night = 0.05  # of the day
    return [
        [round(step * duration_s / STEPS, 3), round(mean * (1 - 0.4 * math.cos(2 * math.pi * (at - night))), 3)]
        for step, at in ((step, (step + 0.5) / STEPS) for step in range(STEPS))
    ]


def experiment(*, requests: int, rate: float, workers: int, concurrency: int = 0) -> str:
    """The experiment file: `requests` to both arms together at `rate` a second on average; with a `concurrency` so many
    under way to each arm all the time, for at most twice as long."""
    duration_s = requests / rate
    arrivals = f'arrivals = "piecewise"\nrates = {day_rates(rate / 2, duration_s)}\nturns_mean = 3\nthink_time_s = 5'
    if concurrency:
        duration_s *= 2
        arrivals = f'arrivals = "closed"\nconcurrency = {concurrency}\nnum_prompts = {requests // 2}'
    return EXPERIMENT.format(
        duration_s=duration_s, arrivals=arrivals, workers=workers, block_s=max(0.5, min(30.0, duration_s / 40))
    )


class Watch:
    """The processes under `root`, sampled every second until `stop`."""

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

    def left(self, within_s: float = _GONE_S) -> list[str]:
        """Who is still there after so long."""
        _, alive = psutil.wait_procs(list(self.processes.values()), timeout=within_s)
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
    """Whoever shows the run on a screen all day: reads the stream, or the page again and again, until it is gone."""
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
    """The day was run; what was seen of it."""
    (folder / "day.toml").write_text(
        experiment(
            requests=options.requests, rate=options.rate, workers=options.workers, concurrency=options.concurrency
        ),
        encoding="utf-8",
    )
    arm = [sys.executable, "-m", "tests.faults.quick_arm", "--compile-s", str(options.compile_s)]
    words = ["run", "day.toml", "--out", "runs", "--set", "bed.reference_s=0", "--json", *options.arguments]
    metrics = f"127.0.0.1:{free_port()}"
    words += ["--metrics", metrics] if options.metrics else []
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    log = folder / "run.log"
    began_s = time.time()
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", tailgate(*words, arm_command=arm)],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        watch = Watch(process.pid)
        page_bytes, metrics_bytes = [0], [0]
        listening = False
        while process.poll() is None:
            time.sleep(0.5)
            if not listening and (page := _PAGE.search(log.read_text())):
                listening = True
                readers = [(page[1], "/events", 0.0, page_bytes)]
                readers += [(f"http://{metrics}", "/metrics", 5.0, metrics_bytes)] if options.metrics else []
                for reader in readers:
                    threading.Thread(target=listen, args=reader, daemon=True).start()
        output = process.communicate()[0]
        ended_s = time.time()
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
    after = [item for item in watch.samples["tailgate run #0"] if item.at_s > end_s]
    before = [item for item in watch.samples["tailgate run #0"] if start_s < item.at_s <= end_s]
    return {
        "asked": options.requests,
        "planned": trial["planned"] or dict.fromkeys(("eager", "compiled"), options.requests // 2),
        "verdict": line["verdict"],
        "complete": line["complete"],
        "exit_code": process.returncode,
        "requests": {arm["name"]: arm["requests"] for arm in summary["arms"]},
        "errors": {arm["name"]: arm.get("errors") for arm in summary["arms"]},
        "recompiles": {arm["name"]: (arm.get("compile") or {}).get("recompiles") for arm in summary["arms"]},
        "start_to_end_s": round(ended_s - began_s, 1),
        "traffic_s": round(end_s - start_s, 1),
        "after_traffic_s": round(ended_s - end_s, 1),
        "analysis_mib": round((max(item.rss for item in after) - before[-1].rss) / 2**20, 1) if after else None,
        "peak_mib": round(max(item.rss for item in before + after) / 2**20, 1),
        "page_bytes": page_bytes[0],
        "metrics_bytes": metrics_bytes[0],
        "processes": table(watch.samples, start_s=start_s, end_s=end_s),
        "left": watch.left(),
        "run_dir_bytes": sum(path.stat().st_size for path in run_dir.rglob("*") if path.is_file()),
        "report": str(run_dir / "report.html"),
        "report_bytes": (run_dir / "report.html").stat().st_size,
        "samples": {
            name: [[getattr(s, key) for key in s.__slots__] for s in kept] for name, kept in watch.samples.items()
        },
    }


def misses(seen: dict[str, Any], *, memory: bool) -> list[str]:
    """What is not as it should be, in words. Without `memory` nothing is said of growth: too short a run shows none."""
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
    if seen["drawn_s"] and min(seen["drawn_s"]) > LONGEST_DRAWING_S:
        found.append(f"the report is drawn in {min(seen['drawn_s']):.2f} s, more than {LONGEST_DRAWING_S:g} s")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.day", description=__doc__)
    parser.add_argument("--requests", type=int, default=1_000_000, help="to both arms together")
    parser.add_argument("--rate", type=float, default=600.0, help="of both, a second, on average over the day")
    parser.add_argument(
        "--concurrency", type=int, default=0, help="keep so many under way to each arm, as fast as they go"
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--compile-s", type=float, default=10.0, help="the compiled arm compiles after so long")
    parser.add_argument("--out", type=Path, help="keep everything in this new folder")
    parser.add_argument("--no-metrics", dest="metrics", action="store_false")
    parser.add_argument("--drawing", action=argparse.BooleanOptionalAction, default=CHROMIUM is not None)
    parser.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True, help="nothing may grow")
    parser.add_argument("arguments", nargs="*", help="more of `tailgate run`, after --")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="day-") as temporary:
        folder = options.out or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        seen = run_day(options, folder)
        seen["drawn_s"] = drawn_s(Path(seen["report"]), Path(temporary) / "browser") if options.drawing else []
        (folder / "samples.json").write_text(json.dumps(seen.pop("samples")))
        wrong = misses(seen, memory=options.memory)
        for line in wrong:
            print(line, file=sys.stderr)
        (folder / "day.json").write_text(json.dumps({**seen, "misses": wrong}, indent=2))
        print(json.dumps({**seen, "misses": wrong}), flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
