"""What grows over a day of traffic in one run: two thousand requests here, a million of them by `make day`.

TAILGATE_DAY sets the number of requests, to both arms together. The memory of a short run is not held to a limit.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tailgate.loadtests.experiments.reading import to_toml
from tests.fakes.whole_run import environment, experiment, last_line, summary_of, tailgate, trial_facts

REQUESTS = int(os.environ.get("TAILGATE_DAY", "2000"))
RATE = 300.0  # to each arm
WARM_SHARE, MOST_GROWTH = 0.1, 0.02
# The page's charts fill up to 900 samples, and an interim analysis holds all records.
PAGE_BYTES, INTERIM_BYTES = 6 << 20, 1000 * REQUESTS
FLAGS = ("--whole", "--token-s", "0", "--stall-s", "0.1", "--compile-every-s", "10" if REQUESTS > 10_000 else "1")


class Watch(threading.Thread):
    """Samples the processes under `root` each second: the time, memory of no file in bytes, and open files."""

    def __init__(self, root: int) -> None:
        super().__init__(daemon=True)
        self.root = psutil.Process(root)
        self.ended = threading.Event()
        self.samples: dict[psutil.Process, list[tuple[float, int, int]]] = {}
        self.names: dict[psutil.Process, str] = {}
        self.start()

    def run(self) -> None:
        while not self.ended.wait(1.0):
            with suppress(psutil.Error):
                for process in (self.root, *self.root.children(recursive=True)):
                    with suppress(psutil.Error, OSError):
                        sample = time.time(), process.memory_full_info().uss, process.num_fds()
                        self.samples.setdefault(process, []).append(sample)
                        self.names[process] = " ".join(process.cmdline())  # the launcher becomes what it launches


def growth(samples: Any, start_s: float, end_s: float) -> Any:
    """Return the medians of (memory, files) over the first and the last tenth after the warm-up, shape (2, 2).

    None for a process that was not there all the time.
    """
    start_s += WARM_SHARE * (end_s - start_s)
    at_s, tenth_s = np.array(samples)[:, 0], max(3.0, (end_s - start_s) / 10)  # a busy machine samples less often
    parts = [np.array(samples)[(at_s >= s) & (at_s <= s + tenth_s), 1:] for s in (start_s, end_s - tenth_s)]
    return np.array([np.median(part, axis=0) for part in parts]) if all(map(len, parts)) else None


@pytest.mark.timeout(7200)
def test_a_day_leaves_no_process_and_neither_memory_nor_open_files_grow(tmp_path: Path) -> None:
    duration_s = REQUESTS / 2 / RATE
    arms = [{"name": "eager", "preset": "eager", "control": True}, {"name": "compiled", "preset": "compiled-padded"}]
    traffic = {"duration_s": duration_s, "rate": RATE, "length_scale": 0.01, "timeout_s": 30, "workers": 2}
    traffic["block_s"] = max(0.5, min(30.0, duration_s / 40))
    what = experiment(arms=arms, engine={"max_new_tokens": 4}, traffic=traffic, gates={"max_recompiles": 100_000})
    (tmp_path / "day.toml").write_text(to_toml(what))
    with (tmp_path / "run.log").open("w") as log:
        run = subprocess.Popen(
            tailgate("run", "day.toml", "--json", flags=FLAGS),
            cwd=tmp_path,
            env={**environment(), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        watch = Watch(run.pid)
        output, _ = run.communicate()
    watch.ended.set()
    watch.join()
    _, left = psutil.wait_procs(list(watch.samples), timeout=10)
    assert [watch.names[process] for process in left] == []
    assert output, (tmp_path / "run.log").read_text()
    line = last_line(subprocess.CompletedProcess([], run.returncode, output))
    assert (line["complete"], run.returncode in (0, 3, 99)) == (True, True)
    run_dir = tmp_path / line["run_dir"]
    summary, trial = summary_of(run_dir), trial_facts(run_dir)
    assert {arm["name"]: arm["requests"] for arm in summary["arms"]} == trial["planned"]
    recompiles = {arm["name"]: arm["compile"]["recompiles"] for arm in summary["arms"]}
    assert (recompiles["eager"], recompiles["compiled"] >= 1) == (0, True)
    begin_s = trial["start_ns"] / 1e9
    grown: list[str] = []
    seen: list[str] = []
    for process, samples in watch.samples.items():
        found, name = growth(samples, begin_s, begin_s + duration_s), watch.names[process]
        if found is None:
            continue
        seen.append(name)
        (first, files), (last, files_last) = found.tolist()
        allowed = INTERIM_BYTES if "tailgate.analysis.interim" in name else PAGE_BYTES * (process.pid == run.pid)
        if REQUESTS >= 100_000 and last - first > max(MOST_GROWTH * first, allowed):
            grown.append(f"{name}: memory grew from {first / 2**20:.1f} to {last / 2**20:.1f} MiB")
        if files_last > files:
            grown.append(f"{name}: {files:g} files were open, and {files_last:g}")
    assert grown == []
    for wanted in ("run", "envoy", "locust", "eager-0", "compiled-0"):
        assert any(wanted in name for name in seen), seen
