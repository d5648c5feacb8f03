"""Whether the load generator did what its records say: every process to its end, nothing dropped, in time, one clock.

A generator that is late, overloaded or partly gone does not fail an arm: it measured itself, and the run says nothing.
Each check reads the accounts that the load processes kept (generator-N.json); one that they do not cover is not made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from analysis.judging.validity import ALL_KINDS, ESTIMATES, Check
from analysis.records.plain_values import mapping, number
from analysis.wording import counted, sentence

BUSY_SHARE = 0.05  # of the time that a core may be used up: hiccups of a second happen
BUSY_SECONDS = 2.0
UNSEEN_SHARE = 0.001  # of users' requests that may be missing: those of the instant in which a splitter died

Account = Mapping[str, Any]


def check_generators(
    accounts: Sequence[Account], trials: Sequence[Mapping[str, Any]], *, limit_ms: float
) -> Iterable[Check]:
    """The checks that `accounts` and `trials` (their trial.json) allow, worst first in each reason."""
    known = [account for account in accounts if "records" in account or "lost" in account]
    expected = {
        int(info["trial"]): int(info["load_processes"]) for info in trials if number(info.get("load_processes"))
    }
    if known or any(expected.values()):
        yield check_processes(known, expected)
    if any("records" in account for account in known):
        yield check_dropped(known)
    for account in known:
        if "unplaced" in account:
            yield check_users(account)
    if any(number(mapping(account.get("loop_lag_ms")).get("p99")) is not None for account in known):
        yield check_loop_lag(known, limit_ms)
    if any(number(mapping(account.get("cpu")).get("of_s")) for account in known):
        yield check_cpu(known)
    clocks = [account for account in known if isinstance(account.get("clock"), Mapping)]
    if clocks:
        yield check_clocks(clocks, limit_ms)


def check_processes(accounts: Sequence[Account], expected: Mapping[int, int]) -> Check:
    """Every load process ran to its end, and what it counted is in the records."""
    faults: list[str] = []
    missing = 0
    for trial, count in sorted(expected.items()):
        here = sum(account.get("trial", 1) == trial for account in accounts)
        if here < count:
            faults.append(f"trial {trial} has accounts of {here} of {count} load processes")
            missing += count - here
    for account in accounts:
        rows, planned, ended = (number(account.get(key)) for key in ("rows", "planned", "finished"))
        lost, error, complete = account.get("lost"), account.get("error"), account.get("complete")
        of = f" of {planned:.0f} planned" if planned is not None else ""
        recorded = f"{rows or 0:.0f}{of} requests are recorded"
        if lost:
            faults.append(f"{_name(account)} is lost ({lost}): {recorded}")
        elif not complete:
            faults.append(f"{_name(account)} was cut off{f' ({error})' if error else ''}: {recorded}")
        elif rows is not None and ended is not None and rows < ended:
            faults.append(f"{_name(account)} ended {counted(int(ended), 'request')} and {rows:.0f} are recorded")
        else:
            continue
        missing += 1
    return Check(
        check="load processes",
        ok=not faults,
        value=float(missing),
        limit=0.0,
        reason=f"{sentence(faults)}."
        if faults
        else "Every load process ran to its end and all it counted is recorded.",
        affects=ALL_KINDS,
        remedy="See logs/locust.log; a worker on another host also keeps its records itself.",
    )


def check_dropped(accounts: Sequence[Account]) -> Check:
    """No record was given up because the disk or the load process could not keep up."""
    dropped = {_name(account): int(number(mapping(account.get("records")).get("dropped")) or 0) for account in accounts}
    total = sum(dropped.values())
    worst = max(dropped, key=lambda name: dropped[name], default="")
    return Check(
        check="dropped records",
        ok=not total,
        value=float(total),
        limit=0.0,
        reason=f"{counted(total, 'record')} {'was' if total == 1 else 'were'} dropped, {dropped[worst]} of them by "
        f"{worst}, because the disk or the process could not keep up."
        if total
        else "No record was dropped.",
        affects=ALL_KINDS,
        remedy="Record on a faster disk, use more load workers, or lower the rate.",
    )


def check_users(account: Account) -> Check:
    """The splitter's log held what the splitter itself counted, and every request that was under way has ended."""
    known = number(mapping(account.get("splitter")).get("count")) or 0.0
    passed, cut = (number(account.get(key)) or 0.0 for key in ("passed", "unplaced"))
    missing = max(0.0, known - passed)
    unfinished = float(sum(unfinished_requests([account]).values()))
    limit = UNSEEN_SHARE * max(known, passed)
    return Check(
        check="users' requests",
        ok=missing + cut + unfinished <= limit,
        value=missing + cut + unfinished,
        limit=limit,
        reason=f"Of {max(known, passed):.0f} requests of users {missing:.0f} are not in the splitter's log, "
        f"{cut:.0f} were under way when it ended, and {unfinished:.0f} had no end within traffic.timeout_s, "
        f"limit {limit:.0f}.",
        affects=(*ESTIMATES, "error"),
        remedy="See whether the disk of the log was full, and why the splitter ended.",
    )


def unfinished_requests(accounts: Iterable[Account]) -> Counter[str]:
    """How many requests of users had not ended after the longest that a request may last, by arm."""
    counts: Counter[str] = Counter()
    for account in accounts:
        for arm, count in mapping(account.get("unfinished")).items():
            counts[arm] += int(number(count) or 0)
    return counts


def check_loop_lag(accounts: Sequence[Account], limit_ms: float) -> Check:
    """The load processes read what came when it came."""
    lags = [(number(mapping(account.get("loop_lag_ms")).get("p99")) or 0.0, _name(account)) for account in accounts]
    worst, name = max(lags)
    return Check(
        check="token times",
        ok=worst <= limit_ms,
        value=worst,
        limit=limit_ms,
        reason=f"In 1 % of the time {name} looked {worst:.1f} ms late or more at what had come, limit {limit_ms:g} ms.",
        affects=ESTIMATES,
        remedy="Give the load generator its own cores or more workers, or lower the rate.",
    )


def check_cpu(accounts: Sequence[Account]) -> Check:
    """No load process had its core used up for more than a moment."""
    worst, of, name = 0.0, 0.0, ""
    for account in accounts:
        cpu = mapping(account.get("cpu"))
        busy, measured = number(cpu.get("busy_s")) or 0.0, number(cpu.get("of_s")) or 0.0
        if not name or busy - BUSY_SHARE * measured > worst - BUSY_SHARE * of:
            worst, of, name = busy, measured, _name(account)
    limit = max(BUSY_SECONDS, BUSY_SHARE * of)
    return Check(
        check="generator CPU",
        ok=worst <= limit,
        value=worst,
        limit=limit,
        reason=f"{name} used up its core in {worst:.0f} of {of:.0f} s, limit {limit:.0f} s.",
        affects=ESTIMATES,
        remedy="Use more load workers, on cores of their own, or lower the rate.",
    )


def check_clocks(accounts: Sequence[Account], limit_ms: float) -> Check:
    """When each request went out is known on the run's clock as well as it must be kept to the schedule."""
    faults: list[str] = []
    worst = 0.0
    for account in accounts:
        clock = mapping(account.get("clock"))
        if clock.get("same"):
            continue
        if not number(clock.get("exchanges")):
            faults.append(f"the clock of {_name(account)} was not compared with the master's")
            continue
        uncertainty_ms = (number(clock.get("worst_uncertainty_ns")) or 0.0) / 1e6
        worst = max(worst, uncertainty_ms)
        if uncertainty_ms > limit_ms:
            faults.append(
                f"the clock of {_name(account)} is known to ± {uncertainty_ms:.1f} ms, limit {limit_ms:g} ms: which "
                "compile met which of its requests is uncertain"
            )
    return Check(
        check="clocks",
        ok=not faults,
        value=worst,
        limit=limit_ms,
        reason=f"{sentence(faults)}." if faults else f"Workers' clocks are known to ± {worst:.2g} ms.",
        affects=ESTIMATES,
        remedy="Use workers with a shorter way to the master, or raise gates.max_generator_lag_ms.",
    )


def _name(account: Account) -> str:
    host = mapping(account.get("clock")).get("host")
    trial = f" of trial {account['trial']}" if number(account.get("trial")) not in (None, 1.0) else ""
    return f"load process {account.get('worker', '?')}{f' on {host}' if host else ''}{trial}"
