"""What each trial of a run says of an arm, a figure at a time. What was not recorded is absent."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from analysis.arrays import Floats, Ints
from analysis.records.plain_values import mapping, number
from analysis.run.compile_events import RECOMPILE_KINDS, CompileEvent, held_s
from analysis.run.gaps import gaps_of
from analysis.run.luck import luck_of_quantile, luck_of_share
from analysis.run.machine_samples import Rows, Samples
from analysis.run.memory import FIGURES as MEMORY
from analysis.run.memory import Figure, peak_of
from analysis.run.placement import devices_of
from analysis.run.run import Run
from analysis.run.slo import meets_all
from analysis.run.startup import startup_s
from analysis.run.trials import Trial
from analysis.statistics.quantiles import quantile
from analysis.statistics.unpaired import Luck

_MOST_GAPS = 200_000

Value = tuple[float, Luck]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmFigures:
    """The figures of one arm by key (`analysis.settings.compare_limits`), then by trial: the value, and how much the
    traffic of the trial moved it. `sources`: by whose word a figure is known, where there is more than one."""

    values: Mapping[str, Mapping[int, Value]]
    sources: Mapping[str, str]


def arm_figures(run: Run, arm: str) -> ArmFigures:
    """What each trial of the run says of the arm."""
    figures: dict[str, dict[int, Value]] = {}
    for trial in run.trials:
        for key, value in _figures(run, arm, trial):
            figures.setdefault(key, {})[trial.number] = value
    sources = {}
    for key in ("device_peak_bytes", "process_peak_bytes"):
        source, peaks = _memory(run, arm, key)
        if peaks:
            figures[key], sources[key] = {trial: (value, Luck()) for trial, value in peaks.items()}, source
    return ArmFigures(values=figures, sources=sources)


def _figures(run: Run, arm: str, trial: Trial) -> Iterator[tuple[str, Value]]:
    yield from _latencies(run, arm, trial)
    yield from _rates(run, arm, trial)
    exact: dict[str, float | None] = {
        **_compiles(run, arm, trial),
        "startup_s": startup_s(trial, arm),
    }
    yield from ((key, (value, Luck())) for key, value in exact.items() if value is not None)


# --- Under the traffic ------------------------------------------------------------------------------------------------


def _latencies(run: Run, arm: str, trial: Trial) -> Iterator[tuple[str, Value]]:
    """All measured traffic, failures at their deadline: what clients saw, compiles and cold start included."""
    own = run.of_arm(arm) & run.usable & (run.requests.trial == trial.number)
    for metric in ("ttft", "tpot", "e2e"):
        values = run.requests.metric_ms(metric)
        rows = np.flatnonzero(own & ~np.isnan(values))
        yield from _tail(metric, values[rows], run.block[rows])
    gaps = gaps_of(run.requests, np.flatnonzero(own), most=_MOST_GAPS)
    yield from _tail("itl", gaps.ms.astype(np.float64), run.block[gaps.row])


def _tail(metric: str, values: Floats, block: Ints) -> Iterator[tuple[str, Value]]:
    for name, q in (("p50", 0.5), ("p99", 0.99)):
        value = quantile(values, q)
        if value > 0:
            yield f"{name}_{metric}_ms", (value, luck_of_quantile(values, block, q, value))


def _rates(run: Run, arm: str, trial: Trial) -> Iterator[tuple[str, Value]]:
    requests = run.requests
    own = run.of_arm(arm) & run.usable & (requests.trial == trial.number)
    measured = int(own.sum())
    if not measured:
        return
    if trial.seconds > 0:
        tokens = int(requests.output_tokens[own].sum())
        yield "request_rate", (measured / trial.seconds, _luck_of_count(measured))
        if not run.embeds:
            yield "output_token_rate", (tokens / trial.seconds, _luck_of_count(measured))
    ended = own & (requests.ok | requests.failed)
    if ended.any():
        failed = requests.failed[ended]
        yield "error_pct", (100.0 * float(failed.mean()), luck_of_share(failed, run.block[ended]))
        if run.goodput_targets:
            good = meets_all(requests, run.goodput_targets)[ended]
            yield "good_pct", (100.0 * float(good.mean()), luck_of_share(good, run.block[ended]))


def _luck_of_count(count: int) -> Luck:
    return Luck(spread=1.0 / math.sqrt(count))


# --- The start --------------------------------------------------------------------------------------------------------


def tells_compiles(run: Run, arm: str, trial: Trial) -> bool:
    """Whether the trial's telemetry of the arm is there: one that compiles has events of its warm-up at least."""
    account = run.account(arm)
    if run.records.events is None or account.external:
        return False
    return not account.compiles or any(event.arm == arm and event.trial == trial.number for event in run.events)


def _compiles(run: Run, arm: str, trial: Trial) -> dict[str, float | None]:
    """By replica at the start, over all replicas while serving."""
    if not tells_compiles(run, arm, trial):
        return {}
    own = [event for event in run.events if event.arm == arm and event.trial == trial.number]
    starts = max(1, len(run.account(arm).replica_names(trial)))
    warm = [event for event in own if not event.serving]
    serving = [event for event in own if event.serving and event.kind in RECOMPILE_KINDS]
    return {
        "warmup_compiles": _recompiling(warm) / starts,
        "compile_s": held_s(event for event in warm if event.kind in RECOMPILE_KINDS) / starts,
        "recompiles": float(len(serving)),
        "serving_compile_s": held_s(serving),
    }


def _recompiling(events: list[CompileEvent]) -> float:
    return float(sum(event.kind in RECOMPILE_KINDS for event in events))


# --- Memory -----------------------------------------------------------------------------------------------------------

# By whose word the peak is known, best first: figures of samples of the machine, or what replicas say.
_SAMPLES = {"device_peak_bytes": ("allocated", "device"), "process_peak_bytes": ("process",)}
# An arm on a card has compile workers, as many as the host has processors, whose shared pages count for each of them.
_ON_CARD = {"process_peak_bytes": ("engine",)}
_ACCOUNTS = {"device_peak_bytes": "device_peak", "process_peak_bytes": "process_peak"}


def _memory(run: Run, arm: str, key: str) -> tuple[str, dict[int, float]]:
    """The most that the arm's replicas held in each trial, added up, and by whose word: the same for all trials."""
    best: tuple[str, dict[int, float]] = ("", {})
    samples = Samples(run.records.bed)
    on_card = any(devices_of(trial).get(arm, "").startswith("cuda") for trial in run.trials)
    for figure in (MEMORY[name] for name in (_ON_CARD if on_card else {}).get(key, _SAMPLES[key])):
        peaks = [(trial, _sampled(run, arm, trial, figure, samples.of(figure.kind, trial))) for trial in run.trials]
        best = _fuller(best, f"{figure.kind} samples", peaks)
    return _fuller(best, "replicas", [(trial, _accounted(run, arm, trial, _ACCOUNTS[key])) for trial in run.trials])


def _fuller(
    best: tuple[str, dict[int, float]], source: str, peaks: list[tuple[Trial, float | None]]
) -> tuple[str, dict[int, float]]:
    known = {trial.number: value for trial, value in peaks if value}
    return (source, known) if len(known) > len(best[1]) else best


def _sampled(run: Run, arm: str, trial: Trial, figure: Figure, things: Iterable[Rows]) -> float | None:
    """The sum over the replicas, during the traffic; None where one of them was not watched through it."""
    own = {(rows.host, rows.name): peak_of(rows, figure, trial) for rows in things if rows.arm == arm}
    known = [peak for peak in own.values() if peak is not None]
    read = {name for (_, name), peak in own.items() if peak is not None}
    if not known or len(known) < len(own) or not set(run.account(arm).replica_names(trial)) <= read:
        return None
    return sum(known)


def _accounted(run: Run, arm: str, trial: Trial, key: str) -> float | None:
    """What replicas said after the traffic, else what they said of the start, which is already their sum."""
    final = mapping(trial.info.get("final"))
    rows = [mapping(mapping(final.get(name)).get("memory_bytes")) for name in run.account(arm).replica_names(trial)]
    last = [number(row.get(key)) for row in rows]
    known = [value for value in last if value is not None]
    if known and len(known) == len(last):
        return sum(known)
    return number(mapping(mapping(mapping(trial.info.get("startup")).get(arm)).get("memory_bytes")).get(key))
