"""Measure the load generator against a null server, and what the splitter adds: one command, one JSON line.

    python benchmarks/generator.py --repeats 3

A null server sends what is measured, on one core; a Locust process with loadtests/chat.py that replays a schedule and
records has the other. streams: 1,000 streams of 50 tokens/s, what share of the tokens is seen and how late. open:
10,000 requests/s open loop, and the load process's own share of their latency. splitter: 100 streams of 20 tokens/s,
directly and behind Envoy as a run configures it, in turns. Results go to stderr as soon as they are there; the last
line on stdout is one JSON object. Exit code: 0 all measured and every goal reached, 1 something failed or missed its
goal, 2 bad usage.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

if not __package__:  # as a script: the repository is importable
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.command import Ledger, Row, count, end_in_order, finish, parser_of, spread
from benchmarks.contest import Work, run
from tailgate.loadtests.trials.environment import describe_environment

SECTIONS: Final = {
    "streams": Work(streams=1000, tokens_per_s=50.0),
    "open": Work(rate=10_000.0),
    "splitter": Work(streams=100, tokens_per_s=20.0),
}
# The goals: share delivered, p99 lag in ms, p99 of the load process's own error in ms, p50 that Envoy adds in ms.
DELIVERED, LAG_MS, OWN_MS, ADDED_MS = 0.99, 10.0, 3.0, 1.0


def parser() -> argparse.ArgumentParser:
    """Define the command line."""
    parser = parser_of("generator.py", __doc__, repeats=3)
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], metavar="SECTION",
                        help=f"{', '.join(SECTIONS)} (default: all)")  # fmt: skip
    parser.add_argument("--window", dest="window_s", metavar="SECONDS", type=count, default=10,
                        help="seconds that count in each (default %(default)s)")  # fmt: skip
    return parser


def measure(section: str, work: Work, *, repeats: int, folder: Path, ledger: Ledger) -> None:
    """Measure one section. Paths to the server take turns, and the one that begins changes."""
    rows: dict[str, list[Row]] = {"direct": [], "envoy": []} if section == "splitter" else {"direct": []}
    for repeat in range(repeats):
        for path in rows if repeat % 2 else [*rows][::-1]:
            ledger.note(f"{section}: {path}, repeat {repeat + 1} of {repeats}")
            place = folder / f"{section}-{path}-{repeat}"
            rows[path].append(run(work, folder=place, splitter=path == "envoy"))
    for path, measured in rows.items():
        ledger.add(section, path=path, **{key: spread([row[key] for row in measured]) for key in measured[0]})

    def median(key: str, path: str = "direct") -> float:
        return float(np.median([row[key] for row in rows[path]]))

    if section == "splitter":
        added = median("p50_lag_ms", "envoy") - median("p50_lag_ms")
        ledger.reach("splitter: p50 that Envoy adds to a token, ms", added, ADDED_MS)
    elif section == "streams":
        ledger.reach("streams: delivered", median("delivered"), DELIVERED, at_least=True)
        ledger.reach("streams: p99 lag, ms", median("p99_lag_ms"), LAG_MS)
    else:
        ledger.reach("open: own error p99, ms", median("p99_own_ms"), OWN_MS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parser().parse_args(arguments)
    ledger = Ledger()
    with tempfile.TemporaryDirectory(prefix="tailgate-bench-") as scratch:
        for section in options.sections or SECTIONS:
            work = replace(SECTIONS[section], window_s=options.window_s, seed=options.seed)
            measure(section, work, repeats=options.repeats, folder=Path(scratch), ledger=ledger)
    command = shlex.join(["python", "benchmarks/generator.py", *arguments])
    return finish(ledger.result("generator", about={"command": command, "machine": describe_environment()}))


if __name__ == "__main__":
    end_in_order()
    sys.exit(main())
