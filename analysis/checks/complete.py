"""Whether the records are complete: every trial, process, file and request is there, and every arm survived."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from tailgate.analysis.checks.check import ALL_KINDS, ESTIMATES, Check, Evidence, rule
from tailgate.analysis.checks.generator import known_accounts, lost_processes
from tailgate.analysis.records.plain_values import mapping, number, rows_of, text_of
from tailgate.analysis.run.run import Run
from tailgate.analysis.wording import counted, duration_text, percent

_MISSING_SLACK = 2  # requests that may be under way when recorders stop
_MISSING_SHARE = 0.001
_START_SLACK_S = 60.0  # between clocks of one trial


@rule(
    "complete",
    sees="A file is cut off, damaged or of another trial, a row is repeated, times are missing or run backwards, a "
    "request names an unknown arm, trial or phase, or all requests of an arm lack `request_id`, `sent_ns` or "
    "`output_tokens`.",
    says="The records are damaged: {}.",
    remedy="Run again; see the logs of the arms and of the disk.",
    opens=ALL_KINDS,
    at_end=True,
)
def damaged(seen: Evidence) -> Iterator[Check]:
    run, broken, repeated = seen.run, int(seen.run.requests.broken.sum()), seen.run.requests.dropped
    # the check below explains a request that ended with the run, before its arm was known
    unplaced = () if _interruptions(run) else run.unplaced_requests
    faults = [*run.records.problems, *_unrecorded(run), *_of_other_times(run), *unplaced]
    if not run.records.experiment and is_recorded_whole(run):
        faults.append("experiment.toml is missing or empty, so what the arms must hold is unknown")
    faults += [f"{counted(broken, 'request')} with times that are missing or run backwards"] if broken else []
    faults += [f"{counted(repeated, 'row')} of a request that is there already"] if repeated else []
    yield damaged.found(faults)


def _unrecorded(run: Run) -> Iterator[str]:
    """Yield what trial.json of a whole trial lacks, and each column that judging needs and no request of an arm has.

    `request_id` finds duplicate rows, `sent_ns` late requests, `output_tokens` empty answers. Bare tables and imports
    need not have them.
    """
    requests = run.requests
    if run.pace or not is_recorded_whole(run):
        return
    for trial in (trial for trial in run.trials if trial.first_ns and trial.info.get("complete")):
        facts = {"arms": rows_of(trial.info.get("arms")), "start_ns": number(trial.info.get("start_ns"))}
        yield from (
            f"{run.trial_name(trial.number)} has no {key} in trial.json" for key, value in facts.items() if not value
        )
    for arm in run.arms:
        own = run.of_arm(arm)
        needed = {"request_id": (own, requests.named), "sent_ns": (own, requests.sent_ns.known)}
        # Of production traffic a splitter knows what the server says.
        if not run.embeds and not run.is_production:
            needed["output_tokens"] = (own & requests.ok, ~requests.uncounted)
        for column, (rows, known) in needed.items():
            if rows.any() and not (rows & known).any():
                yield f"no request of {arm} has {column}"


def _of_other_times(run: Run) -> Iterator[str]:
    """Yield each trial whose trial.json, accounts of load processes and requests did not begin within its traffic."""
    spans = run.requests.spans()
    for trial in (trial for trial in run.trials if trial.number in spans):
        accounts = [account for account in run.records.generators if account.get("trial") == trial.number]
        starts = [number(facts.get("start_ns")) for facts in (trial.info, *accounts)]
        known = [*map(float, spans[trial.number][:2]), *(start for start in starts if start is not None)]
        apart_s = (max(known) - min(known)) / 1e9
        if apart_s > trial.seconds + _START_SLACK_S:
            yield f"records of {run.trial_name(trial.number)} begin up to {duration_text(apart_s)} apart"


def is_recorded_whole(run: Run) -> bool:
    """Return whether tailgate recorded the run. Tables of other programs have fewer columns and a sparse trial.json."""
    return any("arms" in info for info in run.infos)


@rule(
    "complete",
    sees="A trial was stopped or is missing, a load process was lost or cut off, or an arm lacks requests that were "
    f"planned or that the other arm has (more than {_MISSING_SLACK}, and {percent(_MISSING_SHARE)}).",
    says="Records are missing: {}.",
    remedy="Run again, and let the run end by itself; the logs of the arms and logs/locust.log say what went wrong.",
    opens=ALL_KINDS,
    at_end=True,
    by_step=True,
)
def missing(seen: Evidence) -> Iterator[Check]:
    run = seen.run
    trials, accounts = [info for info in run.infos if info], known_accounts(run.records.generators)
    if interrupted := _interruptions(run):
        yield missing.found(interrupted, remedy="Run again, and let the run end by itself.")
        return
    faults = [*_missing_trials(run, trials), *lost_processes(accounts, trials, run.trial_name)]
    counts = {arm: int(run.of_arm(arm).sum()) for arm in run.arms}
    if run.in_turn:
        # Each arm had requests of its own, so that what a treatment lacks concerns no other.
        for arm, count in counts.items():
            lacking = missing_requests({arm: count}, {arm: run.planned.get(arm, 0)})
            again = "Search again with another seed, and judge both: tailgate analyze RUN RUN."
            go_on = None if run.trials_of(arm) else again
            yield missing.found(lacking, arm=None if arm == run.control else arm, remedy=go_on)
    else:
        closed = run.reported_open_loop is False and not run.planned
        alike = run.copied and not closed
        faults += missing_requests(counts, run.planned, mirrored=alike, ended=run.ended_arms)
    yield missing.found(faults)


def _interruptions(run: Run) -> list[str]:
    """Describe the trials that the user interrupted, which explains all that is missing of a run, but nothing of runs
    that are joined with it."""
    found: list[str] = []
    for info in () if run.in_turn or run.records.joined else run.infos:
        at_ns = number(info.get("interrupted_ns"))
        if at_ns is not None and not (info.get("complete") or info.get("ended")):
            seconds = max(0.0, at_ns - (number(info.get("start_ns")) or at_ns)) / 1e9
            planned_s = number(info.get("duration_s"))
            of = "" if planned_s is None else f" of {planned_s:g}"
            found.append(f"{run.trial_name(info['trial'])} was interrupted after {seconds:.0f}{of} s")
    return found


def _missing_trials(run: Run, trials: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    # A search may end a trial on purpose: its steps until then are whole. Nor is a trial missing that was left out
    # because the run was decided.
    stopped = [int(info["trial"]) for info in trials if not info.get("complete") and not info.get("ended")]
    recorded = {int(info["trial"]) for info in trials}
    count = mapping(run.records.experiment.get("trials")).get("count")
    planned = count if isinstance(count, int) and not (trials and trials[-1].get("ended")) else 0
    most = max([planned, *recorded])
    missing = [number for number in range(1, most + 1) if number not in recorded]
    joined = run.records.runs if run.records.joined else ()
    own_names = {at: f" (trial {own} of {one.name})" for one in joined for own, at in one.trials.items()}
    for what, numbers in (("stopped before its end", stopped), ("missing", missing)):
        if numbers:
            yield f"{', '.join(run.trial_name(at) + own_names.get(at, '') for at in numbers)} {what}"


def missing_requests(
    counts: Mapping[str, int],
    planned: Mapping[str, int],
    *,
    mirrored: bool = False,
    ended: Collection[str] = (),
) -> list[str]:
    """Describe missing requests: fewer than planned or, if mirrored, than the other arms have. Arms that `ended` early
    are exempt."""
    missing = []
    common = max(counts.values(), default=0) if mirrored else 0
    expected = {name: max(planned.get(name, 0), 0 if name in ended else common) for name in counts}
    for name, count in counts.items():
        if count == 0:
            missing.append(f"{name} has no request")
        elif expected[name] - count > allowed_missing(expected[name]):
            missing.append(f"{name} has {count} of {counted(expected[name], 'request')}")
    total, recorded = planned.get("*", 0), sum(counts.values())
    if total - recorded > allowed_missing(total):
        missing.append(f"{recorded} of {total} planned requests are there")
    return missing if counts else ["no arm has requests"]


def allowed_missing(expected: int) -> int:
    """Return how many of `expected` requests may be missing: those in flight when recorders stop."""
    return max(_MISSING_SLACK, int(_MISSING_SHARE * expected))


@rule(
    "alive",
    sees="The arm died, or a replica had stopped serving when the traffic ended. A control that died opens the "
    "estimates of every arm.",
    remedy="See the logs of the arm.",
    opens=ALL_KINDS,
)
def alive(seen: Evidence) -> Iterator[Check]:
    run = seen.run
    for account in [run.account(arm) for arm in run.arms] if any(run.infos) else []:
        if account.external:
            continue
        faults = []
        for death in account.deaths:
            compiling = into_compile(death.get("compiling"))
            how = f"exit code {death.get('exit_code')}{compiling and f', {compiling}'}"
            faults.append(f"{death.get('replica', account.arm)} died under load ({how})")
        faults += [f"{name} had stopped serving when the traffic ended" for name in account.silent]
        control = account.arm == run.control
        yield alive.found(faults, arm=None if control else account.arm, opens=ESTIMATES if control else ALL_KINDS)


def into_compile(facts: object) -> str:
    """Describe an unfinished compile of trial.json: "12.0 s into a compile for prefill 2x64"; empty if none."""
    row = mapping(facts)
    seconds, shape = number(row.get("seconds")), text_of(row, "shape")
    return "" if seconds is None else f"{seconds:.1f} s into a compile" + (f" for {shape}" if shape else "")
