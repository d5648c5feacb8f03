"""A day that nobody waited for: records as long as those of a real one, judged and drawn.

    python -m tests.faults.made_up_day --requests 1000000 --hours 24

The compressed day of tests/faults/day.py has as many requests in less time. What grows with the time itself, a block
each 30 s and samples of the machines each second, is here: requests, compiles and two cards as a run of two mirrored
arms records them. The last line on stdout is one JSON object; exit code 1: the report is too large, or drawn too late.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from analysis.records.schemas import COMPILE_EVENTS
from analysis.records.tables import RecordWriter
from benchmarks.analysis import write_run
from benchmarks.simulation.records import EPOCH_NS
from tests.fakes.beds import FakeBed
from tests.fakes.browser import CHROMIUM
from tests.faults.drawing import LARGEST_REPORT, LONGEST_DRAWING_S, drawn_s

ROOT = Path(__file__).resolve().parents[2]
COMPILE_EVERY_S = 60


def write_day(directory: Path, *, requests: int, seconds: int) -> None:
    """`directory` holds the run: 30 s blocks, a compile while serving each minute, and what two cards did."""
    write_run(directory, requests=requests, tokens=0, seed=24, seconds=seconds, together=30)
    folder = directory / "trial-01"
    arms = ("eager", "compiled")
    with RecordWriter(folder / "compile_events.arrow", COMPILE_EVENTS) as writer:
        for number in range(seconds // COMPILE_EVERY_S):
            start_ns = EPOCH_NS + number * COMPILE_EVERY_S * 1_000_000_000
            writer.append(
                {
                    "event_id": f"1-compiled-0-{number}",
                    "trial": 1,
                    "arm": "compiled",
                    "replica": "compiled-0",
                    "kind": "recompile",
                    "start_ns": start_ns,
                    "end_ns": start_ns + 200_000_000,
                    "reason": f"tensor 'input_ids' size mismatch at index 1. expected 64, actual {64 + number}",
                    "shape": f"1x{64 + number}",
                    "phase": "serving",
                    "request_ids": [],
                }
            )
    bed, luck = FakeBed(), np.random.default_rng(24)
    bed.write(folder, list(arms), 1, EPOCH_NS, float(seconds), luck)
    facts = json.loads((folder / "trial.json").read_text()) | bed.facts(list(arms), 1, luck)
    (folder / "trial.json").write_text(json.dumps(facts))


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.made_up_day")
    parser.add_argument("--requests", type=int, default=1_000_000, help="of both arms together")
    parser.add_argument("--hours", type=float, default=24.0)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="made-up-day-") as temporary:
        run_dir = Path(temporary, "run")
        write_day(run_dir, requests=options.requests, seconds=round(options.hours * 3600))
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "loadtests.commands.main", "analyze", str(run_dir)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        took_s = time.monotonic() - began
        if done.returncode not in (0, 3, 99):
            print(done.stderr, file=sys.stderr)
            return 1
        report = run_dir / "report.html"
        seen = {
            "requests": options.requests,
            "hours": options.hours,
            "records_bytes": sum(path.stat().st_size for path in (run_dir / "trial-01").glob("*.arrow")),
            "analyze_s": round(took_s, 1),
            "analyze_peak_mib": round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024, 1),
            "report_bytes": report.stat().st_size,
            "summary_bytes": (run_dir / "summary.json").stat().st_size,
            "drawn_s": drawn_s(report, Path(temporary, "browser")) if CHROMIUM else [],
        }
    print(json.dumps(seen), flush=True)
    late = bool(seen["drawn_s"]) and min(seen["drawn_s"]) > LONGEST_DRAWING_S
    return int(seen["report_bytes"] > LARGEST_REPORT or late)


if __name__ == "__main__":
    sys.exit(main())
