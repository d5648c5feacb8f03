"""Results as they come: a line for people on stderr, a JSON line in a file, everything in one JSON line at the end."""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

Row = dict[str, Any]


class Ledger:
    """Collects the rows of one arm. Each row is on stderr and in `out` as soon as it is added: a later kill loses none.

    A row names its `section` and holds plain values; `failed` says why the section did not hold or could not run.
    """

    def __init__(self, arm: str, *, out: Path | None = None, stream: IO[str] | None = None) -> None:
        self.arm = arm
        self.rows: list[Row] = []
        self.missed: list[str] = []  # goals
        self._out = out
        self._stream = stream or sys.stderr
        self._started = time.monotonic()

    def note(self, text: str) -> None:
        """A progress line."""
        print(f"[{time.monotonic() - self._started:7.1f} s] {text}", file=self._stream, flush=True)

    def add(self, section: str, **values: Any) -> Row:
        """Keep a result and show it."""
        row: Row = {"section": section, "arm": self.arm, **rounded(values)}
        self.rows.append(row)
        self.note("RESULT " + one_line(row))
        self._keep(row)
        return row

    def reach(self, what: str, value: float | None, limit: float, *, at_least: bool = False) -> None:
        """A goal and how far it was reached; nothing where there is no value."""
        if value is None:
            return
        reached = value >= limit if at_least else value <= limit
        self.add("goals", what=what, value=value, goal=f"{'≥' if at_least else '≤'} {limit:g}", reached=reached)
        if not reached:
            self.missed.append(f"{what} is {value:.4g}")

    def head(self, **values: Any) -> None:
        """The file of results says first what was run, so that it can be read by itself."""
        self._keep({"section": "run", **values})

    def _keep(self, row: Row) -> None:
        if self._out is not None:
            with self._out.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(row) + "\n")

    @contextmanager
    def attempt(self, section: str, **identity: Any) -> Iterator[None]:
        """Inside, an error becomes a row that says what broke, and what follows goes on."""
        try:
            yield
        except Exception as error:
            traceback.print_exc(file=self._stream)
            first = str(error).splitlines()[0] if str(error) else "no detail"
            self.add(section, **identity, failed=f"{type(error).__name__}: {first}")

    def run(self, sections: Iterable[tuple[str, Callable[[], None]]]) -> bool:
        """Run the sections by name; whether all came to an end. One that breaks does not take the next with it."""
        try:
            for name, work in sections:
                self.note(f"=== {name}")
                section, _, through = name.partition(" ")
                with self.attempt(section, **({"through": through} if through else {})):
                    work()
            return True
        except (KeyboardInterrupt, SystemExit):
            self.note("interrupted: what was measured so far follows")
            return False

    def result(self, benchmark: str, *, complete: bool, about: Row) -> Row:
        """The JSON object that says everything; its table and what did not hold are on stderr."""
        print("\n" + table(self.rows) + "\n", file=self._stream)
        for line in (*self.failures, *self.missed):
            print(f"NOT HELD  {line}", file=self._stream)
        return {
            "benchmark": benchmark,
            "ok": complete and not self.failures and not self.missed,
            "complete": complete,
            "failures": self.failures,
            "missed": self.missed,
            **about,
            "results": self.rows,
        }

    @property
    def failures(self) -> list[str]:
        """What did not hold or could not run."""
        return [f"{row['section']}: {row['failed']}" for row in self.rows if row.get("failed")]


def rounded(value: Any) -> Any:
    """`value` with floats cut to six significant digits, at any depth, so that JSON stays readable."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(item) for item in value]
    return value


def one_line(row: Mapping[str, Any]) -> str:
    """A row as `key value` pairs; a spread as its median and range."""
    return "  ".join(f"{key}={_shown(value)}" for key, value in row.items() if _is_short(value))


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as aligned text, grouped by section; columns are the keys of the section's rows."""
    parts = []
    for section in dict.fromkeys(row["section"] for row in rows):
        group = [row for row in rows if row["section"] == section]
        columns = [key for key in dict.fromkeys(key for row in group for key in row) if key != "section"]
        columns = [key for key in columns if all(_is_short(row[key]) for row in group if key in row)]
        cells = [columns] + [[_shown(row[key]) if key in row else "" for key in columns] for row in group]
        widths = [max(len(line[index]) for line in cells) for index in range(len(columns))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
        parts.append("\n".join([section, *("  " + line.rstrip() for line in lines)]))
    return "\n\n".join(parts)


def _is_spread(value: Any) -> bool:
    return isinstance(value, Mapping) and {"median", "min", "max"} <= value.keys()


def _is_ratio(value: Any) -> bool:
    return isinstance(value, Mapping) and {"median", "low", "high", "pairs"} <= value.keys()


def _is_short(value: Any) -> bool:
    """Whether a value fits a line: no list, and no table other than a spread, a ratio or a few counts."""
    if isinstance(value, Mapping):
        return _is_spread(value) or _is_ratio(value) or all(isinstance(item, int) for item in value.values())
    return not isinstance(value, list)


def _shown(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if _is_ratio(value):
        low, high = value["low"], value["high"]
        around = "" if low is None else f" [{_shown(low)}–{_shown(high)}]"
        return f"{_shown(value['median'])}{around}"
    if _is_spread(value):
        return f"{_shown(value['median'])} ({_shown(value['min'])}–{_shown(value['max'])})"
    if isinstance(value, Mapping):
        return " ".join(f"{key}:{count}" for key, count in value.items()) or "none"
    return str(value)
