"""Whether the records are whole: nothing is cut off, no arm or trial is missing."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from analysis.judging.validity import ALL_KINDS, ESTIMATES, Check
from analysis.records.plain_values import mapping, number, text_of
from analysis.wording import counted, sentence

_MISSING_SLACK = 2  # requests that may be under way when recorders stop
_MISSING_SHARE = 0.001
_RUN_AGAIN = "Run again, and let the run end by itself; logs/locust.log says why a load process ended."


def check_records(problems: Sequence[str], broken: int, repeated: int, *, stated: bool = True) -> Check:
    """Nothing is cut off, damaged, out of order or there twice; `stated` is whether files say what they should hold."""
    faults = list(problems)
    if broken:
        faults.append(
            f"{counted(broken, 'request')} {'has' if broken == 1 else 'have'} times that are missing or run backwards"
        )
    if repeated:
        faults.append(f"{counted(repeated, 'row')} repeat{'s' if repeated == 1 else ''} a request")
    return Check(
        check="records",
        ok=not faults,
        value=float(len(problems) + broken + repeated),
        limit=0.0,
        reason=f"{'; '.join(faults)}."
        if faults
        else "All records are whole."
        if stated
        else "The records read whole; none of their files states what it should hold.",
        affects=ALL_KINDS,
        remedy=_RUN_AGAIN,
    )


def check_complete(
    trials: Sequence[Mapping[str, Any]],
    *,
    planned: int = 0,
    own_names: Mapping[int, str] | None = None,
    processes: Sequence[str] = (),
) -> Check:
    """Every trial that was planned is there and ended by itself, as did every load process: `processes` says which did
    not. `planned` is 0 where the number is not recorded; `own_names` are what trials are called in the runs that were
    joined."""

    def named(number: int) -> str:
        own = (own_names or {}).get(number)
        return f"{number} ({own})" if own else str(number)

    # A search may end a trial on purpose, and says so: its steps until then are whole.
    last = trials[-1] if trials else {}
    stopped = [named(int(trial["trial"])) for trial in trials if not trial.get("complete") and not trial.get("ended")]
    there = {int(trial["trial"]) for trial in trials}
    # Nor is a trial missing that was left out because the run was decided.
    most = max(there, default=0) if last.get("ended") else max([planned, *there])
    missing = [named(number) for number in range(1, most + 1) if number not in there]
    faults = [f"trial {', '.join(stopped)} was stopped before its end"] if stopped else []
    faults += [f"trial {', '.join(missing)} is missing"] if missing else []
    faults += processes
    return Check(
        check="complete",
        ok=not faults,
        value=float(len(stopped) + len(missing) + len(processes)),
        limit=0.0,
        reason=f"{sentence(faults)}." if faults else "Every trial and every load process ran to its end.",
        affects=ALL_KINDS,
        remedy=_RUN_AGAIN,
    )


def check_counts(
    counts: Mapping[str, int], planned: Mapping[str, int], *, mirrored: bool, ended: Collection[str] = ()
) -> Check:
    """Every arm got its requests: each of those planned, and under a mirrored design as many as the others, but for
    arms that `ended` before their time."""
    missing: list[str] = []
    worst = 0
    common = max(counts.values(), default=0) if mirrored else 0
    for arm, count in counts.items():
        expected = max(planned.get(arm, 0), 0 if arm in ended else common)
        short = expected - count
        worst = max(worst, short)
        if count == 0:
            missing.append(f"{arm} has no request")
        elif short > allowed_missing(expected):
            missing.append(f"{arm} has {count} of {counted(expected, 'request')}")
    total = planned.get("*", 0)
    short = total - sum(counts.values())
    if short > allowed_missing(total):
        missing.append(f"{sum(counts.values())} of {total} planned requests were recorded")
        worst = max(worst, short)
    if not counts:
        missing.append("no arm has requests")
    return Check(
        check="arms",
        ok=not missing,
        value=float(worst),
        limit=float(allowed_missing(max([common, total, *planned.values()], default=0))),
        reason="; ".join(missing) + "." if missing else "Every arm has its requests.",
        affects=ALL_KINDS,
        remedy="See the logs of the arm and of the load generator.",
    )


def allowed_missing(expected: int) -> int:
    """How many of so many requests may be missing: those under way when recorders stop."""
    return max(_MISSING_SLACK, int(_MISSING_SHARE * expected))


def check_deaths(arm: str, deaths: Sequence[Mapping[str, Any]], *, control: bool, silent: Sequence[str] = ()) -> Check:
    """The arm lived through the run. A control that died spoils every comparison.

    `silent` are replicas that live, and neither served nor answered once the traffic was over.
    """
    codes = ", ".join(f"{death.get('replica', arm)} ({_how(death)})" for death in deaths)
    faults = [f"{arm} died under load: {codes}"] if deaths else []
    faults += [f"{', '.join(silent)} did not serve any more when the traffic was over"] if silent else []
    return Check(
        check="alive",
        ok=not faults,
        value=float(len(deaths) + len(silent)),
        limit=0.0,
        arm=None if control else arm,
        reason=f"{'; '.join(faults)}." if faults else f"{arm} lived through the run.",
        affects=ESTIMATES if control else ALL_KINDS,
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


def check_cut(arm: str, cut: int, requests: int, quantile: float) -> Check:
    """Fewer requests were under way at the end than lie beyond the quantile, so the tail is not among them."""
    share = cut / requests if requests else 0.0
    limit = 1.0 - quantile
    ok = share <= limit + 1e-12
    return Check(
        check="cut requests",
        ok=ok,
        value=100.0 * share,
        limit=100.0 * limit,
        arm=arm,
        reason=f"{cut} of {requests} requests of {arm} were still under way at the end"
        + ("." if ok else f": they could hold all of the slowest {100.0 * limit:.3g} %."),
        affects=("noninferiority", "slo"),
        remedy="Let the run drain before it ends, or run longer.",
    )
