"""What reports say of runs that were judged as one, or of one that is judged elsewhere: the runs, and the ratio of each
machine."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from analysis.report.tables import Table
from analysis.report.values import DASH, Row, at, count, interval, is_number, metric_label, ratio, rows, text
from analysis.wording import counted

_COMMIT = 12  # characters


def head(summary: Row) -> str:
    """ "3 runs, 9 trials, 2 machines"; empty for one run, also where its report lies in a folder of its own."""
    runs = rows(summary, "joined", "runs")
    if len(runs) < 2:
        return ""
    trials, machines = at(summary, "design", "trials"), len(rows(summary, "joined", "machines"))
    return ", ".join(
        (counted(len(runs), "run", count), counted(trials, "trial", count), counted(machines, "machine", count))
    )


def accepted(summary: Row) -> str:
    """ "1 difference accepted" between the runs; empty where there is none, or one run."""
    found = differences(summary)
    return f"{counted(len(found), 'difference', count)} accepted" if found and head(summary) else ""


def runs(summary: Row) -> Table:
    """The runs in order of time; empty for a run by itself."""
    shown = [
        {
            "Run": text(row.get("name")),
            "Started": text(row.get("started")),
            "Trials": _numbers(row.get("trials")) + (f", missing {missing}" if (missing := _missing(row)) else ""),
            "Machine": text(row.get("machine")) if row.get("machine") else "unknown",
            "Seed": text(row.get("seed")),
            "tailgate": text(row.get("tailgate")),
            "Commit": text(row.get("git_commit"))[:_COMMIT],
        }
        for row in rows(summary, "joined", "runs")
    ]
    return Table(rows=shown, kinds=dict.fromkeys(("Run", "Started", "Machine", "Seed", "Commit", "tailgate"), "words"))


def _missing(row: Row) -> str:
    return _numbers(row["missing"]) if row.get("missing") else ""


def _numbers(numbers: object) -> str:
    """ "1–3, 7" of 1, 2, 3 and 7."""
    if not isinstance(numbers, Sequence) or not numbers or not all(is_number(number) for number in numbers):
        return DASH
    stretches = [
        [number for _, number in group]
        for _, group in groupby(enumerate(sorted(numbers)), key=lambda item: item[1] - item[0])
    ]
    return ", ".join(count(own[0]) if len(own) == 1 else f"{count(own[0])}–{count(own[-1])}" for own in stretches)


def ratios(summary: Row) -> Table:
    """What gates, over all machines and on each; empty where there is one machine."""
    shown = [
        {
            "Arm": text(row.get("arm")),
            "Metric": metric_label(row.get("metric"), row.get("quantile")),
            "Machine": text(row["machine"]) if row.get("machine") else "all",
            "Trials": count(row.get("trials")),
            "Ratio to the control": ratio(row.get("ratio")),
            "Interval": interval(row.get("low"), row.get("high")),
            "Machines add": _added(row),
        }
        for row in rows(summary, "joined", "ratios")
    ]
    return Table(rows=shown, kinds={"Arm": "arm", "Metric": "words", "Machine": "words"})


def _added(row: Row) -> str:
    """The standard error that machines add to the ratio over all of them, in percent of it."""
    spread = row.get("machine_spread")
    return DASH if row.get("machine") or not is_number(spread) else f"± {100 * spread:.2g} %"


def differences(summary: Row) -> list[str]:
    """What differed between the runs and was accepted, a sentence each."""
    listed = at(summary, "joined", "differences")
    return [text(item) for item in listed] if isinstance(listed, list) else []
