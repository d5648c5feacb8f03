"""Whether the load generator measured the servers and not itself, by the account that each load process keeps
(generator-N.json); what it does not cover is not judged."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from tailgate.analysis.checks.check import ALL_KINDS, ESTIMATES, Check, Evidence, rule
from tailgate.analysis.records.plain_values import mapping, number
from tailgate.analysis.run.pairs import drawn, lag_differences
from tailgate.analysis.run.run import Run
from tailgate.analysis.statistics.quantiles import quantile
from tailgate.analysis.wording import counted

BUSY_SHARE = 0.05  # of the time that a core may be used up: hiccups of a second happen
BUSY_SECONDS = 2.0
UNSEEN_SHARE = 0.001  # of production requests that may be missing: those of the instant in which a splitter died

Account = Mapping[str, Any]
Named = Callable[[int], str]  # what to call a trial


@rule(
    "load generator",
    sees="p99 of the lag is above `gates.max_generator_lag_ms` or unknown; a load process dropped records (which "
    "opens all gates), read late, used up its core or has an unknown clock; production requests are missing; or one "
    "arm's requests were sent later than the other's by more than a fifth of the margin.",
    says="The load generator fell short: {}.",
    remedy="Give the load generator its own cores or more workers (traffic.workers) near the master and a faster disk, "
    "or lower the rate. Where one arm alone is late, look for what delays its connections.",
    by_step=True,
)
def generator(seen: Evidence) -> Iterator[Check]:
    run, limit_ms, lag_ms = seen.run, seen.run.limits.max_generator_lag_ms, _lag_ms(seen.run)
    accounts = known_accounts(run.records.generators)
    faults = late_faults(accounts, limit_ms, seen.run.trial_name)
    # What another tool does not keep, `open loop` says; production traffic is never late.
    is_kept = lag_ms is not None or not (run.pace or run.is_production)
    if lag_ms is None and is_kept:
        faults = ["how late requests were sent is not recorded", *faults]
    elif lag_ms is not None and lag_ms > limit_ms:
        faults = [f"p99 of the lag of requests is {lag_ms:.1f} ms, limit {limit_ms:g} ms", *faults]
    if is_kept or accounts:
        dropped = list(dropped_faults(accounts, seen.run.trial_name))
        opens = ALL_KINDS if dropped else ESTIMATES
        yield generator.found([*dropped, *faults], opens=opens)
    for arm in run.treatments:
        faults = [
            f"requests of {arm if lag > 0 else run.control} were sent {abs(lag):.3g} ms further behind their schedule "
            f"than those of {run.control if lag > 0 else arm} {what}, limit {most:.3g} ms"
            for what, lag, most in (() if arm in run.ended_arms else lag_differences(run, arm))
            if abs(lag) > most
        ]
        yield from [generator.found(faults, arm=arm)] if faults else []


def _lag_ms(run: Run) -> float | None:
    """Return the largest p99 lag that a generator or the records report; None for production traffic, whose records
    give one time for both."""
    if run.is_production:
        return None
    lags = [number(mapping(row.get("lag_ms")).get("p99")) for row in run.records.generators]
    recorded = quantile(run.requests.lag_ms(drawn(run, ~run.requests.broken)), 0.99)
    known = [lag for lag in (*lags, recorded) if lag is not None and not math.isnan(lag)]
    return max(known, default=None)


def late_faults(accounts: Sequence[Account], limit_ms: float, named: Named = "trial {}".format) -> list[str]:
    """Describe load processes that read late, used up their core, or had an unknown clock."""
    faults = []
    for account in accounts:
        name = _name(account, named)
        late_ms = number(mapping(account.get("loop_lag_ms")).get("p99")) or 0.0
        if late_ms > limit_ms:
            faults.append(f"p99 of the reading delay of {name} is {late_ms:.1f} ms, limit {limit_ms:g} ms")
        cpu, clock = mapping(account.get("cpu")), mapping(account.get("clock"))
        busy_s, of_s = number(cpu.get("busy_s")) or 0.0, number(cpu.get("of_s")) or 0.0
        most_s = max(BUSY_SECONDS, BUSY_SHARE * of_s)
        if of_s and busy_s > most_s:
            faults.append(f"{name} used up its core in {busy_s:.0f} of {of_s:.0f} s, limit {most_s:.0f} s")
        # Which compile met which request rests on the clocks.
        off_ms = (number(clock.get("worst_uncertainty_ns")) or 0.0) / 1e6
        if clock and not clock.get("same") and not number(clock.get("exchanges")):
            faults.append(f"the clock of {name} was not compared with the master's")
        elif clock and not clock.get("same") and off_ms > limit_ms:
            faults.append(f"the clock of {name} is known to ± {off_ms:.2g} ms, limit {limit_ms:g} ms")
    return faults


def dropped_faults(accounts: Iterable[Account], named: Named = "trial {}".format) -> Iterator[str]:
    """Yield load processes that dropped records, and what the splitter's log lacks of production requests."""
    for account in accounts:
        dropped = number(mapping(account.get("records")).get("dropped")) or 0.0
        if dropped:
            yield f"{_name(account, named)} dropped {counted(int(dropped), 'record')}"
        if "unplaced" not in account:
            continue
        known = number(mapping(account.get("splitter")).get("count")) or 0.0
        passed, cut = (number(account.get(key)) or 0.0 for key in ("passed", "unplaced"))
        unended = unfinished_requests([account]).total()
        lost, limit = max(0.0, known - passed) + cut + unended, UNSEEN_SHARE * max(known, passed)
        if lost > limit:
            yield (
                f"of {max(known, passed):.0f} production requests {lost:.0f} are not in the splitter's log or did not "
                f"end within traffic.timeout_s, limit {limit:.0f}"
            )


def unfinished_requests(accounts: Iterable[Account]) -> Counter[str]:
    """Count, by arm, production requests that had not ended after the longest that a request may last."""
    counts: Counter[str] = Counter()
    for account in accounts:
        for arm, count in mapping(account.get("unfinished")).items():
            counts[arm] += int(number(count) or 0)
    return counts


def lost_processes(accounts: Sequence[Account], trials: Sequence[Account], named: Named) -> list[str]:
    """Describe load processes that ended early, or whose requests are not all recorded."""
    faults = []
    for info in trials:
        expected = number(info.get("load_processes")) or 0.0
        here = sum(account.get("trial", 1) == int(info["trial"]) for account in accounts)
        if here < expected:
            faults.append(f"{named(info['trial'])} has accounts of {here} of {expected:.0f} load processes")
    for account in accounts:
        rows, planned, ended = (number(account.get(key)) for key in ("rows", "planned", "finished"))
        lost = account.get("lost")
        if lost or not account.get("complete"):
            why = f"lost ({lost})" if lost else f"cut off ({account.get('error') or 'no reason is recorded'})"
            of = f" of {planned:.0f} planned" if planned is not None else ""
            faults.append(f"{_name(account, named)} was {why}, with {rows or 0:.0f}{of} requests recorded")
        elif rows is not None and ended is not None and rows < ended:
            faults.append(f"{_name(account, named)} ended {counted(int(ended), 'request')} and {rows:.0f} are recorded")
    return faults


def known_accounts(accounts: Sequence[Account]) -> list[Account]:
    """Return the accounts that describe how a load process ended."""
    return [account for account in accounts if "records" in account or "lost" in account]


def _name(account: Account, named: Named) -> str:
    host, trial = mapping(account.get("clock")).get("host"), named(int(number(account.get("trial")) or 1))
    place = (f" on {host}" if host else "") + (f" of {trial}" if trial != "trial 1" else "")
    return f"load process {account.get('worker', '?')}{place}"
