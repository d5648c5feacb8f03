"""Two runs judged: whether the later one may replace the earlier one, as one JSON document."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from analysis.compare.compared_run import ComparedRun
from analysis.compare.conditions import Departure, departures, obstacles
from analysis.compare.gates import FigureRow, arm_rows
from analysis.compare.machine import MachineSpeeds, machine_speeds
from analysis.judging.gates import FAIL, INCONCLUSIVE, PASS
from analysis.records.tables import RecordError
from analysis.settings.compare_limits import CompareLimits
from analysis.summary.summary import EXIT_CODES
from analysis.wording import counted

SCHEMA = 1
_MOST_LISTED = 12


def chosen_arms(chosen: Sequence[str]) -> dict[str, str]:
    """The candidate's arm for each of the baseline's, from texts such as NAME or BASELINE=CANDIDATE. Raises RecordError
    where a text lacks a name or repeats one."""
    arms: dict[str, str] = {}
    for text in chosen:
        name, mapped, other = text.partition("=")
        other = other if mapped else name
        if not name or not other:
            raise RecordError(f'--arm "{text}" lacks a name: give NAME or BASELINE=CANDIDATE')
        if name in arms or other in arms.values():
            raise RecordError(f"--arm {text} names an arm that another --arm names: give each once")
        arms[name] = other
    return arms


def arms_to_compare(baseline: ComparedRun, candidate: ComparedRun, chosen: Sequence[str] = ()) -> dict[str, str]:
    """The candidate's arm for each of the baseline's: those of one name, or those `chosen`, each as NAME or as
    BASELINE=CANDIDATE.

    RecordError where there is none, one is not there, or one is named twice.
    """
    arms = chosen_arms(chosen)
    if not chosen:
        arms = {name: name for name in baseline.arms if name in candidate.arms}
    if not arms:
        raise RecordError(
            f"the runs share no arm: {', '.join(baseline.arms)} in the baseline, {', '.join(candidate.arms)} in the "
            "candidate: map them with --arm BASELINE=CANDIDATE"
        )
    for name, side, own in (
        *((name, "baseline", baseline.arms) for name in arms),
        *((other, "candidate", candidate.arms) for other in arms.values()),
    ):
        if name not in own:
            raise RecordError(f'the {side} has no arm "{name}": use {", ".join(own)}')
    return arms


def compare_runs(
    baseline: ComparedRun, candidate: ComparedRun, *, arms: Mapping[str, str], limits: CompareLimits
) -> dict[str, Any]:
    """Whether the candidate may replace the baseline, ready for JSON. RecordError, which lists them, where the two
    differ in what a comparison rests on."""
    if baseline.is_same_run(candidate):
        if baseline.run_id == candidate.run_id:
            raise RecordError(f"{candidate.run_id} is the baseline and the candidate: give two runs")
        raise RecordError(
            f"{baseline.run_id} and {candidate.run_id} hold the same trial, of one start and seed: give two runs"
        )
    in_the_way = obstacles(baseline, candidate, arms)
    if in_the_way:
        listed = "; ".join(item.text for item in in_the_way[:_MOST_LISTED])
        rest = f" and {len(in_the_way) - _MOST_LISTED} more" if len(in_the_way) > _MOST_LISTED else ""
        raise RecordError(
            f"{baseline.run_id} and {candidate.run_id} cannot be compared, since they differ in {listed}{rest}: "
            "run both with one experiment"
        )
    machines = {other: _machines(baseline, candidate, name, other, limits) for name, other in arms.items()}
    rows = arm_rows(arms, baseline=baseline, candidate=candidate, machines=machines, limits=limits)
    gates = [row for row in rows if row.verdict is not None]
    overall = overall_verdict([row.verdict for row in gates])
    document = {
        "kind": "tailgate comparison of runs",
        "schema": SCHEMA,
        "overall": overall,
        "exit_code": EXIT_CODES[overall],
        "headline": _headline(overall, gates),
        "baseline": _run_row(baseline),
        "candidate": _run_row(candidate),
        "arms": [
            {
                "name": other,
                "baseline": name,
                "verdict": overall_verdict([row.verdict for row in gates if row.arm == other]),
                "machine": _machine_row(machines[other]),
            }
            for name, other in arms.items()
        ],
        "figures": [_figure_row(row) for row in rows],
        "differs": [_departure_row(item) for item in departures(baseline, candidate, arms)],
        "notes": _notes(rows, machines, baseline, candidate),
        "settings": {
            "alpha": limits.alpha,
            "restart_spread": limits.restart_spread,
            "tuning_spread": limits.tuning_spread,
            "day_spread": limits.day_spread,
            "machine_drift": limits.machine_drift,
            "need_references": limits.need_references,
        },
    }
    plain: dict[str, Any] = _plain(document)
    return plain


def overall_verdict(verdicts: Sequence[str | None]) -> str:
    """FAIL where one gate does, PASS where all do, else INCONCLUSIVE; so also without a gate."""
    if FAIL in verdicts:
        return FAIL
    return PASS if verdicts and all(verdict == PASS for verdict in verdicts) else INCONCLUSIVE


def _machines(
    baseline: ComparedRun, candidate: ComparedRun, name: str, other: str, limits: CompareLimits
) -> MachineSpeeds:
    # An external server is not on the machine of the run.
    here = None if candidate.arms[other].config.get("kind") else candidate.machine
    there = baseline.machine
    return machine_speeds(
        baseline.arms[name].references,
        candidate.arms[other].references,
        drift=limits.machine_drift,
        same_machine=here == there if here and there else None,
    )


def _headline(overall: str, gates: Sequence[FigureRow]) -> str:
    failed = [row for row in gates if row.verdict == FAIL]
    unsettled = [row for row in gates if row.verdict == INCONCLUSIVE]
    if not gates:
        return "Nothing was judged: no figure with a limit is recorded in both runs."
    if failed:
        rest = f" {counted(len(failed) - 1, 'more gate')} failed." if len(failed) > 1 else ""
        return f"{failed[0].arm}: {failed[0].reason}{rest}"
    if overall == PASS:
        return f"All {counted(len(gates), 'gate')} hold: the candidate is surely not worse than its limits allow."
    first = f"{unsettled[0].arm}: {unsettled[0].reason}"
    return f"No gate is broken, and {len(unsettled)} of {len(gates)} are open. {first}"


def _notes(
    rows: Sequence[FigureRow],
    machines: Mapping[str, MachineSpeeds],
    baseline: ComparedRun,
    candidate: ComparedRun,
) -> list[str]:
    notes = []
    for arm, machine in machines.items():
        if machine.drifted:
            notes.append(f"{arm}: {machine.text}.")
        if not machine.speeds or machine.one_sided:
            known = "the machine is the same by its identity" if machine.same_machine else "it may be another machine"
            what = f"the {' and the '.join(sorted(machine.one_sided))}" if machine.speeds else "the machines"
            notes.append(f"{arm}: no references in both runs tell the speed of {what}; {known}.")
    missing = sorted({row.figure.label for row in rows if row.limit is None and row.reason and not row.verdict})
    if missing:
        notes.append(f"Not judged, since the baseline did not record it: {', '.join(missing)}.")
    if candidate.created_ns < baseline.created_ns:
        notes.append("The candidate ran before the baseline.")
    return notes


def _run_row(run: ComparedRun) -> dict[str, Any]:
    return {
        "run_id": run.run_id,
        "name": run.name,
        "created": run.created,
        "trials": run.trials,
        "git_commit": run.environment.get("git_commit"),
    }


def _machine_row(machine: MachineSpeeds) -> dict[str, Any]:
    return {
        "same": machine.same_machine,
        "text": machine.text,
        "references": [
            {
                "key": speed.key,
                "name": speed.name,
                "part": speed.part,
                "baseline": speed.baseline,
                "candidate": speed.candidate,
                "slower": math.exp(speed.slower),
                "drifted": speed in machine.drifted,
            }
            for speed in machine.speeds
        ],
    }


_ROW_COLUMNS = (
    *("arm", "baseline", "candidate", "ratio", "low", "high", "spread", "degrees", "limit", "p_worse"),
    *("needed_trials", "verdict", "reason", "doubt"),
)


def _figure_row(row: FigureRow) -> dict[str, Any]:
    figure = row.figure
    return {
        "figure": figure.key,
        "label": figure.label,
        "unit": figure.unit,
        "less_is_better": figure.less_is_better,
        "counted": figure.counted,
        "trials": list(row.trials),
        **{name: getattr(row, name) for name in _ROW_COLUMNS},
    }


def _departure_row(item: Departure) -> dict[str, Any]:
    return {"what": item.what, "baseline": item.baseline, "candidate": item.candidate, "text": item.text}


def _plain(value: Any) -> Any:
    """`value` in JSON's own types; what is not finite is null, and floats keep seven digits."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.7g}") if math.isfinite(value) else None
    return value
