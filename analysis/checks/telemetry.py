"""Whether the compile telemetry is complete: every row is placed, every count is met, every stall is explained.

Telemetry that is lost makes an arm look better than it is. So what it leaves out opens the gates that rest on it: those
on compiles, and the estimates, which leave out the requests that met a compile.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from tailgate.analysis.arrays import Ints
from tailgate.analysis.checks.check import ESTIMATES, STALLS, Check, Evidence, rule
from tailgate.analysis.checks.complete import into_compile
from tailgate.analysis.judging.gates.compiles import (
    COMPILE_GATES,
    SHORTEST_COMPILE_S,
    may_compile,
    replica_minutes,
    stall_values,
)
from tailgate.analysis.records.plain_values import mapping, number
from tailgate.analysis.run.client_stalls import UNKNOWN, ArmStalls, compile_windows, is_explained
from tailgate.analysis.run.run import Run
from tailgate.analysis.run.startup import blind_spots, compiled_steps
from tailgate.analysis.run.trials import Trial
from tailgate.analysis.wording import counted, digits, listed

_SLACK_NS = 50_000_000  # by which clocks may differ, and what a request's own account may exceed the events'
_SLACK_SHARE = 0.1
_LONGEST = "longest compile stall"
_SEVERAL = 2  # one short stall may be an accident: it opens no gate by the requests that it met


@rule(
    "telemetry",
    sees="A compile event cannot be placed, events or steps are fewer than the replicas counted, a replica reported "
    "no count, or a reported compile delay has no event; where the count is not known, a stall of unknown cause of "
    f"{SHORTEST_COMPILE_S:g} s or more. Missing steps open *eager steps* alone.",
    says="Telemetry is missing: {}.",
    remedy="Run again; see the logs of the arm and of the disk.",
    opens=(*ESTIMATES, "recompile"),
    by_step=True,
)
def telemetry(seen: Evidence) -> Iterator[Check]:
    for arm in seen.run.arms:
        if seen.run.records.events is not None:
            yield _events(seen, arm)
        yield from _steps(seen.run, arm)


def _events(seen: Evidence, arm: str) -> Check:
    """Check the arm's compile events. Of an external arm only the place of its events is known. Events of no known arm
    count against the control, whose faults open all arms."""
    run, account, control = seen.run, seen.run.account(arm), arm == seen.run.control
    owners = (arm, None) if control else (arm,)
    unplaced = [item for item in run.unplaced_events if item.arm in owners]
    faults = [f"{item.text} cannot be placed" for item in unplaced]
    opens: tuple[str, ...] = ("recompile", *ESTIMATES) if unplaced or not control else ESTIMATES
    if not account.external:
        lost, vouched = lost_events(run, arm)
        faults += lost
        if not control:
            opens = opens if faults else ("recompile",)
            faults += unexplained_stalls(run, arm, seen.stalls[arm], vouched=vouched and not lost)
    return telemetry.found(faults, arm=None if control else arm, opens=opens)


def lost_events(run: Run, arm: str) -> tuple[list[str], bool]:
    """Return where recorded events are fewer than the arm's replicas counted, and whether all of them counted.

    Event ids count too: a replica numbers its events from 0. A compile in progress at the end is no event, and is
    missing likewise. A trial that was stopped has no count.
    """
    faults: list[str] = []
    counted_all = bool(run.trials_of(arm))
    ids: dict[tuple[int, str], set[str]] = defaultdict(set)
    for event in run.events:
        if event.arm == arm:
            ids[event.trial, event.replica or ""].add(event.event_id)
    dead = [death.get("replica") for death in run.account(arm).deaths]
    for trial in run.trials_of(arm):
        counted_all &= bool(trial.info.get("final"))
        for replica in run.account(arm).replica_names(trial):
            own, known = ids[trial.number, replica], _count(trial, replica, "compile_events")
            counted_all &= known is not None
            if known is None and trial.info.get("final") and replica not in dead:
                faults.append(f"{replica} reported no counts at the end of {run.trial_name(trial.number)}")
            if compiling := into_compile(_final(trial, replica).get("compiling")):
                faults.append(f"{replica} was {compiling} when {run.trial_name(trial.number)} ended")
            place = f"{replica} in {run.trial_name(trial.number)}"
            faults += _fewer(place, "compile event", max(known or 0.0, _numbered(own, replica)), len(own))
    return faults, counted_all


def _final(trial: Trial, replica: str) -> Mapping[str, Any]:
    return mapping(mapping(trial.info.get("final")).get(replica))


def _count(trial: Trial, replica: str, what: str) -> float | None:
    return number(mapping(_final(trial, replica).get("counters")).get(what))


def _fewer(place: str, what: str, expected: float, recorded: int) -> list[str]:
    words = f"{place} counted {counted(int(expected), what)}, and {recorded} are recorded"
    return [words] if recorded < expected else []


def _numbered(ids: Iterable[str], replica: str) -> int:
    """Return how many events their ids imply: TRIAL-REPLICA-NUMBER, after the run in joined runs. 0 for other ids."""
    pattern = re.compile(rf"(?:\d+\.)?\d+-{re.escape(replica)}-(\d{{1,9}})")
    return max((int(match[1]) + 1 for name in ids if (match := pattern.fullmatch(name))), default=0)


def unexplained_stalls(run: Run, arm: str, seen: ArmStalls, *, vouched: bool) -> list[str]:
    """Describe compiles that delayed requests by the server's timing and that no compile event explains.

    If the number of events is not certain, a stall of unknown cause may be a compile that no event reports.
    """
    requests = _unexplained_requests(run, arm)
    suspected = [] if vouched else [stall for stall in seen.of_cause(UNKNOWN) if may_compile(stall)]
    stalls = [stall for stall in suspected if not is_explained(stall, run.events)]
    faults = []
    if requests.size:
        longest = digits(float(run.requests.stall_ns[requests].max()) / 1e9)
        faults.append(
            f"by its server's account a compile delayed {counted(requests.size, 'request')} by up to {longest} s, and "
            "no compile event reports one"
        )
    if stalls:
        longest = digits(max(stall.seconds for stall in stalls))
        faults.append(
            f"no event covers {counted(len(stalls), 'stall')} of up to {longest} s, and events may be missing"
        )
    return faults


def _unexplained_requests(run: Run, arm: str) -> Ints:
    """Return the rows of requests whose server reports a longer compile than its events explain."""
    requests = run.requests
    held = np.flatnonzero(run.of_arm(arm) & ~requests.broken & (requests.stall_ns > _SLACK_NS))
    by_events = np.zeros(held.size)
    for trial in np.unique(requests.trial[held]).tolist():
        for replica in np.unique(requests.replica[held]).tolist():
            own = (requests.trial[held] == trial) & (requests.replica[held] == replica)
            name = requests.replicas[replica] if replica >= 0 else None
            windows = compile_windows(run.events, arm, trial, name)
            by_events[own] = windows.overlap_ns(requests.start_ns[held[own]], requests.end_ns[held[own]])
    reported = requests.stall_ns[held]
    return np.asarray(held[reported - by_events > np.maximum(_SLACK_NS, _SLACK_SHARE * reported)])


def _steps(run: Run, arm: str) -> Iterable[Check]:
    """Check that engine steps are complete: padding and the share of eager steps rest on them. If a compiling replica
    has no steps, whether it ran compiled code is unknown. A run that was kept without steps is exempt."""
    steps = run.records.steps
    if steps is None:
        return
    rows_by_replica = Counter(zip(steps.column("trial").to_pylist(), steps.column("replica").to_pylist(), strict=True))
    faults, silent = [], False
    for trial in run.trials:
        for replica in run.account(arm).replica_names(trial):
            recorded = rows_by_replica[trial.number, replica]
            place = f"{replica} in {run.trial_name(trial.number)}"
            lost = _fewer(place, "engine step", _count(trial, replica, "steps") or 0.0, recorded)
            silent |= bool(lost) and not recorded and run.account(arm).compiles
            faults += lost
    if faults:
        opens = (*ESTIMATES, "recompile") if silent else ("recompile",)
        yield telemetry.found(faults, arm=arm, opens=opens, gates=() if silent else ("eager steps",))


@rule(
    "telemetry",
    sees="torch or Triton did not report a test compile at the start of a replica.",
    says="The arm's record of compiles is incomplete: {}.",
    remedy="Use a version of torch and Triton that docs/explanation/arms.md names, or a tailgate that reads this one.",
    opens=("recompile",),
)
def blind(seen: Evidence) -> Iterator[Check]:
    """Gates that count events would PASS blindly."""
    run = seen.run
    for arm in run.treatments if run.records.events is not None else ():
        if not run.account(arm).external and (spots := blind_spots(run, arm)):
            yield blind.found(spots, arm=arm)


@rule(
    "stalls of unknown cause",
    sees="Stalls that clients saw and nothing explains exceed a limit of *longest compile stall*, *compile stall per "
    "minute* or *requests hit*, and open that gate. A single stall opens *longest compile stall* alone.",
    remedy="See what the arm and its host did then: logs, the allocator, first loads of kernels. If users may wait "
    "that long, raise the limit.",
    opens=("recompile",),
    rank=STALLS,
    in_search=False,  # a search drives arms past what they hold, where a server is silent for longer
)
def unknown_stalls(seen: Evidence) -> Iterator[Check]:
    """A pause of the allocator, a first load of a kernel or an unrecorded compiler delays users as long as a compile,
    and one in half an hour moves no p99."""
    run = seen.run
    for arm in run.treatments if run.records.events is not None else ():
        if run.account(arm).external:
            continue
        stalls = [stall for stall in seen.stalls[arm].of_cause(UNKNOWN) if not is_explained(stall, run.events)]
        requests = int((run.of_arm(arm) & ~run.requests.broken).sum())
        values = stall_values(stalls, requests=requests, minutes=replica_minutes(run, arm))
        # Their number is known: the server counts its compiles.
        exceeded = {
            name: f"gates.{key}"
            for (name, _, key, _, _), value in zip(COMPILE_GATES[1:], values[1:], strict=True)
            if value > getattr(run.limits, key) and (name == _LONGEST or len(stalls) >= _SEVERAL)
        }
        if not exceeded:
            yield unknown_stalls.found([])
            continue
        longest = max(stalls, key=lambda stall: stall.seconds)
        at_s = run.offset_s(longest.trial, longest.start_ns)
        fault = (
            f"{arm} stalled {counted(len(stalls), 'time')}, for up to {digits(longest.seconds)} s ({at_s or 0.0:.0f} s "
            f"into {run.trial_name(longest.trial)}), and no compile event explains it"
        )
        remedy = unknown_stalls.remedy.replace("the limit", listed([*exceeded.values()]))
        yield unknown_stalls.found([fault], arm=arm, gates=tuple(exceeded), remedy=remedy)


@rule(
    "compiled code",
    sees="An arm asks for compiling, and a replica or a kind of step ran no compiled code.",
    says="An arm with compile.enabled ran no compiled code: {}.",
    remedy="See its graph breaks with tailgate inspect, or set compile.enabled = false.",
    opens=(*ESTIMATES, "recompile"),
)
def compiled(seen: Evidence) -> Iterator[Check]:
    """An arm can enable compiling and still call its model around the compiled code: nothing fails then."""
    for arm in seen.run.arms:
        counts, named = compiled_steps(seen.run, arm), seen.run.trial_name
        ran = [count for count in counts if count.compiled]
        places, ran_places = ({f"{row.replica} in {named(row.trial or 1)}" for row in rows} for rows in (counts, ran))
        kinds, ran_kinds = ({f"{count.kind} steps" for count in rows} for rows in (counts, ran))
        without = [f"{arm}, {what}" for what in sorted(places - ran_places) or sorted(kinds - ran_kinds)]
        if counts:
            yield compiled.found(without, arm=None if arm == seen.run.control else arm)
