"""Two runs judged: the later one's arm by the gates of an experiment, with the earlier one's as its control."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from analysis.checks.check import Check, Rule
from analysis.compare.machine import check_machines, machine_speeds
from analysis.compare.pair import CANDIDATE, read_pair
from analysis.judging.judgement import judge
from analysis.summary.summary import summary_of

WHAT_DIFFERS = Rule(name="what differs", find=lambda seen: (), sound="Nothing recorded of the runs differs.", opens=())


def compare_runs(
    baseline: Path,
    candidate: Path,
    *,
    arm: str = "",
    gates: Mapping[str, Any] | None = None,
    trust_machines: bool = False,
) -> dict[str, Any]:
    """The summary of two run directories, ready for JSON. RecordError where they cannot be compared.

    `arm` is a name, or BASELINE=CANDIDATE; `gates` replace those of the candidate's experiment; `trust_machines` takes
    the machines of both for equally fast.
    """
    pair = read_pair(baseline, candidate, arm=arm, gates=gates)
    machines = check_machines(machine_speeds(pair.run, pair.machines), trusted=trust_machines)
    return summary_of(pair.run, judge(pair.run, (machines, _what_differs(pair.differs))))


def _what_differs(texts: tuple[str, ...]) -> Check:
    """The check "what differs", which always passes: it lists what may be the cause."""
    return WHAT_DIFFERS.row(True, f"The candidate differs in {'; '.join(texts)}." if texts else "", arm=CANDIDATE)
