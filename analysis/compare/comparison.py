"""Two runs judged: the later one's arm by the gates of an experiment, with the earlier one's as its control."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from analysis.checks.check import TAIL, Check, Rule
from analysis.checks.machines import SPEED
from analysis.compare.pair import BASELINE, CANDIDATE, read_pair
from analysis.judging.gates import FAIL, PASS
from analysis.judging.judgement import judge
from analysis.run.references import HOST_FIGURES, WORK, speeds_of
from analysis.run.run import Run
from analysis.run.trials import devices_of
from analysis.summary.summary import summary_of

_NOISE = 0.01  # of a log reference, by which two runs of one machine may differ
_DRIFT = 0.05  # from here on a queue may have grown by more than the machine was slower

WHAT_DIFFERS = Rule(name="what differs", find=lambda seen: (), opens=())


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
    differs = f"The candidate differs in {'; '.join(pair.differs)}." if pair.differs else "Nothing recorded differs."
    speed = _speed(pair.run, same_machine=pair.same_machine, trusted=trust_machines)
    return summary_of(pair.run, judge(pair.run, (speed, WHAT_DIFFERS.found([], reason=differs, arm=CANDIDATE))))


def _speed(run: Run, *, same_machine: bool, trusted: bool) -> Check:
    """The check "machine speed": by the references of both arms' devices, the machines were equally fast.

    A ratio of latencies is decided where it would stand if the machines made all of their difference.
    """
    external = any(run.account(arm).external for arm in run.arms)  # not on the machine of the run
    one, two = ({} if external else _measured(run, arm) for arm in (BASELINE, CANDIDATE))
    apart = {key: one[key] - two[key] for key in one if key in two}  # above 0 where the candidate's machine is slower
    moved = {figure: value for (figure, _), value in apart.items() if abs(value) > _NOISE}
    known = trusted or (same_machine and not external) or (bool(apart) and one.keys() == two.keys())
    row: dict[str, Any] = {"arm": CANDIDATE, "opens": ("noninferiority", "goodput")}
    if not known:
        fault = "Nothing says that the machines of both runs were equally fast"
        remedy = "Take references in both runs ([machines] reference_s), or give --trust-machines."
        return replace(SPEED, rank=TAIL).found([fault], remedy=remedy, **row)  # which is no disturbance
    if not moved:
        reason = "The machines of both runs were equally fast"
        return SPEED.found([], reason=f"{reason}." if apart else f"{reason}, as is taken for granted.", **row)
    words = (
        f"{WORK[figure]} was {100.0 * abs(math.expm1(-value)):.1f} % {'lower' if value > 0 else 'higher'} on the "
        f"candidate's {'host' if figure in HOST_FIGURES else 'card'}"
        for figure, value in moved.items()
    )
    text = ", ".join(words)
    spread = max(map(abs, moved.values()))
    slowed, sped = max(moved.values()) > 0, min(moved.values()) < 0
    return SPEED.found(
        [f"{text[:1].upper()}{text[1:]}"],
        shift=spread if spread <= math.log1p(_DRIFT) else None,
        spares="" if slowed and sped else PASS if slowed else FAIL,
        remedy="Run the baseline again on the candidate's machine.",
        **row,
    )


def _measured(run: Run, arm: str) -> dict[tuple[str, str], float]:
    """The mean logarithm of each figure of the device that the arm had, by figure and size of the work."""
    devices = {trial.number: devices_of(trial).get(arm) for trial in run.trials_of(arm)}
    values: dict[tuple[str, str], list[float]] = {}
    for item in speeds_of(run.trials_of(arm)):
        if devices[item.trial] in (None, item.device):
            values.setdefault((item.figure, item.size), []).append(item.mean)
    return {key: fmean(own) for key, own in values.items()}
