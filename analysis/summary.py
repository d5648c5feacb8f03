"""From a run directory to the one JSON document that says what happened and what follows from it.

This module only arranges: it cuts the records into arms, phases and blocks, asks the other modules, and writes what
they say. The same records and seed give the same bytes.
"""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from analysis import verdict as judge
from analysis.compare import Comparison, Sample, compare, decide
from analysis.planner import comparison_needed_s, share_needed_s
from analysis.quantiles import quantile, quantile_interval, quantiles
from analysis.records import METRICS, RecordError, Requests, RunRecords, read_run, requests_of
from analysis.slo import SloTarget, design_effect, judge_share, meets_all, misses, observed, parse_slo
from analysis.spikes import (
    RECOMPILE_KINDS,
    Attribution,
    CompileEvent,
    attribute,
    compile_events,
    find_spikes,
    normal_e2e_ms,
    stall_windows,
    windows_of,
    without_stalls_ms,
)
from analysis.verdict import Check, CompileFacts, Gate, GateLimits

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

SCHEMA = 1
EXIT_CODES = {judge.PASS: 0, judge.INCONCLUSIVE: 3, judge.FAIL: 99}

_QUANTILES = (0.5, 0.9, 0.95, 0.99, 0.999)
_MOST_EVENTS = 500
_MOST_REQUEST_IDS = 50
_MOST_BINS = 1200
_CURVE_BINS = 60
_SECOND = 1_000_000_000


def analyze(run_dir: Path, *, seed: int | None = None) -> dict[str, Any]:
    """The summary of the run in `run_dir`, ready for JSON. Raises RecordError when there is nothing to judge.

    `seed` drives the permutations; by default the experiment's own.
    """
    run = _Run.of(read_run(run_dir), seed)
    return {key: _plain(value) for key, value in _summary(run).items()}


def write_summary(summary: Mapping[str, Any], path: Path) -> None:
    """`path` holds the summary as JSON, whole or not at all."""
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(json.dumps(summary, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
    fresh.replace(path)


def exit_code(summary: Mapping[str, Any]) -> int:
    """0 for PASS, 99 for FAIL, 3 for INCONCLUSIVE."""
    return EXIT_CODES[str(summary["overall"])]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """One trial's place in time. `seconds` is how long it really lasted, not what was planned."""

    number: int
    info: Mapping[str, Any]
    start_ns: int
    first_ns: int  # the first request
    seconds: float
    blocks: int
    first_block: int  # its blocks are numbered from here, unique over trials


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """The records cut into arms, trials and blocks."""

    records: RunRecords
    seed: int
    limits: GateLimits
    targets: tuple[SloTarget, ...]
    design: str
    block_s: float
    control: str
    arms: tuple[str, ...]  # the control first
    requests: Requests
    events: tuple[CompileEvent, ...]
    attribution: Attribution
    trials: tuple[_Trial, ...]
    block: Ints  # of each request, unique over trials
    cold: Bools
    usable: Bools  # measured and with times in order

    @classmethod
    def of(cls, records: RunRecords, seed: int | None) -> _Run:
        experiment = records.experiment
        limits = GateLimits.from_table(_table(experiment, "gates"))
        infos = records.trials
        design = str(_first_of(infos, "design") or _table(experiment, "traffic").get("design") or "mirrored")
        block_s = _number(_first_of(infos, "block_s")) or _number(_table(experiment, "trials").get("block_s"))
        block_s = block_s if block_s and block_s > 0 else limits.block_s
        timeout_s = _number(_table(experiment, "traffic").get("timeout_s"))
        requests = requests_of(
            records.requests,
            deadline_ms=timeout_s * 1e3 if timeout_s else None,
            ends_ns=_planned_ends(infos),
        )
        events = compile_events(records.events, requests)
        control, arms = _arms(records, requests)
        # Arms that take turns meet only in a block that holds a turn of each.
        width_s = block_s * len(arms) if design == "switchback" else block_s
        trials = _trials(requests, infos, width_s)
        block = np.zeros(len(requests), dtype=np.int64)
        cold = np.zeros(len(requests), dtype=np.bool_)
        for trial in trials:
            own = requests.trial == trial.number
            since = requests.start_ns[own] - trial.start_ns
            index = np.clip(since // int(width_s * _SECOND), 0, trial.blocks - 1)
            block[own] = trial.first_block + index
            cold[own] = requests.start_ns[own] < trial.first_ns + int(limits.cold_s * _SECOND)
        if seed is None:
            given = experiment.get("seed")
            seed = given if isinstance(given, int) else 0
        return cls(
            records=records,
            seed=abs(seed),
            limits=limits,
            targets=parse_slo(_table(experiment, "slo")),
            design=design,
            block_s=width_s,
            control=control,
            arms=arms,
            requests=requests,
            events=events,
            attribution=attribute(requests, events),
            trials=trials,
            block=block,
            cold=cold,
            usable=requests.measured & ~requests.broken,
        )

    @property
    def treatments(self) -> tuple[str, ...]:
        return self.arms[1:]

    @property
    def seconds(self) -> float:
        return sum(trial.seconds for trial in self.trials)

    def of_arm(self, name: str) -> Bools:
        if name not in self.requests.arms:
            return np.zeros(len(self.requests), dtype=np.bool_)
        return np.asarray(self.requests.arm == self.requests.arms.index(name))

    def rng(self, *place: int) -> np.random.Generator:
        """A generator of its own for each place, so that one arm more does not change the others' numbers."""
        return np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=place))


# Reading what the run says of itself


def _table(experiment: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = experiment.get(key, {})
    if not isinstance(value, Mapping):
        raise RecordError(f"experiment.toml: {key} is {value!r}: give a table")
    return value


def _first_of(infos: Iterable[Mapping[str, Any]], key: str) -> Any:
    return next((info[key] for info in infos if info.get(key) is not None), None)


def _number(value: Any) -> float | None:
    known = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if known else None


def _rows(value: Any) -> list[Mapping[str, Any]]:
    return [row for row in value if isinstance(row, Mapping)] if isinstance(value, list) else []


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _planned_ends(infos: Iterable[Mapping[str, Any]]) -> dict[int, int]:
    ends = {}
    for info in infos:
        start, duration = _number(info.get("start_ns")), _number(info.get("duration_s"))
        if start is not None and duration is not None:
            ends[int(info["trial"])] = int(info["start_ns"]) + int(duration * _SECOND)
    return ends


def _arms(records: RunRecords, requests: Requests) -> tuple[str, tuple[str, ...]]:
    """The control and all arms, control first, then in the order that the experiment names them."""
    told = _rows(records.experiment.get("arms"))
    names = [str(row["name"]) for row in told if "name" in row]
    for info in records.trials:
        names += [str(row["name"]) for row in _rows(info.get("arms")) if "name" in row]
    names = list(dict.fromkeys([*names, *requests.arms]))
    if not names:
        raise RecordError("the records name no arm and hold no request: give a run with requests")
    control = next((str(row["name"]) for row in told if row.get("control") is True and "name" in row), None)
    control = control or _first_of(records.trials, "control")
    control = control or next((name for name in ("control", "eager") if name in names), None)
    if control is None:
        raise RecordError(
            f"none of the arms {', '.join(names)} is the control: "
            "add [[arms]] with name and control = true to experiment.toml, or name one arm control"
        )
    return str(control), (str(control), *(name for name in names if name != control))


def _trials(requests: Requests, infos: Sequence[Mapping[str, Any]], block_s: float) -> tuple[_Trial, ...]:
    by_number = {int(info["trial"]): info for info in infos}
    trials: list[_Trial] = []
    first_block = 0
    for number in sorted({*by_number, *np.unique(requests.trial).tolist()}):
        info = by_number.get(number, {})
        own = (requests.trial == number) & ~requests.broken
        first = int(requests.start_ns[own].min()) if own.any() else 0
        told = _number(info.get("start_ns"))
        start = int(info["start_ns"]) if told is not None and 0 < told <= first else first
        seen = (int(requests.start_ns[own].max()) - start) / 1e9 if own.any() else 0.0
        duration = _number(info.get("duration_s"))
        if duration is None or duration <= 0:
            seconds = max(seen, 1e-9)
        else:
            seconds = duration if info.get("complete") else max(min(duration, seen), 1e-9)
        # A last block shorter than half a block joins the one before it.
        blocks = max(1, math.floor(seconds / block_s + 0.5))
        trials.append(
            _Trial(
                number=number,
                info=info,
                start_ns=start,
                first_ns=first,
                seconds=seconds,
                blocks=blocks,
                first_block=first_block,
            )
        )
        first_block += blocks
    return tuple(trials)


# The parts of the summary


def _summary(run: _Run) -> dict[str, Any]:
    undecided = [_comparison(run, arm, metric, "steady") for arm in run.treatments for metric in run.limits.metrics]
    steady = decide(undecided)
    everything = decide(
        [_comparison(run, arm, metric, "all") for arm in run.treatments for metric in run.limits.metrics]
    )
    checks = _checks(run, steady)
    needed = {(item.arm, item.metric): _needed_s(run, item) for item in steady}
    facts = {arm: _compile_facts(run, arm) for arm in run.arms}
    gates: list[Gate] = []
    for arm in run.treatments:
        gates += [judge.noninferiority_gate(item, needed[arm, item.metric]) for item in steady if item.arm == arm]
        gates += _slo_gates(run, arm)
        gates += judge.recompile_gates(arm, facts[arm], run.limits)
        gates += _error_gates(run, arm)
    gates = [
        _with_needed(run, before, after) for before, after in zip(gates, judge.apply_checks(gates, checks), strict=True)
    ]
    verdicts = {arm: judge.combined([gate.verdict for gate in gates if gate.arm == arm]) for arm in run.treatments}
    overall = judge.combined(list(verdicts.values()))
    advice = judge.advise(gates, checks)
    started = min((trial.first_ns for trial in run.trials if trial.first_ns > 0), default=0)
    return {
        "schema": SCHEMA,
        "name": str(run.records.experiment.get("name") or run.records.directory.resolve().name),
        "run_id": run.records.directory.resolve().name,
        "created": _iso_time(started),
        "overall": overall,
        "exit_code": EXIT_CODES[overall],
        "headline": judge.headline(verdicts, gates, checks, run.control),
        "control": run.control,
        "seed": run.seed,
        "arms": [_arm(run, arm, facts[arm], verdicts.get(arm)) for arm in run.arms],
        "comparisons": [_comparison_row(run, item, gates) for item in (*steady, *everything)],
        "gates": [
            {
                "arm": gate.arm,
                "gate": gate.gate,
                "kind": gate.kind,
                "value": gate.value,
                "limit": gate.limit,
                "unit": gate.unit,
                "verdict": gate.verdict,
                "reason": gate.reason,
                "needed_s": gate.needed_s,
                "blocked_by": list(gate.blocked_by),
            }
            for gate in gates
        ],
        "validity": [
            {
                "check": check.check,
                "ok": check.ok,
                "arm": check.arm,
                "value": check.value,
                "limit": check.limit,
                "reason": check.reason,
                "affects": list(check.affects),
                "remedy": check.remedy,
            }
            for check in checks
        ],
        "spikes": [
            {
                "arm": spike.arm,
                "trial": spike.trial,
                "start_ns": spike.start_ns,
                "end_ns": spike.end_ns,
                "offset_s": _offset_s(run, spike.trial, spike.start_ns),
                "metric": "e2e",
                "peak_ms": spike.peak_ms,
                "requests": spike.requests,
                "cause": spike.cause,
                "event_ids": list(spike.event_ids),
                "explained_pct": spike.explained_pct,
            }
            for spike in find_spikes(run.requests, run.attribution, run.events, control=run.control)
        ],
        "events": _events(run),
        "series": _series(run),
        "distribution": _distribution(run),
        "design": _design(run),
        "advice": {"needed_s": advice.needed_s, "text": advice.text},
        "environment": run.records.environment,
    }


def _iso_time(at_ns: int) -> str | None:
    try:
        moment = datetime.datetime.fromtimestamp(at_ns // _SECOND, tz=datetime.UTC)
    except (ValueError, OverflowError, OSError):
        return None
    return moment.isoformat() if at_ns > 0 else None


def _offset_s(run: _Run, number: int, at_ns: int) -> float | None:
    start = next((trial.start_ns for trial in run.trials if trial.number == number), 0)
    return (at_ns - start) / 1e9 if start else None


def _compile_quiet(run: _Run, arms: Sequence[str], rows: Ints) -> Bools:
    """Which of the requests `rows` were never in flight while one of `arms` compiled."""
    quiet = np.ones(len(rows), dtype=np.bool_)
    for trial in run.trials:
        of_trial = run.requests.trial[rows] == trial.number
        for arm in arms:
            windows = stall_windows(run.events, arm=arm, trial=trial.number)
            own = rows[of_trial]
            quiet[of_trial] &= ~windows.touch(run.requests.start_ns[own], run.requests.end_ns[own])
    return quiet


def _comparison(run: _Run, arm: str, metric: str, phase: str) -> Comparison:
    """The undecided comparison of `arm` with the control.

    The steady phase leaves out the cold start and every request in flight while one of the two compiled. Both arms
    lose the same stretches, and under a mirrored design a request and its copy go together.
    """
    values = run.requests.metric_ms(metric)
    samples = []
    for name in (arm, run.control):
        mask = run.of_arm(name) & run.usable & ~np.isnan(values)
        if phase == "steady":
            mask &= ~run.cold
        rows = np.flatnonzero(mask)
        if phase == "steady":
            quiet = _compile_quiet(run, (arm, run.control), rows)
            rows = rows[quiet & ~run.attribution.hit[rows]]
        samples.append(rows)
    pairs = [run.requests.pair[rows] for rows in samples]
    paired = run.design == "mirrored" and all(len(pair) > 0 and bool((pair >= 0).all()) for pair in pairs)
    if paired:
        shared = np.intersect1d(pairs[0], pairs[1])
        samples = [rows[np.isin(pair, shared)] for rows, pair in zip(samples, pairs, strict=True)]
    treatment, control = (
        Sample(values=values[rows], block=run.block[rows], trial=run.requests.trial[rows]) for rows in samples
    )
    place = (run.arms.index(arm), METRICS.index(metric), ("steady", "all").index(phase))
    result = compare(
        treatment,
        control,
        q=run.limits.quantile,
        margin=run.limits.margin,
        alpha=run.limits.alpha,
        draws=run.limits.draws,
        rng=run.rng(0, *place),
        paired=paired,
    )
    return replace(result, arm=arm, control=run.control, metric=metric, phase=phase)


def _overhead_s(run: _Run) -> float:
    return run.limits.cold_s * len(run.trials)


def _needed_s(run: _Run, item: Comparison) -> float | None:
    return comparison_needed_s(item, block_s=run.block_s, min_blocks=run.limits.min_blocks, overhead_s=_overhead_s(run))


# Checks that a longer run of the same kind would pass.
_LENGTH_CHECKS = frozenset({"blocks", "run length", "tail", "cut requests"})


def _with_needed(run: _Run, before: Gate, after: Gate) -> Gate:
    """The gate with the run length that its checks ask for, where it was decided but for them and they want length."""
    if before.verdict == judge.INCONCLUSIVE or after.verdict != judge.INCONCLUSIVE:
        return after
    if not set(after.blocked_by) <= _LENGTH_CHECKS:
        return after
    rate = _rate(run, int(run.of_arm(after.arm).sum()))
    tail_s = judge.TAIL_REQUESTS / (1.0 - run.limits.quantile) / rate if rate > 0 else 0.0
    floor = max(run.limits.min_blocks * run.block_s, math.ceil(tail_s / run.block_s) * run.block_s)
    return replace(after, needed_s=floor + _overhead_s(run))


def _slo_gates(run: _Run, arm: str) -> list[Gate]:
    return [_slo_gate(run, arm, target) for target in run.targets]


def _slo_gate(run: _Run, arm: str, target: SloTarget) -> Gate:
    mask = run.of_arm(arm) & run.usable
    missed, counts = misses(run.requests, target)
    counts &= mask
    result = judge_share(missed[counts], run.block[counts], allowed=target.allowed_share, alpha=run.limits.alpha)
    needed = share_needed_s(
        result,
        requests_per_s=_rate(run, int(counts.sum())),
        block_s=run.block_s,
        min_blocks=run.limits.min_blocks,
        alpha=run.limits.alpha,
    )
    return judge.slo_gate(arm, target, result, observed(run.requests, mask, target), needed)


def _error_gates(run: _Run, arm: str) -> list[Gate]:
    requests = run.requests
    counts = run.of_arm(arm) & ~requests.broken & (requests.ok | requests.failed)
    result = judge_share(
        requests.failed[counts],
        run.block[counts],
        allowed=run.limits.max_error_pct / 100.0,
        alpha=run.limits.alpha,
    )
    needed = share_needed_s(
        result,
        requests_per_s=_rate(run, int(counts.sum())),
        block_s=run.block_s,
        min_blocks=run.limits.min_blocks,
        alpha=run.limits.alpha,
    )
    gates = [judge.error_gate(arm, result, run.limits.max_error_pct, needed)]
    if run.records.trials:
        gates.append(judge.death_gate(arm, len(_deaths(run, arm))))
    return gates


def _rate(run: _Run, count: int) -> float:
    return count / run.seconds if run.seconds > 0 else 0.0


def _deaths(run: _Run, arm: str) -> list[Mapping[str, Any]]:
    return [row for trial in run.trials for row in _rows(trial.info.get("deaths")) if row.get("arm") == arm]


def _config(run: _Run, arm: str) -> Mapping[str, Any]:
    """The arm's resolved configuration from the first trial that has it, else what the experiment says of it."""
    for trial in run.trials:
        for row in _rows(trial.info.get("arms")):
            if row.get("name") == arm and isinstance(row.get("config"), Mapping):
                return _mapping(row["config"])
    return next((row for row in _rows(run.records.experiment.get("arms")) if row.get("name") == arm), {})


def _replicas(run: _Run, arm: str) -> int:
    for trial in run.trials:
        for row in _rows(trial.info.get("arms")):
            if row.get("name") == arm and isinstance(row.get("replicas"), list):
                return max(1, len(row["replicas"]))
    own = np.unique(run.requests.replica[run.of_arm(arm)])
    return max(1, int((own >= 0).sum()))


def _serving(run: _Run, arm: str) -> list[CompileEvent]:
    return [event for event in run.events if event.arm == arm and event.serving]


def _stall_seconds(run: _Run, arm: str) -> float:
    """Seconds that compiles held a replica of the arm, summed over replicas and trials."""
    total = 0.0
    events = _serving(run, arm)
    for trial in run.trials:
        for replica in sorted({event.replica or "" for event in events if event.trial == trial.number}):
            total += windows_of(
                (event.start_ns, event.end_ns)
                for event in events
                if event.trial == trial.number and (event.replica or "") == replica and event.stalls
            ).seconds
    return total


def _compiles(run: _Run, arm: str) -> bool:
    return bool(_mapping(_config(run, arm).get("compile")).get("enabled"))


def _compile_facts(run: _Run, arm: str) -> CompileFacts:
    serving = _serving(run, arm)
    recompiles = [event for event in serving if event.kind in RECOMPILE_KINDS]
    own = run.of_arm(arm) & ~run.requests.broken
    stalls = run.attribution.stall_ms[own]
    minutes = run.seconds / 60.0 * _replicas(run, arm)
    # An arm that compiles has at least its warm-up to tell of; silence means that its telemetry was lost.
    silent = _compiles(run, arm) and not any(event.arm == arm for event in run.events)
    return CompileFacts(
        known=run.records.events is not None and not silent,
        recompiles=len(recompiles),
        most_in_a_trial=max(
            (sum(event.trial == trial.number for event in recompiles) for trial in run.trials), default=0
        ),
        longest_event_s=max((event.seconds for event in serving if event.stalls), default=0.0),
        longest_stall_s=float(stalls.max()) / 1e3 if stalls.size else 0.0,
        stall_s_per_min=_stall_seconds(run, arm) / minutes if minutes > 0 else 0.0,
        requests_hit=int(run.attribution.hit[own].sum()),
        requests=int(own.sum()),
        trials=max(1, len(run.trials)),
    )


def _checks(run: _Run, steady: Sequence[Comparison]) -> list[Check]:
    requests, limits = run.requests, run.limits
    infos = [trial.info for trial in run.trials if trial.info]
    counts = {arm: int((run.of_arm(arm)).sum()) for arm in run.arms}
    checks = [
        judge.check_records(run.records.problems, int(requests.broken.sum()), requests.repeated),
        judge.check_complete(infos),
        judge.check_counts(counts, _planned(run), mirrored=run.design == "mirrored"),
    ]
    if run.design == "split":
        ratio = judge.check_sample_ratio(_sessions(run), _weights(run))
        checks += [ratio] if ratio is not None else []
    control_counts = run.of_arm(run.control) & (requests.ok | requests.failed)
    checks.append(
        judge.check_control_errors(
            run.control,
            int(requests.failed[control_counts].sum()),
            int(control_counts.sum()),
            limits.max_error_pct,
        )
    )
    checks.append(judge.check_generator_lag(_generator_lag_ms(run), limits.max_generator_lag_ms))
    open_loop = _first_of(infos, "open_loop")
    scheduled = bool(requests.scheduled.all()) if len(requests) else False
    checks.append(judge.check_open_loop(open_loop if isinstance(open_loop, bool) else None, scheduled))
    if run.targets:
        checks.append(judge.check_length(sum(trial.blocks for trial in run.trials), limits, run.block_s))
    checks.append(judge.check_interference(*_interference(run)))
    intended = run.records.experiment.get("comparable") is False
    for arm in run.arms:
        if infos:
            checks.append(judge.check_deaths(arm, _deaths(run, arm), control=arm == run.control))
    for arm in run.treatments:
        own = [item for item in steady if item.arm == arm]
        checks.append(judge.check_blocks(arm, min((item.blocks for item in own), default=0), limits, run.block_s))
        checks.append(judge.check_tail(arm, min((item.requests for item in own), default=0), limits.quantile))
        checks.append(judge.check_autocorrelation(arm, own))
        checks.append(judge.check_cross(arm, own))
        checks.append(judge.check_comparable(arm, _differences(run, arm), intended=intended))
        worst = max((arm, run.control), key=lambda name: _cut_share(run, name))
        mine = run.of_arm(worst) & run.usable
        checks.append(
            replace(judge.check_cut(worst, int(requests.cut[mine].sum()), int(mine.sum()), limits.quantile), arm=arm)
        )
    return checks


def _cut_share(run: _Run, arm: str) -> float:
    own = run.of_arm(arm) & run.usable
    return float(run.requests.cut[own].mean()) if own.any() else 0.0


def _planned(run: _Run) -> dict[str, int]:
    total: dict[str, int] = {}
    for trial in run.trials:
        for name, count in _mapping(trial.info.get("planned")).items():
            number = _number(count)
            if number is not None:
                total[str(name)] = total.get(str(name), 0) + int(number)
    return total


def _weights(run: _Run) -> dict[str, float]:
    weights = {str(name): _number(value) or 0.0 for name, value in _mapping(_first_of(_infos(run), "weights")).items()}
    for row in _rows(run.records.experiment.get("arms")):
        if "name" in row and str(row["name"]) not in weights:
            weights[str(row["name"])] = _number(row.get("weight")) or 0.0
    return weights


def _infos(run: _Run) -> list[Mapping[str, Any]]:
    return [trial.info for trial in run.trials]


def _sessions(run: _Run) -> dict[str, int]:
    """Sessions per arm, since the splitter places sessions; a request without one counts by itself."""
    counts = {}
    for arm in run.arms:
        own = run.of_arm(arm)
        sessions = np.column_stack((run.requests.trial[own], run.requests.session[own]))
        known = sessions[:, 1] >= 0
        counts[arm] = len(np.unique(sessions[known], axis=0)) + int((~known).sum())
    return counts


def _generator_lag_ms(run: _Run) -> float | None:
    """The largest p99 lag that a generator or the records report."""
    lags = [_number(_mapping(row.get("lag_ms")).get("p99")) for row in run.records.generators]
    known = [lag for lag in lags if lag is not None]
    from_records = quantile(run.requests.lag_ms[~run.requests.broken], 0.99)
    if not math.isnan(from_records):
        known.append(from_records)
    return max(known, default=None)


def _differences(run: _Run, arm: str) -> list[str]:
    """The keys of model and engine in which the arm differs from the control."""
    own, base = _config(run, arm), _config(run, run.control)
    different = []
    for part in ("model", "engine"):
        mine, theirs = _mapping(own.get(part)), _mapping(base.get(part))
        if mine and theirs:
            keys = sorted({*mine, *theirs})
            different += [f"{part}.{key}" for key in keys if mine.get(key) != theirs.get(key)]
    return different


def _interference(run: _Run) -> tuple[float | None, float | None]:
    """How much longer the control's requests took while other arms compiled, and the p-value."""
    requests = run.requests
    own = run.of_arm(run.control) & requests.ok
    expected = normal_e2e_ms(requests, own & (run.attribution.cause == 0))
    if expected is None:
        return None, None
    own &= (expected > 0) & (requests.e2e_ms > 0)
    bin_s = max(0.25, run.seconds / 8000.0)
    inside: list[Floats] = []
    starts, excess = [], []
    offset = 0.0
    for trial in run.trials:
        bins = max(1, math.ceil(trial.seconds / bin_s))
        edges = trial.start_ns + (np.arange(bins + 1) * bin_s * _SECOND).astype(np.int64)
        windows = windows_of(
            (event.start_ns, event.end_ns)
            for event in run.events
            if event.serving and event.stalls and event.trial == trial.number and event.arm != run.control
        )
        inside.append(windows.overlap_ns(edges[:-1], edges[1:]) / (bin_s * _SECOND))
        mine = own & (requests.trial == trial.number)
        since = np.clip((requests.start_ns[mine] - trial.start_ns) / 1e9, 0.0, bins * bin_s - 1e-6)
        starts.append(since + offset)
        excess.append(np.log(requests.e2e_ms[mine] / expected[mine]))
        offset += bins * bin_s
    if not inside:
        return None, None
    return judge.slowdown_during(
        np.concatenate(excess), np.concatenate(starts), np.concatenate(inside), bin_s=bin_s, rng=run.rng(1)
    )


# Rows of the summary


def _comparison_row(run: _Run, item: Comparison, gates: Sequence[Gate]) -> dict[str, Any]:
    name = judge.noninferiority_gate(item, None).gate
    gate = next(row for row in gates if row.arm == item.arm and row.gate == name)
    blocked = gate.blocked_by if item.verdict != judge.INCONCLUSIVE else ()
    steady = item.phase == "steady"
    return {
        "arm": item.arm,
        "control": item.control,
        "metric": item.metric,
        "phase": item.phase,
        "quantile": item.quantile,
        "ratio": item.ratio,
        "low": item.low,
        "high": item.high,
        "p_worse": item.p_worse,
        "p_noninferior": item.p_noninferior,
        "p_inferior": item.p_inferior,
        "p_inferior_holm": item.p_inferior_holm,
        "cross_p_noninferior": item.cross_p_noninferior,
        "cross_p_inferior": item.cross_p_inferior,
        "autocorrelation": item.autocorrelation,
        "margin": item.margin,
        "method": item.method,
        "blocks": item.blocks,
        "trials": item.trials,
        "requests": item.requests,
        # What the test alone says; the verdict also heeds the validity checks.
        "test_verdict": item.verdict,
        "verdict": gate.verdict if steady else judge.INCONCLUSIVE if blocked else item.verdict,
        "reason": gate.reason if steady else item.reason,
        "needed_s": gate.needed_s if steady else None,
    }


def _arm(run: _Run, arm: str, facts: CompileFacts, outcome: str | None) -> dict[str, Any]:
    requests = run.requests
    own = run.of_arm(arm)
    usable = own & run.usable
    completed = int((own & requests.ok).sum())
    failed = int((own & requests.failed).sum())
    rows = np.flatnonzero(usable & ~run.cold)
    quiet = rows[_compile_quiet(run, (arm,), rows) & ~run.attribution.hit[rows]]
    steady = np.zeros(len(requests), dtype=np.bool_)
    steady[quiet] = True
    tokens = int(requests.output_tokens[usable].sum())
    config = _config(run, arm)
    seconds = run.seconds
    return {
        "name": arm,
        "preset": config.get("preset"),
        "control": arm == run.control,
        "requests": int(own.sum()),
        "ok": completed,
        "failed": failed,
        "cancelled": int((own & requests.cut).sum()),
        "error_pct": 100.0 * failed / (completed + failed) if completed + failed else None,
        "output_tokens": tokens,
        "request_rate": _rate(run, int(usable.sum())),
        "output_token_rate": tokens / seconds if seconds > 0 else None,
        "goodput_rps": _rate(run, int((meets_all(requests, run.targets) & usable).sum())) if run.targets else None,
        "metrics": _metrics(run, usable),
        "steady": _metrics(run, steady),
        "cold": _metrics(run, usable & run.cold),
        "slo": [
            {
                "key": target.key,
                "limit": target.limit,
                "value": gate.value,
                "verdict": gate.verdict,
                "reason": gate.reason,
            }
            for target in run.targets
            for gate in (_slo_gate(run, arm, target),)
        ],
        "compile": _compile_row(run, arm, facts),
        "padding": _padding(run, arm),
        "startup": _startup(run, arm),
        "deaths": len(_deaths(run, arm)),
        "verdict": outcome,
    }


def _metrics(run: _Run, mask: Bools) -> dict[str, Any]:
    requests = run.requests
    table = {name: _described(requests.metric_ms(name)[mask]) for name in METRICS}
    gaps = np.repeat(mask & (requests.ok | requests.cut), np.diff(requests.gap_offsets))
    table["itl"] = _described(requests.gaps_ms[gaps])
    for name in ("ttft", "e2e", "tpot", "max_itl"):
        # Failed requests stand in these figures with their deadline.
        table[name]["failed"] = int((mask & requests.failed & ~np.isnan(requests.metric_ms(name))).sum())
    return table


def _described(values: npt.NDArray[Any]) -> dict[str, Any]:
    known = values[~np.isnan(values)]
    p50, p90, p95, p99, p99_9, top = quantiles(known, (*_QUANTILES, 1.0))
    return {
        "n": int(known.size),
        "p50_ms": p50,
        "p90_ms": p90,
        "p95_ms": p95,
        "p99_ms": p99,
        "p99_9_ms": p99_9,
        "max_ms": top,
        "mean_ms": float(known.mean(dtype=np.float64)) if known.size else None,
    }


def _compile_row(run: _Run, arm: str, facts: CompileFacts) -> dict[str, Any]:
    events = [event for event in run.events if event.arm == arm]
    warmup = [event for event in events if not event.serving]
    serving = _serving(run, arm)
    known = run.records.events is not None
    usable = run.of_arm(arm) & run.usable
    warmup_s = 0.0
    for trial, replica in sorted({(event.trial, event.replica or "") for event in warmup}):
        warmup_s += windows_of(
            (event.start_ns, event.end_ns)
            for event in warmup
            if event.trial == trial and (event.replica or "") == replica
        ).seconds
    row: dict[str, Any] = {
        "warmup_events": len(warmup) if known else None,
        "warmup_s": warmup_s if known else None,
        "serving_events": len(serving) if known else None,
        "recompiles": facts.recompiles if known else None,
        "graph_captures": sum(event.kind == "graph_capture" for event in serving) if known else None,
        "limit_hits": sum(event.kind == "limit_hit" for event in serving) if known else None,
        "eager_fallback_pct": _eager_fallback_pct(run, arm),
        "longest_event_s": facts.longest_event_s if known else None,
        "longest_stall_s": facts.longest_stall_s,
        "stall_s": _stall_seconds(run, arm) if known else None,
        "stall_s_per_min": facts.stall_s_per_min if known else None,
        "requests_hit": facts.requests_hit,
        "requests_hit_pct": 100.0 * facts.requests_hit / facts.requests if facts.requests else None,
    }
    for metric in ("ttft", "e2e"):
        with_stalls = quantile(run.requests.metric_ms(metric)[usable], 0.99)
        without = quantile(without_stalls_ms(run.requests, run.attribution, metric)[usable], 0.99)
        row[f"p99_{metric}_ms_without"] = without
        row[f"p99_{metric}_explained_pct"] = 100.0 * (1.0 - without / with_stalls) if with_stalls > 0 else None
    return row


def _steps(run: _Run, arm: str) -> pa.Table | None:
    """The engine steps of the arm after the first request of their trial."""
    if run.records.steps is None:
        return None
    steps = run.records.steps.filter(pc.equal(run.records.steps.column("arm"), arm))
    first = {trial.number: trial.first_ns for trial in run.trials}
    starts = np.asarray(pc.fill_null(steps.column("start_ns"), 0).to_numpy(), dtype=np.int64)
    numbers = np.asarray(pc.fill_null(steps.column("trial"), 1).to_numpy(), dtype=np.int64)
    keep = np.zeros(steps.num_rows, dtype=np.bool_)
    for number in np.unique(numbers).tolist():
        keep |= (numbers == number) & (starts >= first.get(number, 0))
    return steps.filter(pa.array(keep))


def _eager_fallback_pct(run: _Run, arm: str) -> float | None:
    """The share of steps that ran uncompiled on an arm that asks for compiling; None elsewhere."""
    steps = _steps(run, arm) if _compiles(run, arm) else None
    if steps is None:
        return None
    known = steps.column("compiled").drop_null()
    total = len(known)
    return 100.0 * (1.0 - (pc.sum(known).as_py() or 0) / total) if total else None


def _padding(run: _Run, arm: str) -> dict[str, Any]:
    steps = _steps(run, arm)
    if steps is None:
        return dict.fromkeys(("tokens", "padded_tokens", "waste_pct", "prefill_waste_pct", "decode_waste_pct"))
    tokens, padded, waste = _waste(steps)
    by_kind = {kind: _waste(steps.filter(pc.equal(steps.column("kind"), kind)))[2] for kind in ("prefill", "decode")}
    return {
        "tokens": tokens,
        "padded_tokens": padded,
        "waste_pct": waste,
        "prefill_waste_pct": by_kind["prefill"],
        "decode_waste_pct": by_kind["decode"],
    }


def _waste(steps: pa.Table) -> tuple[int, int, float | None]:
    tokens = int(pc.sum(steps.column("tokens")).as_py() or 0)
    padded = int(pc.sum(steps.column("padded_tokens")).as_py() or 0)
    return tokens, padded, 100.0 * (1.0 - tokens / padded) if padded else None


def _startup(run: _Run, arm: str) -> dict[str, Any]:
    loads, warmups = [], []
    memory: dict[str, Any] = {}
    for trial in run.trials:
        startup = _mapping(_mapping(trial.info.get("startup")).get(arm))
        items = {str(key): _number(value) for key, value in _mapping(startup.get("items_ns")).items()}
        if items:
            loads.append(sum(value or 0.0 for key, value in items.items() if key.startswith("load")) / 1e9)
            warmups.append(sum(value or 0.0 for key, value in items.items() if not key.startswith("load")) / 1e9)
        memory = memory or dict(_mapping(startup.get("memory_bytes")))
    return {
        "load_s": float(np.mean(loads)) if loads else None,
        "warmup_s": float(np.mean(warmups)) if warmups else None,
        "memory_bytes": memory,
    }


_EVENT_COLUMNS = ("compile_id", "frame", "reason", "shape", "dynamic", "cache", "batch_id", "backend_ns", "phase")


def _events(run: _Run) -> list[dict[str, Any]]:
    """Serving events of all arms, those that cost requests most first."""
    rows: list[dict[str, Any]] = []
    for event, hit in zip(run.events, run.attribution.event_requests, strict=True):
        if not event.serving:
            continue
        rows.append(
            {
                "event_id": event.event_id,
                "trial": event.trial,
                "arm": event.arm,
                "replica": event.replica,
                "kind": event.kind,
                "start_ns": event.start_ns,
                "end_ns": event.end_ns,
                **{name: event.row.get(name) for name in _EVENT_COLUMNS},
                "request_ids": list(event.request_ids[:_MOST_REQUEST_IDS]),
                "request_count": len(event.request_ids),
                "seconds": event.seconds,
                "requests_hit": int(hit.size),
                "offset_s": _offset_s(run, event.trial, event.start_ns),
            }
        )
    rows.sort(key=lambda row: (-row["seconds"], -row["requests_hit"], row["arm"], row["start_ns"], row["event_id"]))
    return rows[:_MOST_EVENTS]


def _series(run: _Run) -> dict[str, Any]:
    """Latency over time, by when requests were due."""
    longest = max((trial.seconds for trial in run.trials), default=0.0)
    bin_s = float(max(1, math.ceil(longest / _MOST_BINS)))
    requests = run.requests
    arms: dict[str, list[dict[str, Any]]] = {}
    for arm in run.arms:
        points: list[dict[str, Any]] = []
        for trial in run.trials:
            own = np.flatnonzero(run.of_arm(arm) & (requests.trial == trial.number) & ~requests.broken)
            bins = (requests.start_ns[own] - trial.start_ns) // int(bin_s * _SECOND)
            order = np.argsort(bins, kind="stable")
            own, bins = own[order], bins[order]
            starts = np.flatnonzero(np.diff(bins, prepend=bins[:1] - 1)) if own.size else np.zeros(0, dtype=np.int64)
            for rows, number in zip(np.split(own, starts[1:]), bins[starts].tolist(), strict=False):
                ttft = quantiles(requests.ttft_ms[rows], (0.5, 0.99))
                e2e = quantiles(requests.e2e_ms[rows], (0.5, 0.99, 1.0))
                points.append(
                    {
                        "trial": trial.number,
                        "t_s": number * bin_s,
                        "n": int(rows.size),
                        "ttft_p50_ms": ttft[0],
                        "ttft_p99_ms": ttft[1],
                        "e2e_p50_ms": e2e[0],
                        "e2e_p99_ms": e2e[1],
                        "e2e_max_ms": e2e[2],
                        "failed": int(requests.failed[rows].sum()),
                    }
                )
        arms[arm] = points
    return {"bin_s": bin_s, "arms": arms}


def _distribution(run: _Run) -> dict[str, Any]:
    """Histograms on edges common to the arms, and quantiles with 95 % limits that allow for bunching."""
    metrics: dict[str, dict[str, Any]] = {}
    for metric in ("ttft", "e2e"):
        values = run.requests.metric_ms(metric)
        usable = run.usable & ~np.isnan(values) & (values > 0)
        metrics[metric] = {}
        if not usable.any():
            continue
        low, high = float(values[usable].min()), float(values[usable].max())
        edges = np.geomspace(low * 0.999, max(high, low * 1.01) * 1.001, _CURVE_BINS + 1)
        for arm in run.arms:
            own = usable & run.of_arm(arm)
            mine, block = values[own], run.block[own]
            curve = []
            for q, value in zip(_QUANTILES, quantiles(mine, _QUANTILES), strict=True):
                effect = design_effect(mine > value, block)
                lower, upper = quantile_interval(mine, q, confidence=0.95, design_effect=effect)
                curve.append([q, value, lower, upper])
            metrics[metric][arm] = {
                "edges_ms": edges.tolist(),
                "counts": np.histogram(mine, edges)[0].tolist(),
                "ecdf": curve,
            }
    return {"metrics": metrics}


def _design(run: _Run) -> dict[str, Any]:
    planned = _planned(run)
    open_loop = _first_of(_infos(run), "open_loop")
    return {
        "design": run.design,
        "duration_s": max((trial.seconds for trial in run.trials), default=0.0),
        "trials": len(run.trials),
        "block_s": run.block_s,
        "blocks": sum(trial.blocks for trial in run.trials),
        "planned": sum(planned.values()) if planned else None,
        "open_loop": open_loop if isinstance(open_loop, bool) else bool(run.requests.scheduled.all()),
        "generator_lag_p99_ms": _generator_lag_ms(run),
    }


def _plain(value: Any) -> Any:
    """`value` in JSON's own types: unknown numbers become null, and floats keep seven digits."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        # Sums differ in their last digits between machines; nothing is known to more than seven.
        return float(f"{value:.7g}") if math.isfinite(value) else None
    if isinstance(value, (str, int, bool)) or value is None:
        return value
    return str(value)
