"""How honest is the load generator, beside its client alone: one command, one JSON line.

    python benchmarks/generator.py --repeats 3

A null server sends what is measured, on one core; the load process has the other. Two contestants take turns in every
repeat: bare (tailgate's client alone) and tailgate (a Locust process with loadtests/chat.py that replays a schedule and
records). streams: 1,000 streams of 50 tokens/s, what share of the tokens is seen and how late. open: 10,000 requests/s
open loop, and the load process's own share of their latency. Results go to stderr as soon as they are there; the last
line on stdout is one JSON object. Exit code: 0 all measured and every goal reached, 1 something failed or missed its
goal, 2 bad usage.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np

if not __package__:  # as a script: the repository is importable
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.command import BenchmarkParser, command_line, count, end_in_order, run_command
from benchmarks.contest import CONTESTANTS, Cores, Outcome, Work, run
from benchmarks.ledger import Ledger, Row, paired_ratio, spread
from benchmarks.observed import own_error, stream_figures
from loadtests.trials.environment import describe_environment

SECTIONS: Final = ("streams", "open")
STREAMS, TOKENS_PER_S, SETTLE_S, RAMP_S = 1000, 50.0, 3.0, 2.0
RATE: Final = 10_000.0
# The goals: share delivered, p99 lag in ms, p99 of the load process's own error in ms.
DELIVERED, LAG_MS, OWN_MS = 0.99, 10.0, 3.0


def parser() -> BenchmarkParser:
    """The command line."""
    parser = BenchmarkParser("generator.py", __doc__, repeats=3)
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], metavar="SECTION",
                        help=f"{', '.join(SECTIONS)} (default: both)")  # fmt: skip
    parser.add_argument("--window", dest="window_s", metavar="SECONDS", type=count, default=10,
                        help="seconds that count in each (default %(default)s)")  # fmt: skip
    return parser


class Bench:
    """Runs the contests and keeps what they gave."""

    def __init__(self, options: argparse.Namespace, folder: Path, ledger: Ledger) -> None:
        self.options = options
        self.folder = folder
        self.ledger = ledger
        self.cores = Cores.of_this_machine()

    def streams(self) -> None:
        """1,000 paced streams: what share of the tokens each client sees, and how late."""
        seconds = SETTLE_S + RAMP_S + self.options.window_s + 3.0
        work = Work(
            streams=STREAMS,
            ramp_s=RAMP_S,
            tokens=int(TOKENS_PER_S * seconds),
            seed=self.options.seed,
            server=("--tokens-per-s", str(TOKENS_PER_S)),
            window_s=self.options.window_s,
            settle_s=SETTLE_S,
        )
        rows = self._contest(
            "streams",
            work,
            lambda o: stream_figures(o.seen, o.sent, start_ns=o.start_ns, end_ns=o.end_ns),
            "p99_lag_ms",
        )
        self.ledger.reach("streams: delivered", _median(rows, "delivered"), DELIVERED, at_least=True)
        self.ledger.reach("streams: p99 lag, ms", _median(rows, "p99_lag_ms"), LAG_MS)

    def open(self) -> None:
        """Open loop: the load process's own share of the latency."""
        work = Work(rate=RATE, seed=self.options.seed, window_s=self.options.window_s)
        rows = self._contest(
            "open", work, lambda o: own_error(o.seen, start_ns=o.start_ns, end_ns=o.end_ns), "p99_own_ms"
        )
        self.ledger.reach("open: own error p99, ms", _median(rows, "p99_own_ms"), OWN_MS)

    def _contest(self, section: str, work: Work, figures: Callable[[Outcome], Row], compared: str) -> list[Row]:
        """tailgate's figures, one row a repeat. The contestants take turns, and the one that begins changes."""
        rows: dict[str, list[Row]] = {name: [] for name in CONTESTANTS}
        for repeat in range(self.options.repeats):
            for name in CONTESTANTS if repeat % 2 else CONTESTANTS[::-1]:
                self.ledger.note(f"{section}: {name}, repeat {repeat + 1} of {self.options.repeats}")
                outcome = run(name, work, folder=self.folder / f"{section}-{name}-{repeat}", cores=self.cores)
                late = outcome.server["tick_lag_ms"]
                row = {**figures(outcome), "load_core": outcome.load_core}
                rows[name].append(row | ({"server_p99_late_ms": late["p99"]} if late else {}))
        for name, of_contestant in rows.items():
            columns = {key: spread([row[key] for row in of_contestant]) for key in of_contestant[0]}
            self.ledger.add(section, contestant=name, **columns)
        pairs = ([row[compared] for row in rows[name]] for name in ("tailgate", "bare"))
        self.ledger.add(section, contestant="tailgate ÷ bare", **{compared: paired_ratio(*pairs)})
        return rows["tailgate"]


def _median(rows: Sequence[Row], key: str) -> float:
    return float(np.median([row[key] for row in rows]))


def measure(arguments: Sequence[str]) -> Row:
    """What the command line asks for, as one JSON object."""
    options = parser().parse_args(arguments)
    ledger = Ledger()
    with tempfile.TemporaryDirectory(prefix="tailgate-bench-") as scratch:
        bench = Bench(options, Path(scratch), ledger)
        for section in options.sections or SECTIONS:
            getattr(bench, section)()
    about = {"command": command_line("generator.py", arguments), "machine": describe_environment()}
    return ledger.result("generator", about=about)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    return run_command("generator.py", measure, arguments)


if __name__ == "__main__":
    end_in_order()
    sys.exit(main())
