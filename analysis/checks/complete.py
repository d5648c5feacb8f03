"""Whether the records are complete: every trial, process, file and request is there, and every arm lived."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from analysis.checks.check import ALL_KINDS, ESTIMATES, Check, Evidence, Rule
from analysis.checks.generator import known_accounts, lost_processes
from analysis.records.placing import words_of
from analysis.records.plain_values import mapping, number, text_of
from analysis.run.run import Run
from analysis.wording import counted, sentence

_MISSING_SLACK = 2  # requests that may be under way when recorders stop
_MISSING_SHARE = 0.001
_RUN_AGAIN = "Run again, and let the run end by itself; logs/locust.log says why a load process ended."


def _damage(seen: Evidence) -> Iterable[Check]:
    run, broken = seen.run, int(seen.run.requests.broken.sum())
    faults = [*run.records.problems, *_unrecorded(run)]
    if broken:
        have = "has" if broken == 1 else "have"
        faults.append(f"{counted(broken, 'request')} {have} times that are missing or run backwards")
    if not run.records.experiment and is_recorded_whole(run):
        faults.append("experiment.toml is missing or empty, so what the arms must hold is unknown")
    if repeated := run.requests.repeated:
        faults.append(f"{counted(repeated, 'row')} repeat{'s' if repeated == 1 else ''} a request")
    yield DAMAGE.row(not faults, f"{'; '.join(faults)}." if faults else "")


def _unrecorded(run: Run) -> Iterable[str]:
    """Columns that judging rests on and no request of an arm has: `request_id` finds rows that are there twice,
    `sent_ns` late requests, `output_tokens` empty answers. Bare tables and imported results need not have them."""
    requests = run.requests
    if run.pace or not is_recorded_whole(run):
        return
    named = requests.request_ids.is_valid().to_numpy()
    for arm in run.arms:
        own = run.of_arm(arm)
        needed = {"request_id": (own, named), "sent_ns": (own, requests.sent_ns > 0)}
        # Of production traffic a splitter knows what the server says.
        if not run.embeds and not run.of_users:
            needed["output_tokens"] = (own & requests.ok, ~requests.uncounted)
        for column, (rows, known) in needed.items():
            if rows.any() and not (rows & known).any():
                yield f"no request of {arm} has {column}"


def is_recorded_whole(run: Run) -> bool:
    """Whether tailgate recorded the run. Tables that another program wrote have fewer columns, and a trial.json that
    says little."""
    return any("arms" in info for info in run.infos)


DAMAGE = Rule(
    name="complete",
    find=_damage,
    sound="All records are whole: every trial ran to its end, and every arm has its requests.",
    remedy=_RUN_AGAIN,
    opens=ALL_KINDS,
    at_end=True,
)


def _unplaced(seen: Evidence) -> Iterable[Check]:
    faults = "; ".join(words_of(seen.run.unplaced_requests, "request"))
    yield UNPLACED.row(not faults, f"{faults} cannot be placed." if faults else "")


UNPLACED = Rule(
    name="complete",
    find=_unplaced,
    remedy="Run again; see the logs of the arm and of the disk.",
    opens=ALL_KINDS,
)


def _stopped(seen: Evidence) -> Iterable[Check]:
    run = seen.run
    trials = [info for info in run.infos if info]

    def named(numbers: Iterable[int]) -> str:
        return ", ".join(f"{at} ({own})" if (own := run.own_names.get(at)) else str(at) for at in numbers)

    # A search may end a trial on purpose: its steps until then are whole. Nor is a trial missing that was left out
    # because the run was decided.
    stopped = [int(trial["trial"]) for trial in trials if not trial.get("complete") and not trial.get("ended")]
    there = {int(trial["trial"]) for trial in trials}
    most = max(there, default=0) if trials and trials[-1].get("ended") else max([run.planned_trials, *there])
    missing = [number for number in range(1, most + 1) if number not in there]
    faults = [
        f"trial {named(numbers)} {one}" if len(numbers) == 1 else f"trials {named(numbers)} {many}"
        for numbers, one, many in (
            (stopped, "was stopped before its end", "were stopped before their end"),
            (missing, "is missing", "are missing"),
        )
        if numbers
    ]
    faults += lost_processes(known_accounts(run.records.generators), trials)
    yield STOPPED.row(not faults, f"{sentence(faults)}." if faults else "")


STOPPED = Rule(
    name="complete",
    find=_stopped,
    remedy=_RUN_AGAIN,
    opens=ALL_KINDS,
    at_end=True,
    by_step=True,
)


def _short(seen: Evidence) -> Iterable[Check]:
    run = seen.run
    counts = {arm: int(run.of_arm(arm).sum()) for arm in run.arms}
    if not run.in_turn:
        closed = run.reported_open_loop is False and not run.planned
        alike = run.copied and not run.copied_in_part and not closed
        yield requests_of_arms(counts, run.planned, mirrored=alike, ended=run.ended_arms)
        return
    # Each arm had requests of its own, so that what a treatment lacks concerns no other.
    for arm, count in counts.items():
        go_on = None if run.trials_of(arm) else "Go on with the search: tailgate frontier --after RUN_DIR."
        own = None if arm == run.control else arm
        yield requests_of_arms({arm: count}, {arm: run.planned.get(arm, 0)}, arm=own, remedy=go_on)


def requests_of_arms(
    counts: Mapping[str, int],
    planned: Mapping[str, int],
    *,
    mirrored: bool = False,
    ended: Collection[str] = (),
    arm: str | None = None,
    remedy: str | None = None,
) -> Check:
    """Every arm got its requests: each of those planned, and under a mirrored design as many as the others, but for
    arms that `ended` before their time."""
    missing: list[str] = []
    common = max(counts.values(), default=0) if mirrored else 0
    expected = {name: max(planned.get(name, 0), 0 if name in ended else common) for name in counts}
    for name, count in counts.items():
        if count == 0:
            missing.append(f"{name} has no request")
        elif expected[name] - count > allowed_missing(expected[name]):
            missing.append(f"{name} has {count} of {counted(expected[name], 'request')}")
    total, there = planned.get("*", 0), sum(counts.values())
    if total - there > allowed_missing(total):
        missing.append(f"{there} of {total} planned requests were recorded")
    if not counts:
        missing.append("no arm has requests")
    return SHORT.row(not missing, f"{'; '.join(missing)}." if missing else "", arm=arm, remedy=remedy)


def allowed_missing(expected: int) -> int:
    """How many of so many requests may be missing: those under way when recorders stop."""
    return max(_MISSING_SLACK, int(_MISSING_SHARE * expected))


SHORT = Rule(
    name="complete",
    find=_short,
    remedy="See the logs of the arm and of the load generator.",
    opens=ALL_KINDS,
    at_end=True,
    by_step=True,
)


def _alive(seen: Evidence) -> Iterable[Check]:
    run = seen.run
    accounts = [run.account(arm) for arm in run.arms] if any(run.infos) else []
    for account in accounts:
        if not account.external:
            control = account.arm == run.control
            yield lived(account.arm, account.deaths, control=control, silent=account.silent)


def lived(arm: str, deaths: Sequence[Mapping[str, Any]], *, control: bool, silent: Sequence[str] = ()) -> Check:
    """The arm lived through the run: a control that died spoils every comparison. `silent` replicas live, and neither
    served nor answered once the traffic was over."""
    codes = ", ".join(f"{death.get('replica', arm)} ({_how(death)})" for death in deaths)
    faults = [f"{arm} died under load: {codes}"] if deaths else []
    faults += [f"{', '.join(silent)} did not serve any more when the traffic was over"] if silent else []
    return ALIVE.row(
        not faults,
        f"{'; '.join(faults)}." if faults else "",
        arm=None if control else arm,
        opens=ESTIMATES if control else ALL_KINDS,
        remedy=f"See the logs of {arm}.",
    )


def into_compile(facts: object) -> str:
    """What trial.json says of a compile that had not ended: "12.0 s into a compile for prefill 2x64". Empty where it
    says nothing."""
    row = mapping(facts)
    seconds, shape = number(row.get("seconds")), text_of(row, "shape")
    return "" if seconds is None else f"{seconds:.1f} s into a compile" + (f" for {shape}" if shape else "")


def _how(death: Mapping[str, Any]) -> str:
    compiling = into_compile(death.get("compiling"))
    return f"exit code {death.get('exit_code')}" + (f", {compiling}" if compiling else "")


ALIVE = Rule(name="alive", find=_alive, sound="Every arm lived through the run.", opens=ALL_KINDS)
