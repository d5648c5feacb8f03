"""Whether the load generator measured the servers and not itself: on schedule, with time to spare, nothing dropped.

The evidence is the account that each load process keeps (generator-N.json); what it does not cover is not judged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from analysis.checks.check import ALL_KINDS, ESTIMATES, Check, Evidence, Rule
from analysis.records.plain_values import mapping, number
from analysis.run.pairs import lag_apart
from analysis.wording import counted

BUSY_SHARE = 0.05  # of the time that a core may be used up: hiccups of a second happen
BUSY_SECONDS = 2.0
UNSEEN_SHARE = 0.001  # of production requests that may be missing: those of the instant in which a splitter died

_CORES = "Give the load generator its own cores or more workers (traffic.workers), or lower the rate."

Account = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One figure of the load generator against its limit, as a sentence without its full stop. `value` None: unknown,
    and a fault."""

    text: str
    value: float | None
    limit: float
    remedy: str = _CORES
    opens: tuple[str, ...] = ESTIMATES

    @property
    def ok(self) -> bool:
        return self.value is not None and self.value <= self.limit

    @property
    def excess(self) -> float:
        """How many times its limit the figure is; infinite where the limit is zero or the figure unknown."""
        if self.value == 0:
            return 0.0
        return float("inf") if self.value is None or not self.limit else self.value / self.limit


def _generator(seen: Evidence) -> Iterable[Check]:
    run, limit_ms = seen.run, seen.run.limits.max_generator_lag_ms
    measured = list(measured_of(known_accounts(run.records.generators), limit_ms))
    # What another tool does not keep, `open loop` says; production traffic is never late.
    lag_ms = run.generator_lag_ms
    if lag_ms is not None or not (run.pace or run.of_users):
        measured.append(lag_of(lag_ms, limit_ms))
    return [worst_of(measured)] if measured else []


def worst_of(measured: Sequence[Measured]) -> Check:
    """The load generator kept to its schedule. The reason is the worst figure, faults first."""
    faults = [item for item in measured if not item.ok]
    worst = max(faults or measured, key=lambda item: item.excess)
    more = f"; and {counted(len(faults) - 1, 'more fault')}" if len(faults) > 1 else ""
    opens = tuple(dict.fromkeys(kind for item in faults or measured for kind in item.opens))
    reason = f"{worst.text}{more}."
    return GENERATOR.row(not faults, reason, value=worst.value, limit=worst.limit, opens=opens, remedy=worst.remedy)


GENERATOR = Rule(
    name="load generator",
    find=_generator,
    sound="The load generator kept to its schedule.",
    by_step=True,
)


def _lag_apart(seen: Evidence) -> Iterable[Check]:
    run = seen.run
    for arm in run.treatments:
        lags = [] if arm in run.ended_arms else lag_apart(run, arm)
        faults = [
            f"{abs(apart):.3g} ms {'later' if apart > 0 else 'earlier'} {what} (limit {most:.3g} ms)"
            for what, apart, most in lags
            if abs(apart) > most
        ]
        if faults:
            sent = " and ".join(faults)
            yield LAG_APART.row(
                False,
                f"Counted from their schedule, requests of {arm} were sent {sent} than {run.control}'s.",
                arm=arm,
                value=max(abs(apart) for _, apart, _ in lags),
                limit=min(most for *_, most in lags),
            )


LAG_APART = Rule(
    name="load generator",
    find=_lag_apart,
    remedy="Give the load generator its own cores or more workers, and look for what delays one arm's connections.",
    by_step=True,
)


# --- Accounts of load processes ---------------------------------------------------------------------------------------


def lag_of(lag_ms: float | None, limit_ms: float) -> Measured:
    """How late requests were sent."""
    text = "How late requests were sent is not recorded"
    if lag_ms is not None:
        text = f"1 % of the requests were sent {lag_ms:.1f} ms late or more, limit {limit_ms:g} ms"
    return Measured(text=text, value=lag_ms, limit=limit_ms)


def measured_of(accounts: Sequence[Account], limit_ms: float) -> Iterator[Measured]:
    """All that the accounts of load processes report: records dropped, production requests missed, reads that came
    late, cores used up, clocks that are not known."""
    for account in accounts:
        name = _name(account)
        if "records" in account:
            dropped = number(mapping(account["records"]).get("dropped")) or 0.0
            were = "was" if dropped == 1 else "were"
            yield Measured(
                text=f"{counted(int(dropped), 'record')} of {name} {were} dropped, limit 0",
                value=dropped,
                limit=0.0,
                opens=ALL_KINDS,
                remedy="Record on a faster disk, use more load workers (traffic.workers), or lower the rate.",
            )
        if "unplaced" in account:
            yield _production(account)
        late_ms = number(mapping(account.get("loop_lag_ms")).get("p99"))
        if late_ms is not None:
            text = f"In 1 % of the time {name} read what had come {late_ms:.1f} ms late or more, limit {limit_ms:g} ms"
            yield Measured(text=text, value=late_ms, limit=limit_ms)
        cpu = mapping(account.get("cpu"))
        busy_s, of_s = number(cpu.get("busy_s")) or 0.0, number(cpu.get("of_s"))
        if of_s:
            limit = max(BUSY_SECONDS, BUSY_SHARE * of_s)
            text = f"{name} used up its core in {busy_s:.0f} of {of_s:.0f} s, limit {limit:.0f} s"
            yield Measured(text=text[0].upper() + text[1:], value=busy_s, limit=limit)
        clock = account.get("clock")
        if isinstance(clock, Mapping) and not clock.get("same"):
            yield _clock(clock, name, limit_ms)


def _production(account: Account) -> Measured:
    """Whether the splitter's log holds what the splitter counted, and every request that was under way has ended."""
    known = number(mapping(account.get("splitter")).get("count")) or 0.0
    passed, cut = (number(account.get(key)) or 0.0 for key in ("passed", "unplaced"))
    missing = max(0.0, known - passed)
    unfinished = float(sum(unfinished_requests([account]).values()))
    limit = UNSEEN_SHARE * max(known, passed)
    return Measured(
        text=f"Of {max(known, passed):.0f} production requests {missing:.0f} are not in the splitter's log, {cut:.0f} "
        f"were under way when it ended, and {unfinished:.0f} had no end within traffic.timeout_s, limit {limit:.0f}",
        value=missing + cut + unfinished,
        limit=limit,
        opens=(*ESTIMATES, "error"),
        remedy="See whether the disk of the log was full, and why the splitter ended.",
    )


def _clock(clock: Mapping[str, Any], name: str, limit_ms: float) -> Measured:
    """How exactly the process's clock is known on the run's: which compile met which of its requests rests on it."""
    known = bool(number(clock.get("exchanges")))
    uncertainty_ms = (number(clock.get("worst_uncertainty_ns")) or 0.0) / 1e6
    text = f"The clock of {name} was not compared with the master's"
    if known:
        text = f"The clock of {name} is known to ± {uncertainty_ms:.2g} ms, limit {limit_ms:g} ms"
    return Measured(
        text=text,
        value=uncertainty_ms if known else None,
        limit=limit_ms,
        remedy="Use workers with a shorter way to the master, or raise gates.max_generator_lag_ms.",
    )


def unfinished_requests(accounts: Iterable[Account]) -> Counter[str]:
    """How many production requests had not ended after the longest that a request may last, by arm."""
    counts: Counter[str] = Counter()
    for account in accounts:
        for arm, count in mapping(account.get("unfinished")).items():
            counts[arm] += int(number(count) or 0)
    return counts


def lost_processes(accounts: Sequence[Account], trials: Sequence[Mapping[str, Any]]) -> list[str]:
    """The load processes that did not run to their end, or of whose requests some are not recorded, in words."""
    faults = []
    for info in trials:
        expected = number(info.get("load_processes")) or 0.0
        here = sum(account.get("trial", 1) == int(info["trial"]) for account in accounts)
        if here < expected:
            faults.append(f"trial {info['trial']} has accounts of {here} of {expected:.0f} load processes")
    for account in accounts:
        rows, planned, ended = (number(account.get(key)) for key in ("rows", "planned", "finished"))
        lost, error = account.get("lost"), account.get("error")
        of = f" of {planned:.0f} planned" if planned is not None else ""
        recorded = f"{rows or 0:.0f}{of} requests are recorded"
        if lost:
            faults.append(f"{_name(account)} is lost ({lost}): {recorded}")
        elif not account.get("complete"):
            faults.append(f"{_name(account)} was cut off{f' ({error})' if error else ''}: {recorded}")
        elif rows is not None and ended is not None and rows < ended:
            faults.append(f"{_name(account)} ended {counted(int(ended), 'request')} and {rows:.0f} are recorded")
    return faults


def known_accounts(accounts: Sequence[Account]) -> list[Account]:
    """The accounts that say what became of a load process."""
    return [account for account in accounts if "records" in account or "lost" in account]


def _name(account: Account) -> str:
    host = mapping(account.get("clock")).get("host")
    trial = f" of trial {account['trial']}" if number(account.get("trial")) not in (None, 1.0) else ""
    return f"load process {account.get('worker', '?')}{f' on {host}' if host else ''}{trial}"
