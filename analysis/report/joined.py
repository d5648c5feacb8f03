"""Runs that were judged as one: which they were, and what differed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from analysis.report.tables import Table
from analysis.report.values import DASH, count, text
from analysis.summary.model import Summary
from analysis.wording import counted

_COMMIT = 12  # characters


def head(summary: Summary) -> str:
    """ "3 runs, 9 trials, 2 machines"; empty for one run, also where its report is in a folder of its own."""
    if summary.joined is None or len(summary.joined.runs) < 2:
        return ""
    counts = {"run": len(summary.joined.runs), "trial": summary.design.trials, "machine": summary.joined.machines}
    return ", ".join(counted(number, noun, count) for noun, number in counts.items())


def accepted(summary: Summary) -> str:
    """ "1 difference accepted" between the runs; empty where there is none, or one run."""
    found = differences(summary)
    return f"{counted(len(found), 'difference', count)} accepted" if found and head(summary) else ""


def differences(summary: Summary) -> list[str]:
    """What differed between the runs and was accepted, a sentence each."""
    return list(map(text, summary.joined.differences)) if summary.joined else []


def runs(summary: Summary) -> Table:
    """The runs in order of time; empty for a run by itself."""
    return Table(
        kinds=dict.fromkeys(("Run", "Started", "Machine", "Seed", "Commit", "tailgate"), "words"),
        rows=[
            {
                "Run": text(row.name),
                "Started": text(row.started),
                "Trials": _numbers(row.trials) + (f", missing {_numbers(row.missing)}" if row.missing else ""),
                "Machine": text(row.machine or "unknown"),
                "Seed": text(row.seed),
                "tailgate": text(row.tailgate),
                "Commit": text(row.git_commit)[:_COMMIT],
            }
            for row in (summary.joined.runs if summary.joined else ())
        ],
    )


def _numbers(numbers: Sequence[int]) -> str:
    """ "1–3, 7" of 1, 2, 3 and 7."""
    stretches = [
        [number for _, number in group]
        for _, group in groupby(enumerate(sorted(numbers)), key=lambda item: item[1] - item[0])
    ]
    named = (count(own[0]) if len(own) == 1 else f"{count(own[0])}–{count(own[-1])}" for own in stretches)
    return ", ".join(named) or DASH
