"""What recording costs: records appended at a steady rate as the generator does, and what came of them.

    python benchmarks/recorder.py [--rate 10000] [--seconds 60] [--tokens 16]

The last line on stdout is one JSON object: CPU of the recorder as a share of a core (the whole process less a run that
paces the same and records nothing), records lost, memory of this process over time, and the longest time that one
append or flush held up everything else.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gevent
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from analysis.records.schemas import REQUESTS
from analysis.records.tables import read_table
from loadtests.generator.load_log import LoadLog
from loadtests.generator.own_cost import GarbageWindow
from loadtests.generator.record import RequestRecord
from loadtests.generator.recorder import RequestRecorder, record_file
from servers.clock import now_ns

_TICK_S = 0.002


def measure(*, rate: int, seconds: float, tokens: int, folder: Path) -> dict[str, Any]:
    """The figures of one run, for JSON. `folder` takes a file of some 400 bytes a record."""
    window = GarbageWindow()
    window.open()  # as the generator does
    pacing = partial(_paced, each_second=lambda: None, rate=rate, seconds=min(seconds, 10.0))
    idle = pacing(lambda number: None).cpu_share
    recorder = RequestRecorder(record_file(folder / "requests-0.arrow", remedy=""))
    log = LoadLog(folder, worker=0, planned=None, arms=("eager", "compiled"), recorder=recorder)
    log.start_ns = now_ns()
    times = np.arange(1, tokens + 1, dtype=np.int64) * 20_000_000

    def record(number: int) -> None:
        row = _record(number, times)
        log.begun(row.arm)
        log.lag.add(row.sent_ns - row.scheduled_ns)
        log.ended(row, row.arm)
        recorder.append(row)

    def each_second() -> None:
        recorder.flush()
        log.refresh()

    # The rows themselves are made by the generator: their cost is measured apart and not the recorder's.
    made = pacing(lambda number: _record(number, times)).cpu_share
    run = _paced(record, each_second, rate=rate, seconds=seconds)
    recorder.close()
    window.close()
    read = read_table(folder / "requests-0.arrow", REQUESTS)[0].num_rows
    return {
        "benchmark": "recorder",
        "rate": rate,
        "seconds": round(run.seconds, 2),
        "tokens": tokens,
        "appended": run.appended,
        "read_back": read,
        "lost": run.appended - read,
        "bytes_per_record": round((folder / "requests-0.arrow").stat().st_size / max(1, read), 1),
        "recorder_cpu_share": round(run.cpu_share - made, 4),
        "rows_cpu_share": round(made - idle, 4),
        "pacing_cpu_share": round(idle, 4),
        "longest_hold_ms": round(run.longest_s * 1e3, 3),
        "late_ticks_p99_ms": round(float(np.percentile(run.late_s, 99)) * 1e3, 3),
        "rss_mib": [round(value, 1) for value in run.rss_mib],
    }


class _Paced(NamedTuple):
    """What a paced run took."""

    appended: int
    seconds: float
    cpu_share: float
    longest_s: float
    late_s: Sequence[float]
    rss_mib: Sequence[float]


def _record(number: int, times: Any) -> RequestRecord:
    at_ns = now_ns()
    arm = ("eager", "compiled")[number & 1]
    name = f"1-{number >> 1}"
    return RequestRecord(
        f"{name}-{arm}",
        name,
        1,
        arm,
        f"{arm}-0",
        name,
        at_ns - 400_000_000,
        at_ns - 399_900_000,
        at_ns - 390_000_000,
        at_ns,
        "OK",
        None,
        700,
        len(times),
        len(times),
        times,
        "measure",
        (0, number, at_ns - 399_000_000, at_ns - 1_000_000),
    )


def _paced(act: Callable[[int], object], each_second: Callable[[], None], *, rate: int, seconds: float) -> _Paced:
    """What `rate` calls of `act` a second took, for `seconds`, and one of `each_second`."""
    appended, longest_s, late_s, rss_mib = 0, 0.0, array("d"), []
    cpu, began = time.process_time(), time.perf_counter()
    second = 0
    while (elapsed := time.perf_counter() - began) < seconds:
        due = int(elapsed * rate)
        while appended < due:
            at = time.perf_counter()
            act(appended)
            longest_s = max(longest_s, time.perf_counter() - at)
            appended += 1
        if elapsed >= second + 1:
            second += 1
            at = time.perf_counter()
            each_second()
            longest_s = max(longest_s, time.perf_counter() - at)
            if second % max(1, int(seconds) // 10) == 0:
                rss_mib.append(_rss_mib())
        asleep = time.perf_counter()
        gevent.sleep(_TICK_S)
        late_s.append(time.perf_counter() - asleep - _TICK_S)
    taken_s = time.perf_counter() - began
    return _Paced(appended, taken_s, (time.process_time() - cpu) / taken_s, longest_s, late_s, rss_mib)


def _rss_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description="What recording costs.")
    parser.add_argument("--rate", type=int, default=10_000, help="records per second (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of the run (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=16, help="tokens of each answer (default %(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tailgate-recorder-") as folder:
        figures = measure(rate=options.rate, seconds=options.seconds, tokens=options.tokens, folder=Path(folder))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
