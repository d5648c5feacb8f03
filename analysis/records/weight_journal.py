"""weights.jsonl: what share of the traffic each arm had from which instant on, and why. One line a decision.

A line is written before the splitter is told, so that it never sends more to an arm than the last line allows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from analysis.records.documents import read_rows
from analysis.records.plain_values import mapping, number

JOURNAL = "weights.jsonl"
BY_HAND = "set by hand"  # what a change is called that nobody of the run made
BY_OTHERS = "others"  # in a run whose weights somebody else moves


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightChange:
    """The weights from `at_ns` on, ns since the epoch. `step` counts from 0, None outside a ramp. `action` is start,
    advance, rollback, promoted, hold, resume (of a ramp whose controller was gone), again (in a splitter that had
    started anew), set (where somebody asked the run for them), BY_HAND or BY_OTHERS. `cause_ns` is when what caused it
    was seen, `done_ns` when the splitter had taken it, None where nobody knows. From `at_ns` to then some requests may
    still have gone by the weights before: of a change by hand, `at_ns` is when it was surely not made yet and `done_ns`
    when it was seen. `shadows` are the percentages of requests that arms got copies of."""

    at_ns: int
    weights: Mapping[str, int]
    why: str
    action: str = "start"
    step: int | None = None
    trial: int = 1
    cause_ns: int | None = None
    done_ns: int | None = None
    shadows: Mapping[str, float] = field(default_factory=dict)

    @property
    def by_hand(self) -> bool:
        """Whether somebody changed the weights past the run."""
        return self.action == BY_HAND


def append(directory: Path, change: WeightChange) -> None:
    """The change is the last line of the journal, in the hands of the kernel."""
    with (directory / JOURNAL).open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(change)) + "\n")


def read_weights(directory: Path) -> tuple[WeightChange, ...]:
    """Every whole line of the journal, in order; empty where there is none."""
    return _read(directory)[0]


def weights_problem(directory: Path) -> str:
    """What is wrong with the journal, as what follows its name, or empty."""
    bad = _read(directory)[1]
    which = f"has {bad} lines that are" if bad > 1 else "has a line that is"
    return f"{which} no decision" if bad else ""


def _read(directory: Path) -> tuple[tuple[WeightChange, ...], int]:
    """The changes, and how many whole lines are none."""
    rows, bad = read_rows(directory / JOURNAL)
    changes: dict[int, WeightChange] = {}
    for row in rows:
        at_ns = _whole(row.get("at_ns"))
        weights, shadows = mapping(row.get("weights")), mapping(row.get("shadows"))
        if at_ns is None or not weights or None in map(number, (*weights.values(), *shadows.values())):
            bad += 1
            continue
        step = number(row.get("step"))
        # A second line of the same instant says when it was done.
        changes[at_ns] = WeightChange(
            at_ns=at_ns,
            weights={arm: int(weight) for arm, weight in weights.items()},
            why=str(row.get("why", "")),
            action=str(row.get("action", "start")),
            step=None if step is None else int(step),
            trial=int(number(row.get("trial")) or 1),
            cause_ns=_whole(row.get("cause_ns")),
            done_ns=_whole(row.get("done_ns")),
            shadows={arm: float(percent) for arm, percent in shadows.items()},
        )
    return tuple(changes.values()), bad


def _whole(value: Any) -> int | None:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return value if is_whole and abs(value) < 2**63 else None
