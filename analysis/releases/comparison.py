"""Two releases judged: may the later one replace the earlier, as one JSON document."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from analysis.judging.gates import FAIL, INCONCLUSIVE, PASS
from analysis.records.tables import RecordError
from analysis.releases.conditions import Departure, departures, obstacles
from analysis.releases.gates import FigureRow, arm_rows
from analysis.releases.history import History, days
from analysis.releases.machine import MachineSpeeds, machine_speeds, typical
from analysis.releases.release import Release
from analysis.releases.trend import trends
from analysis.settings.release_limits import ReleaseLimits
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


def arms_to_compare(baseline: Release, candidate: Release, chosen: Sequence[str] = ()) -> dict[str, str]:
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


def compare_releases(
    history: History, candidate: Release, *, arms: Mapping[str, str], limits: ReleaseLimits
) -> dict[str, Any]:
    """What became of the newest release of the history, ready for JSON. RecordError, which lists them, where the two
    differ in what a comparison rests on."""
    baseline = history.newest
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
    alike = history.alike(candidate, arms)
    repeats = history.repeats(arms, alike)
    machines = {other: _machines(repeats, candidate, name, other, limits) for name, other in arms.items()}
    rows = arm_rows(arms, history=alike, repeats=repeats, candidate=candidate, machines=machines, limits=limits)
    gates = [row for row in rows if row.verdict is not None]
    overall = overall_verdict([row.verdict for row in gates])
    document = {
        "kind": "tailgate comparison of releases",
        "schema": SCHEMA,
        "overall": overall,
        "exit_code": EXIT_CODES[overall],
        "headline": _headline(overall, gates),
        "baseline": {**_release_row(baseline), "runs": [release.run_id for release in repeats]},
        "candidate": _release_row(candidate),
        "history": [_release_row(release) for release in alike],
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
        "notes": _notes(history, alike, rows, machines, baseline, candidate),
        "settings": {
            "alpha": limits.alpha,
            "restart_spread": limits.restart_spread,
            "tuning_spread": limits.tuning_spread,
            "day_spread": limits.day_spread,
            "machine_drift": limits.machine_drift,
            "need_references": limits.need_references,
        },
        "trends": trends(arms, history=alike, candidate=candidate, limits=limits),
    }
    plain: dict[str, Any] = _plain(document)
    return plain


def overall_verdict(verdicts: Sequence[str | None]) -> str:
    """FAIL where one gate does, PASS where all do, else INCONCLUSIVE; so also without a gate."""
    if FAIL in verdicts:
        return FAIL
    return PASS if verdicts and all(verdict == PASS for verdict in verdicts) else INCONCLUSIVE


def _machines(
    repeats: Sequence[Release], candidate: Release, name: str, other: str, limits: ReleaseLimits
) -> MachineSpeeds:
    # A server of somebody else is not on the machine of the run.
    here = None if candidate.arms[other].config.get("kind") else candidate.machine
    there = {release.machine for release in repeats}
    return machine_speeds(
        typical(release.arms[name].references for release in repeats),
        candidate.arms[other].references,
        drift=limits.machine_drift,
        same_machine=there == {here} if here and None not in there else None,
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
    history: History,
    alike: Sequence[Release],
    rows: Sequence[FigureRow],
    machines: Mapping[str, MachineSpeeds],
    baseline: Release,
    candidate: Release,
) -> list[str]:
    notes = [f"Not among the baselines: {reason}." for reason in history.unread]
    if others := len(history.releases) - len(alike):
        notes.append(
            f"{counted(others, 'earlier run')} had other arms, traffic, model or objectives, and tell nothing here."
        )
    if len(alike) < 2:
        notes.append(
            "How much days differ is taken for granted (compare.day_spread): a folder of earlier runs would show it."
        )
    if (shown := len(days(alike))) < len(alike):
        notes.append(
            f"Some of the {len(alike)} earlier runs ran at one time on one machine: they show {counted(shown, 'day')}."
        )
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


def _release_row(release: Release) -> dict[str, Any]:
    return {
        "run_id": release.run_id,
        "name": release.name,
        "created": release.created,
        "trials": release.trials,
        "git_commit": release.environment.get("git_commit"),
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
    *("arm", "baseline", "candidate", "ratio", "low", "high", "spread", "degrees", "day_spread", "limit", "p_worse"),
    *("corrected", "needed_trials", "verdict", "reason", "doubt"),
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
