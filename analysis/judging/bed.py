"""Whether a run's machines were quiet, in one line: what a reader must know before any figure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from analysis.judging.checks.bed import check_bed
from analysis.judging.checks.bed_speed import drifts
from analysis.judging.checks.disturbances import Disturbance
from analysis.judging.validity import Check
from analysis.records.schemas import RUN_HOST
from analysis.run.references import FIGURES
from analysis.run.test_bed import TestBed
from analysis.settings.gate_limits import GateLimits
from analysis.wording import counted, percent

QUIET, DISTURBED, NOT_WATCHED, PARTLY = "quiet", "disturbed", "not watched", "partly watched"

_LEAST_WATCHED = 0.95  # of a trial's traffic
_MOST_NAMED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class BedJudgement:
    """What follows from the test bed."""

    bed: TestBed
    verdict: str  # quiet | disturbed | not watched | partly watched
    line: str  # a sentence that begins with the verdict
    disturbances: tuple[Disturbance, ...]
    unknown: tuple[str, ...]  # what was not watched of it, in words


def judge_bed(
    bed: TestBed, arms: Sequence[str], limits: GateLimits, *, shared: bool
) -> tuple[BedJudgement, list[Check]]:
    """Return the judgement on the machines, and the checks that follow from it: none where they were not watched.

    `shared`: all arms ran at the same time.
    """
    checks, disturbances = check_bed(bed, arms, limits, shared=shared) if bed.watched else ([], [])
    unknown = list(_unknown(bed)) if bed.watched else []
    if not bed.watched:
        verdict, line = NOT_WATCHED, "nobody recorded how the machines of this run behaved"
    elif disturbances:
        texts = [item.text for item in disturbances[:_MOST_NAMED]]
        more = len(disturbances) - len(texts)
        verdict, line = DISTURBED, "; ".join([*texts, *([f"{more} more"] if more else [])])
    else:
        verdict = PARTLY if unknown else QUIET
        line = ", ".join(_quiet(bed)) or "nothing could be read"
        line += f"; cannot tell: {'; '.join(unknown)}" if unknown else ""
    judgement = BedJudgement(
        bed=bed,
        verdict=verdict,
        line=f"{verdict.capitalize()}: {line}.",
        disturbances=tuple(disturbances),
        unknown=tuple(unknown),
    )
    return judgement, checks


def _quiet(bed: TestBed) -> Iterator[str]:
    """What a quiet bed was made of, and how quiet."""
    used = [device for device in bed.devices if device.card.host == RUN_HOST and device.arms]
    models: dict[str, set[str]] = {}
    for device in used:
        models.setdefault(device.card.model or "device", set()).add(device.card.identity)
    yield from (f"{len(cards)} × {model}" for model, cards in models.items())
    if not models:
        cpus = [host.cpus for host in bed.hosts if host.host == RUN_HOST and host.cpus]
        yield from [counted(round(max(cpus)), "processor")] if cpus else []
    clocks = [device.sm_mhz for device in used if device.sm_mhz]
    if clocks:
        low, high = min(clock.low for clock in clocks), max(clock.high for clock in clocks)
        yield f"clocks {low:,.0f} MHz throughout" if low == high else f"clocks {low:,.0f} to {high:,.0f} MHz"
    steals = [host.steal for host in bed.hosts if host.steal is not None]
    if steals:
        yield f"steal {100.0 * max(steals):.1f} %"
    if apart := drifts(bed):
        yield f"reference within {100.0 * max(apart):.1f} %"


def _unknown(bed: TestBed) -> Iterator[str]:
    """What the records leave open: a bed of which this is not known is not called quiet."""
    sampled = {host.trial: host.seconds for host in bed.hosts if host.host == RUN_HOST}
    silent = [trial for trial in bed.trials if trial not in sampled]
    if silent:
        yield "nothing was sampled" if len(silent) == len(bed.trials) else f"nothing was sampled in {_trials(silent)}"
    short = [trial for trial, seconds in sampled.items() if seconds < _LEAST_WATCHED * bed.seconds[trial]]
    if short:
        yield f"less than {percent(_LEAST_WATCHED)} of the traffic was sampled in {_trials(short)}"
    if any(host.steal is None for host in bed.hosts):
        yield "what the hypervisor took"
    if any(host.foreign is None for host in bed.hosts if host.host == RUN_HOST):
        yield "what else ran on the host"
    watched = {(device.trial, device.name) for device in bed.devices if device.card.host == RUN_HOST}
    on_cards = {(trial, name) for trial, row in bed.placed.items() for name in row.values() if name != "cpu"}
    if missing := sorted({name for trial, name in on_cards - watched if trial in sampled}):
        yield f"how {', '.join(missing)} behaved"
    used = [device for device in bed.devices if device.card.host == RUN_HOST and device.arms]
    partly = {device.name for device in used if device.seconds < _LEAST_WATCHED * bed.seconds[device.trial]}
    if partly:
        yield f"how {', '.join(sorted(partly))} behaved all the time"
    for what, column in (
        ("who else was on {}", "foreign_processes"),
        ("whether {} was throttled", "throttle"),
        ("the clocks of {}", "sm_mhz"),
    ):
        if names := {device.name for device in used if device.told[column] < _LEAST_WATCHED}:
            yield what.format(", ".join(sorted(names)))
    own = [row for row in bed.references if row.host == RUN_HOST]
    measured = {(row.trial, row.device, row.when) for row in own if row.figures.keys() >= set(FIGURES)}
    places = {(row.trial, row.device) for row in own}
    places |= {(trial, device) for trial, row in bed.placed.items() for device in row.values()}
    whole = {place for place in places if {(*place, "before"), (*place, "after")} <= measured}
    lacking = [trial for trial in bed.trials if not places or trial in {place[0] for place in places - whole}]
    if not measured:
        why = next((f" ({row.error})" for row in bed.references if row.error), "")
        yield f"how fast the machines were, since no reference was measured{why}"
    elif lacking:
        yield f"whether the speed stayed, since a reference is missing in {_trials(lacking)}"
    failed = [row for row in bed.references if row.error]
    if failed and measured:
        yield f"the speed of {failed[0].device} in {_trials(sorted({row.trial for row in failed}))} ({failed[0].error})"


def _trials(numbers: Sequence[int]) -> str:
    return f"trial {numbers[0]}" if len(numbers) == 1 else f"trials {', '.join(map(str, numbers))}"
