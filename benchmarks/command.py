"""What the measuring commands share: flags, results, how they end.

Each result is a JSON line on stderr as soon as it is there; the last line on stdout is one JSON object with all.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

Row = dict[str, Any]


def count(text: str) -> int:
    """Parse a whole number of at least one."""
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is no count: give 1 to {10**9 - 1}")
    return int(text)


def several(kind: Callable[[str], Any], example: str) -> Callable[[str], tuple[Any, ...]]:
    """Return the type of a list of `kind` between commas; what comes twice is taken once."""

    def parse(text: str) -> tuple[Any, ...]:
        items = tuple(dict.fromkeys(kind(item) for item in text.split(",") if item.strip()))
        if not items:
            raise argparse.ArgumentTypeError(f"the list is empty: give for example {example}")
        return items

    return parse


def parser_of(script: str, description: str | None, *, repeats: int) -> argparse.ArgumentParser:
    """Return the parser of `python benchmarks/SCRIPT` with the flags that all such commands take."""
    parser = argparse.ArgumentParser(
        prog=f"python benchmarks/{script}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--repeats", type=count, default=repeats, help="measured repeats (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="for what is drawn (default %(default)s)")
    return parser


class MeasurementError(RuntimeError):
    """A measurement cannot be trusted; the message says why."""


def end_in_order() -> None:
    """Have SIGTERM end the run as Ctrl-C does, once: the processes are gone and what was measured is shown."""

    def stop(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit(143)

    signal.signal(signal.SIGTERM, stop)


class Ledger:
    """Collects rows. Each is on stderr as soon as it is added: a later kill loses none."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.missed: list[str] = []  # goals
        self._started = time.monotonic()

    def note(self, text: str) -> None:
        """Show a progress line."""
        print(f"[{time.monotonic() - self._started:7.1f} s] {text}", file=sys.stderr, flush=True)

    def add(self, section: str, **values: Any) -> None:
        """Keep a result and show it."""
        row: Row = {"section": section, **rounded(values)}
        self.rows.append(row)
        self.note(json.dumps(row))

    def reach(self, what: str, value: float, limit: float, *, at_least: bool = False) -> None:
        """Keep a goal and how far it was reached."""
        reached = value >= limit if at_least else value <= limit
        self.add("goals", what=what, value=value, goal=f"{'≥' if at_least else '≤'} {limit:g}", reached=reached)
        if not reached:
            self.missed.append(f"{what} is {value:.4g}")

    def finish(self, benchmark: str, arguments: Sequence[str], **about: Any) -> int:
        """Print all results as one JSON line; return the exit code."""
        about = {"command": shlex.join(["python", f"benchmarks/{benchmark}.py", *arguments]), **about}
        ended = {"benchmark": benchmark, "ok": not self.missed, "missed": self.missed, **about, "results": self.rows}
        print(json.dumps(ended), flush=True)
        return 1 if self.missed else 0


def rounded(value: Any) -> Any:
    """Round floats in `value` to six significant digits, at any depth, so that JSON stays readable."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(item) for item in value]
    return value


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Return the size, extremes and median of a sample of at least one."""
    return {"n": len(values), "min": min(values), "median": float(np.median(values)), "max": max(values)}
