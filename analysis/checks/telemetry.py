"""Whether the compile telemetry is complete: every row is placed, every count is met, every stall is explained.

Telemetry that is lost makes an arm look better than it is. So what it leaves out opens the gates that rest on it: those
on compiles, and the estimates, which leave out the requests that met a compile.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from analysis.arrays import Ints
from analysis.checks.check import ESTIMATES, Check, Evidence, Rule
from analysis.checks.complete import into_compile
from analysis.judging.gates.compiles import COMPILE_GATES, cold_ends, may_compile, part_minutes, stall_values
from analysis.records.placing import words_of
from analysis.records.plain_values import mapping, number
from analysis.run.client_stalls import UNKNOWN, ArmStalls, Stall, compile_windows, is_explained
from analysis.run.run import Run
from analysis.run.startup import CompiledSteps, blind_spots, compiled_steps
from analysis.run.trials import Trial
from analysis.wording import counted, digits, sentence

_SLACK_NS = 50_000_000  # by which clocks may differ, and what a request's own account may exceed the events'
_SLACK_SHARE = 0.1
_LONGEST = "longest stall"
_SEVERAL = 2  # one short stall may be an accident: it opens no gate by the requests that it met
_MOST_PLACES = 4
_REMEDY = "Run again; see the logs of the arm and of the disk."


def _events(seen: Evidence) -> Iterable[Check]:
    """Of an external arm nothing but the place of its events is known. Events of no known arm may be anybody's: they
    are the control's, whose faults open all arms."""
    run = seen.run
    for arm in run.arms if run.records.events is not None else ():
        account, control = run.account(arm), arm == run.control
        if account.external and not control and not account.tells_compiles:
            continue
        owners = (arm, None) if control else (arm,)
        unplaced = words_of([item for item in run.unplaced_events if item.arm in owners], "compile event")
        lost, vouched = ([], False) if account.external else lost_events(run, arm)
        faults = [f"{item} cannot be placed" for item in unplaced]
        faults += [f"compile events of {arm} are missing: {item}" for item in lost]
        opens: tuple[str, ...] = ("recompile", *ESTIMATES) if unplaced or not control else ESTIMATES
        if not control and not account.external:
            unexplained = unexplained_stalls(run, arm, seen.stalls[arm], vouched=vouched and not lost)
            opens = opens if faults else ("recompile",)
            faults += unexplained
        if faults:
            yield EVENTS.row(False, f"{sentence(faults)}.", arm=None if control else arm, opens=opens)
    if run.records.events is not None:
        yield EVENTS.row(True)


EVENTS = Rule(
    name="telemetry",
    find=_events,
    sound="The compile telemetry of every arm is whole, as far as its replicas counted.",
    remedy=_REMEDY,
    by_step=True,
)


def lost_events(run: Run, arm: str) -> tuple[list[str], bool]:
    """Where recorded events are fewer than the arm's replicas counted, in words; and whether all of them counted.

    The numbers in event ids count too: a replica numbers its events from 0. A compile that went on at the end is no
    event, and is missing likewise. A trial that was stopped has no count.
    """
    faults: list[str] = []
    vouched = bool(run.trials_of(arm))
    ids: dict[tuple[int, str], set[str]] = defaultdict(set)
    for event in run.events:
        if event.arm == arm:
            ids[event.trial, event.replica or ""].add(event.event_id)
    dead = [death.get("replica") for death in run.account(arm).deaths]
    for trial in run.trials_of(arm):
        final = mapping(trial.info.get("final"))
        for replica in run.account(arm).replica_names(trial):
            own = ids[trial.number, replica]
            known = _count(trial, replica, "compile_events")
            if known is None:
                vouched = False
                if final and replica not in dead:
                    faults.append(f"{replica} reported no counts at the end of trial {trial.number}")
            if compiling := into_compile(mapping(final.get(replica)).get("compiling")):
                faults.append(f"{replica} was {compiling} when the records of trial {trial.number} ended")
            expected = max(int(known or 0), _numbered(own, replica))
            if len(own) < expected:
                faults.append(f"{replica} counted {expected} in trial {trial.number} and {len(own)} are recorded")
        vouched &= bool(final)
    return faults, vouched


def _count(trial: Trial, replica: str, what: str) -> float | None:
    """What the replica counted up to the end of the trial; None where that is not recorded."""
    return number(mapping(mapping(mapping(trial.info.get("final")).get(replica)).get("counters")).get(what))


def _numbered(ids: Iterable[str], replica: str) -> int:
    """Return how many events there must have been by their ids, TRIAL-REPLICA-NUMBER, with the run in front in joined
    runs. 0 for ids of another form."""
    pattern = re.compile(rf"(?:\d+\.)?\d+-{re.escape(replica)}-(\d{{1,9}})")
    return max((int(match[1]) + 1 for name in ids if (match := pattern.fullmatch(name))), default=0)


def unexplained_stalls(run: Run, arm: str, seen: ArmStalls, *, vouched: bool) -> list[str]:
    """Return what no compile event explains of the compiles that delayed requests by the server's account, in words.

    Where the number of events is not vouched for, a stall of unknown cause may be a compile that no event reports.
    """
    requests = _unexplained_requests(run, arm)
    suspected = [] if vouched else [stall for stall in seen.of_cause(UNKNOWN) if may_compile(stall)]
    stalls = [stall for stall in suspected if not is_explained(stall, run.events)]
    faults = []
    if requests.size:
        longest = float(run.requests.stall_ns[requests].max()) / 1e9
        faults.append(
            f"{counted(requests.size, 'request')} {'was' if requests.size == 1 else 'were'} delayed by a compile by "
            f"its server's account (for {digits(longest)} s at most) while no compile event reports one"
        )
    if stalls:
        longest = max(stall.seconds for stall in stalls)
        faults.append(
            f"clients saw {counted(len(stalls), 'stall')} ({digits(longest)} s at most) and "
            f"{'it is' if len(stalls) == 1 else 'they are'} in no compile event, although events may be missing"
        )
    return faults


def _unexplained_requests(run: Run, arm: str) -> Ints:
    """The rows of requests whose server reports a longer compile than its events lay over them."""
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


def _blind(seen: Evidence) -> Iterable[Check]:
    """Compiles that a compiler does not report are no events, so that gates which count events would PASS blindly. Test
    compiles at the start show which are not."""
    run = seen.run
    for arm in run.treatments if run.records.events is not None else ():
        if not run.account(arm).external and (spots := blind_spots(run, arm)):
            reason = f"{arm} does not see all that its compilers do: {'; '.join(spots)}."
            yield BLIND.row(False, reason, arm=arm)


BLIND = Rule(
    name="telemetry",
    find=_blind,
    remedy="Use a version of torch and Triton that docs/arms.md names, or a tailgate that reads this one.",
    opens=("recompile",),
)


def _steps(seen: Evidence) -> Iterable[Check]:
    """Figures on padding rest on engine steps, and the share of steps that ran eagerly. Where nothing is left of a
    replica that compiles, it is unknown whether it ran compiled code. Runs that were kept without steps are exempt."""
    run, steps = seen.run, seen.run.records.steps
    if steps is None:
        return
    groups = steps.group_by(["trial", "replica"]).aggregate([([], "count_all")]).to_pylist()
    rows = {(row["trial"], row["replica"]): row["count_all"] for row in groups}
    for arm in run.arms:
        faults, silent = [], False
        for trial in (trial for trial in run.trials if trial.number not in run.records.stepless):
            for replica in run.account(arm).replica_names(trial):
                count, recorded = _count(trial, replica, "steps"), rows.get((trial.number, replica), 0)
                if count is not None and recorded < count:
                    faults.append(f"{replica} counted {count:.0f} in trial {trial.number} and {recorded} are recorded")
                    silent |= not recorded and run.account(arm).compiles
        if faults:
            yield STEPS.row(
                False,
                f"Engine steps are missing: {'; '.join(faults)}.",
                arm=arm,
                opens=(*ESTIMATES, "recompile") if silent else ("recompile",),
                gates=() if silent else ("eager steps",),
            )


STEPS = Rule(name="telemetry", find=_steps, remedy=_REMEDY, by_step=True)


# --- Stalls of unknown cause ------------------------------------------------------------------------------------------


def _unknown(seen: Evidence) -> Iterable[Check]:
    """A pause of the allocator, a first load of a kernel or a compiler that is not recorded delays users as long as a
    compile, and one in half an hour moves no p99. What every server with work in flight bore is the host's, and what
    its prompts take is work."""
    run = seen.run
    own = [arm for arm in run.treatments if not run.account(arm).external] if run.records.events is not None else []
    return [check for arm in own for check in unknown_stalls(run, seen.stalls[arm])]


def unknown_stalls(run: Run, seen: ArmStalls) -> Iterator[Check]:
    """The stalls of the arm that no event explains, where they exceed what compiles may cost users."""
    limits, ends = run.limits, cold_ends(run)
    unexplained = [stall for stall in seen.of_cause(UNKNOWN) if not is_explained(stall, run.events)]
    served = run.of_arm(seen.arm) & ~run.requests.broken
    parts = [("", limits)] if limits.cold is None else [("steady", limits), ("cold", limits.cold)]
    stalls: list[Stall] = []
    gates: list[str] = []
    for part, budget in parts:
        own = [
            stall
            for stall in unexplained
            if not part or (stall.start_ns < ends.get(stall.trial, 0)) is (part == "cold")
        ]
        requests = served if not part else served & (run.cold if part == "cold" else ~run.cold)
        values = stall_values(own, requests=int(requests.sum()), minutes=part_minutes(run, seen.arm, part))
        # Their number is known: the server counts its compiles.
        opened = [
            f"cold {name}" if part == "cold" else name
            for (name, _, key), value in zip(COMPILE_GATES[1:], values[1:], strict=True)
            if value > getattr(budget, key) and (name == _LONGEST or len(own) >= _SEVERAL)
        ]
        gates += opened
        stalls += own if opened else []
    if not stalls:
        yield UNKNOWN_STALLS.row(True)
        return
    longest = max(stall.seconds for stall in stalls)
    yield UNKNOWN_STALLS.row(
        False,
        _stalled(run, seen.arm, stalls, longest),
        value=longest,
        limit=limits.max_stall_s,
        arm=seen.arm,
        gates=tuple(gates),
    )


def _stalled(run: Run, arm: str, stalls: Sequence[Stall], longest: float) -> str:
    """When and for how long the arm stalled, and how many requests it delayed."""
    began_ns = {trial.number: trial.first_ns for trial in run.trials}
    places = [f"{(stall.start_ns - began_ns[stall.trial]) / 1e9:.0f} s into trial {stall.trial}" for stall in stalls]
    if len(places) > _MOST_PLACES:
        places = [*places[: _MOST_PLACES - 1], f"{len(places) - _MOST_PLACES + 1} more"]
    delayed = np.unique(np.concatenate([stall.requests for stall in stalls])).size
    return (
        f"{arm} stalled {counted(len(stalls), 'time')} ({', '.join(places)}), up to {digits(longest)} s, which delayed "
        f"{counted(delayed, 'request')}, and no compile event explains it."
    )


UNKNOWN_STALLS = Rule(
    name="stalls of unknown cause",
    find=_unknown,
    sound="But for compiles, no arm stalled by itself for longer than compiles may.",
    remedy="See what the arm and its host did then: logs, the allocator, first loads of kernels. If users may wait "
    "that long, raise gates.max_stall_s.",
    opens=("recompile",),
    in_search=False,  # a search drives arms past what they hold, where a server is silent for longer
)


# --- Compiled code ----------------------------------------------------------------------------------------------------


def _compiled(seen: Evidence) -> Iterable[Check]:
    run = seen.run
    for arm in run.arms:
        if counts := compiled_steps(run, arm):
            yield compiled_code(arm, counts, control=arm == run.control)


def compiled_code(arm: str, counts: Sequence[CompiledSteps], *, control: bool) -> Check:
    """Every replica of the arm ran compiled code in every trial, and steps of every kind did.

    An arm can ask for compiling and still call its model around what was compiled: nothing fails then, nothing
    recompiles, and its figures are those of an eager server.
    """
    ran = [count for count in counts if count.compiled]
    places = {(count.replica, count.trial) for count in counts} - {(count.replica, count.trial) for count in ran}
    kinds = {count.kind for count in counts} - {count.kind for count in ran}
    without = [f"step ran compiled code of {replica} in trial {trial}" for replica, trial in sorted(places)]
    without = without or [f"{kind} step ran compiled code" for kind in sorted(kinds)]
    steps = counted(sum(count.steps for count in counts), "step")
    return COMPILED.row(
        not without,
        f"{arm} asks for compiling, and no {', no '.join(without)}."
        if without
        else f"{sum(count.compiled for count in counts)} of {steps} of {arm} ran compiled code.",
        arm=None if control else arm,
    )


COMPILED = Rule(
    name="compiled code",
    find=_compiled,
    sound="Every arm that asks for compiling ran compiled code.",
    remedy="See compile.regions and the graph breaks of the arm with tailgate inspect, or call it eager.",
    opens=(*ESTIMATES, "recompile"),
)
