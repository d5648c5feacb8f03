"""weights.jsonl: the share of the traffic that each arm had from which instant on, and why. One line a decision.

A line is written before the splitter receives the weights: it never sends more to an arm than the last line
allows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from tailgate.analysis.records.documents import read_rows

JOURNAL = "weights.jsonl"
BY_HAND = "set by hand"  # the action of a change that the run did not make
BY_OTHERS = "others"  # of a run whose weights another program moves

Instant = Annotated[int, Field(strict=True, gt=-(2**63), lt=2**63)]  # ns since the epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightChange:
    """The weights from `at_ns` on.

    `action` is start, advance, rollback, promoted, hold, BY_HAND or BY_OTHERS. Between `at_ns` and `done_ns` some
    requests may still follow the weights before.
    """

    at_ns: Instant  # of a change by hand: when it was surely not made yet
    weights: Annotated[Mapping[str, int], Field(min_length=1)]
    why: str = ""
    action: str = "start"
    step: int | None = None  # of a ramp, from 0
    trial: int = 1
    cause_ns: Instant | None = None  # when the cause was seen
    done_ns: Instant | None = None  # when the splitter had taken it, or was seen to have; None if unknown
    shadows: Mapping[str, float] = Field(default_factory=dict)  # percentages of requests that arms got copies of


def append(directory: Path, change: WeightChange) -> None:
    """Append the change to the journal and hand it to the kernel."""
    with (directory / JOURNAL).open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(change)) + "\n")


def read_journal(directory: Path) -> tuple[tuple[WeightChange, ...], str]:
    """Return every whole line of the journal, in order, and what is wrong with it, in words that follow its name."""
    rows, bad = read_rows(directory / JOURNAL)
    changes: dict[int, WeightChange] = {}
    for row in rows:
        try:
            change = _CHANGE.validate_python(row)
        except ValidationError:
            bad += 1
        else:
            changes[change.at_ns] = change  # a second line of the same instant states when it was done
    which = f"has {bad} lines that are" if bad > 1 else "has a line that is"
    return tuple(changes.values()), f"{which} no decision" if bad else ""


_CHANGE = TypeAdapter(WeightChange)
