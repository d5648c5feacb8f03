"""Whether the compile telemetry is complete: every row is placed, every count is met, every stall is explained.

Telemetry that is lost makes an arm look better than it is. So what it leaves out opens the gates that rest on it: those
on compiles, and the estimates, which leave out the requests that met a compile.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import pyarrow as pa

from analysis.judging.checks.records import into_compile
from analysis.judging.checks.stalls import check_unknown, unexplained_stalls
from analysis.judging.load_steps import is_search
from analysis.judging.validity import ALL_KINDS, ESTIMATES, Check
from analysis.records.placing import Unplaced, words_of
from analysis.records.plain_values import mapping, number
from analysis.run.client_stalls import ArmStalls
from analysis.run.run import Run
from analysis.run.startup import blind_spots
from analysis.run.trials import Trial
from analysis.wording import sentence

_REMEDY = "Run again; see the logs of the arm and of the disk."


def check_telemetry(run: Run, stalls: Mapping[str, ArmStalls]) -> Iterable[Check]:
    """The checks on the compile events of each arm that tailgate started, and of those of others' logs that are placed;
    none where there is no such table."""
    yield check_placed(run.unplaced_requests)
    if run.records.events is None:
        return
    for arm in run.arms:
        account = run.account(arm)
        if arm == run.control or not account.external or account.tells_compiles:
            yield check_events(run, arm, stalls.get(arm))
        if arm != run.control and not account.external:
            # A search drives arms past what they hold, and such a server is silent for longer than users would see.
            if not is_search(run):
                yield check_unknown(run, stalls[arm])
            yield check_sight(arm, blind_spots(run, arm))
    if run.records.steps is not None:
        yield from (check_steps(run, run.records.steps, arm) for arm in run.arms)


def check_placed(unplaced: Sequence[Unplaced]) -> Check:
    """Every request names its arm, its time and its kind."""
    faults = words_of(unplaced, "request")
    return Check(
        check="placed requests",
        ok=not faults,
        value=float(sum(item.rows for item in unplaced)),
        limit=0.0,
        reason=f"{'; '.join(faults)} cannot be placed." if faults else "Every request has its place in the run.",
        affects=ALL_KINDS,
        remedy=_REMEDY,
    )


def check_events(run: Run, arm: str, stalls: ArmStalls | None) -> Check:
    """The compile events of the arm are whole: each has its place, none is missing by the replicas' own counts, and
    they explain every compile that delayed requests.

    Of an external arm nothing but the place is known. Events of no known arm may be anybody's: they are the control's.
    """
    control, external = arm == run.control, run.account(arm).external
    owners = (arm, None) if control else (arm,)
    unplaced = words_of([item for item in run.unplaced_events if item.arm in owners], "compile event")
    lost, vouched = ([], False) if external else lost_events(run, arm)
    faults = [f"{item} cannot be placed" for item in unplaced]
    faults += [f"compile events of {arm} are missing: {item}" for item in lost]
    opens: tuple[str, ...] = ("recompile", *ESTIMATES) if unplaced or not control else ESTIMATES
    if stalls is not None and not control and not external:
        unexplained = unexplained_stalls(run, arm, stalls, vouched=vouched and not lost)
        opens = opens if faults else ("recompile",)
        faults += unexplained
    return Check(
        check="compile events",
        ok=not faults,
        value=float(len(faults)),
        limit=0.0,
        arm=None if control else arm,
        reason=f"{sentence(faults)}."
        if faults
        else f"The compile events of {arm} are whole{'' if vouched else ', as far as it counted them'}.",
        affects=opens,
        remedy=_REMEDY,
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
    for trial in run.trials_of(arm):
        final = mapping(trial.info.get("final"))
        dead = [death.get("replica") for death in run.account(arm).deaths]
        for replica in run.account(arm).replica_names(trial):
            own = ids[trial.number, replica]
            known = _count(trial, replica, "compile_events")
            if known is None:
                vouched = False
                if final and replica not in dead:
                    faults.append(f"{replica} did not tell its counts at the end of trial {trial.number}")
            if compiling := into_compile(mapping(final.get(replica)).get("compiling")):
                faults.append(f"{replica} was {compiling} when the records of trial {trial.number} ended")
            expected = max(int(known or 0), _numbered(own, replica))
            if len(own) < expected:
                faults.append(f"{replica} counted {expected} in trial {trial.number} and {len(own)} are recorded")
        vouched &= bool(final)
    return faults, vouched


def check_sight(arm: str, spots: Sequence[str]) -> Check:
    """The arm's replicas could see what their compilers did: test compiles were reported, with nothing missing.

    What cannot be seen is no event, so gates that count events would PASS blindly. An arm that was recorded before
    blind spots were is taken at its word.
    """
    return Check(
        check="compilers seen",
        ok=not spots,
        value=float(len(spots)),
        limit=0.0,
        arm=arm,
        reason=f"{arm} does not see all that its compilers do: {'; '.join(spots)}."
        if spots
        else f"{arm} is not known to miss anything that its compilers do.",
        affects=("recompile",),
        remedy="Use a version of torch and Triton that docs/arms.md names, or a tailgate that reads this one.",
    )


def check_steps(run: Run, steps: pa.Table, arm: str) -> Check:
    """As many engine steps of the arm are recorded as its replicas counted.

    Figures on padding rest on them, and the share of steps that ran eagerly. Where nothing is left of a replica that
    compiles, nobody knows that it ran compiled code. Trials of a run that was kept without its steps say nothing.
    """
    counts = steps.group_by(["trial", "replica"]).aggregate([([], "count_all")])
    rows = {(row["trial"], row["replica"]): row["count_all"] for row in counts.to_pylist()}
    faults, silent = [], False
    for trial in (trial for trial in run.trials if trial.number not in run.records.stepless):
        for replica in run.account(arm).replica_names(trial):
            count, recorded = _count(trial, replica, "steps"), rows.get((trial.number, replica), 0)
            if count is not None and recorded < count:
                faults.append(f"{replica} counted {count:.0f} in trial {trial.number} and {recorded} are recorded")
                silent |= not recorded and run.account(arm).compiles
    return Check(
        check="step counts",
        arm=arm,
        ok=not faults,
        value=float(len(faults)),
        limit=0.0,
        reason=f"Engine steps are missing: {'; '.join(faults)}."
        if faults
        else f"No engine step of {arm} is known to be missing.",
        affects=(*ESTIMATES, "recompile") if silent else ("recompile",),
        gates=() if silent else ("eager steps",),
        remedy=_REMEDY,
    )


def _count(trial: Trial, replica: str, what: str) -> float | None:
    """What the replica counted up to the end of the trial; None where that is not recorded."""
    return number(mapping(mapping(mapping(trial.info.get("final")).get(replica)).get("counters")).get(what))


def _numbered(ids: Iterable[str], replica: str) -> int:
    """Return how many events there must have been by their ids, TRIAL-REPLICA-NUMBER, with the run in front in joined
    runs. 0 for ids of another form."""
    pattern = re.compile(rf"(?:\d+\.)?\d+-{re.escape(replica)}-(\d{{1,9}})")
    matches = [pattern.fullmatch(name) for name in ids]
    return max((int(match[1]) + 1 for match in matches if match), default=0)
