"""From a run directory to the one JSON document that says what happened and what follows from it."""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from tailgate.analysis.arrays import index_parts
from tailgate.analysis.checks.check import Check
from tailgate.analysis.checks.pressure import in_words
from tailgate.analysis.frontier.summary_rows import summary_rows as frontier_rows
from tailgate.analysis.judging.gates import FAIL, INCONCLUSIVE, PASS, Gate
from tailgate.analysis.judging.gates.latency import noninferiority_name
from tailgate.analysis.judging.judgement import Judgement, judge
from tailgate.analysis.judging.ramp import ramp_of
from tailgate.analysis.records.documents import write_json
from tailgate.analysis.records.joining import RecordedRun, flat
from tailgate.analysis.records.plain_values import mapping, number
from tailgate.analysis.records.run_records import RunRecords, read_run
from tailgate.analysis.run.client_stalls import with_lengths
from tailgate.analysis.run.run import Run
from tailgate.analysis.run.spikes import find_spikes
from tailgate.analysis.run.trials import SECOND
from tailgate.analysis.settings.metrics import EMBED, EMBED_METRICS
from tailgate.analysis.settings.slo_targets import merged
from tailgate.analysis.statistics.compare import Comparison
from tailgate.analysis.statistics.quantiles import quantiles_of_groups
from tailgate.analysis.summary.arms import arm_row
from tailgate.analysis.summary.model import Summary

EXIT_CODES = {PASS: 0, INCONCLUSIVE: 3, FAIL: 99}

_MOST_EVENTS = 500
_MOST_REQUEST_IDS = 50
_CURVE_BINS = 60
_MOST_BINS = 1200


def analyze(run_dir: Path, *, slo: Sequence[str] = ()) -> dict[str, Any]:
    """Return the summary of the run in `run_dir`, ready for JSON. Raises RecordError when there is nothing to judge.

    The targets in `slo`, such as "p99_ttft_ms=500", take the place of the experiment's on the same figures, or join
    them.
    """
    # The run holds the only reference to the records, to free their table.
    run = with_lengths(Run.of(_with_targets(read_run(run_dir), slo)))
    return summary_of(run, judge(run))


def _with_targets(records: RunRecords, slo: Sequence[str]) -> RunRecords:
    """Add the targets in `slo` to the experiment's."""
    table = {"slo": merged(mapping(records.experiment.get("slo")), slo)} if slo else {}
    return replace(records, experiment=records.experiment | table)


def write_summary(summary: Mapping[str, Any], path: Path) -> None:
    """Write the summary to `path` as JSON, whole or not at all."""
    write_json(path, summary, indent=1, ensure_ascii=False, allow_nan=False)


def summary_of(run: Run, judgement: Judgement) -> dict[str, Any]:
    """Return the summary of a judged run, ready for JSON."""
    frontier = frontier_rows(run, judgement)
    gated = frontier is None or frontier["gated"]
    answered = PASS if frontier and any(row["starts"] for row in frontier["arms"]) else INCONCLUSIVE
    run_id, ramp = run.records.directory.resolve().name, ramp_of(run)
    gates = {(gate.arm, gate.gate): gate for gate in judgement.gates}
    with ThreadPoolExecutor(1) as processor:  # what takes a trial at a time, next to what takes all, for memory
        spikes, series = processor.submit(_spikes, run, judgement), processor.submit(_latency_series, run)
        distribution, arms = _distribution(run), [arm_row(run, arm, judgement) for arm in run.arms]
    summary = {
        "name": str(run.records.experiment.get("name") or run_id),
        "task": EMBED if run.embeds else "generate",
        "run_id": run_id,
        "created": moment(min((trial.first_ns for trial in run.trials if trial.first_ns > 0), default=0)),
        "overall": judgement.overall,
        "exit_code": EXIT_CODES[judgement.overall if gated else answered],
        "headline": (frontier and frontier["headline"]) or judgement.headline,
        "control": run.control,
        "arms": arms,
        "comparisons": [
            *(_comparison_row(item, gates[item.arm, noninferiority_name(item)]) for item in judgement.compared.gated),
            *(_comparison_row(item, None) for item in judgement.compared.secondary),
        ],
        "gates": [
            asdict(replace(gate, path=None)) | dict(zip(("low", "high"), gate.interval, strict=True))
            for gate in judgement.gates
        ],
        "validity": [_check_row(check, judgement) for check in judgement.checks],
        "advice": asdict(judgement.advice if gated else replace(judgement.advice, remedies=())),
        "design": _design(run),
        "events": _events(run),
        "spikes": spikes.result(),
        "series": series.result(),
        "distribution": distribution,
        # How interim analyses ended the run, empty if they did not; None for a run with one analysis.
        "interim": next((str(info["ended"]) for info in reversed(run.infos) if info.get("ended")), "")
        if run.limits.sequential
        else None,
        "ramp": None if ramp is None else asdict(ramp),
        "weights": _weights(run),
        "joined": _joined(run),
        "traffic": _traffic(run),
        "machines": asdict(judgement.machine_verdict),
        "frontier": frontier,
        "environment": dict(flat({**run.records.environment, "clock": None})),
    }
    return Summary.of(summary).document()


def _spikes(run: Run, judgement: Judgement) -> list[dict[str, Any]]:
    return [
        {
            **asdict(spike),
            "offset_s": run.offset_s(spike.trial, spike.start_ns),
            "seconds": (spike.end_ns - spike.start_ns) / SECOND,
            **({} if judgement.facts[spike.arm].known else {"cause": "unknown", "explained_pct": None}),
        }
        for spike in find_spikes(run.requests, run.attribution, run.events, control=run.control)
    ]


def moment(at_ns: int) -> str | None:
    """Format a time in UTC; None for 0."""
    return datetime.datetime.fromtimestamp(at_ns // SECOND, tz=datetime.UTC).isoformat() if at_ns > 0 else None


def _weights(run: Run) -> list[dict[str, Any]]:
    """List the changes of weights in order, also after the run. Offsets are seconds from the start of the trial."""
    return [
        {
            "offset_s": run.offset_s(change.trial, change.at_ns),
            "action": change.action,
            "weights": dict(change.weights),
            "shadows_pct": dict(change.shadows),
            "reason": change.why,
        }
        for change in run.records.weights
    ]


def _joined(run: Run) -> dict[str, Any] | None:
    """Return the runs that were judged as one and the number of machines; None for a single run."""
    if not run.records.joined:
        return None
    return {
        "runs": [_joined_run(one) for one in run.records.runs],
        "machines": len(run.machines),
        "differences": list(run.records.differences),
    }


def _joined_run(run: RecordedRun) -> dict[str, Any]:
    return {
        "name": run.name,
        "started": moment(min(run.starts_ns.values(), default=0)),
        "machine": run.machine or None,
        "trials": [run.trials[number] for number in sorted(set(run.numbers))],
        "missing": [joined for number, joined in run.trials.items() if number not in run.numbers],
        "seed": run.experiment.get("seed"),
        "git_commit": run.environment.get("git_commit"),
        "tailgate": mapping(run.environment.get("versions")).get("tailgate"),
    }


def _traffic(run: Run) -> dict[str, Any]:
    """Return the traffic of the first trial that describes it, with a name that it has where runs are compared. Trials
    of one run differ only in what they draw."""
    for trial in run.trials:
        facts = {key: mapping(trial.info.get(key)) for key in ("prompts", "over_limit")}
        if any(facts.values()):
            return dict(flat({"trial": run.records.trial_names.get(trial.number), **facts}))
    return {}


def _comparison_row(item: Comparison, gate: Gate | None) -> dict[str, Any]:
    """Return the comparison with the verdict of the gate that rests on it, if there is one."""
    return {
        **{name: getattr(item, name) for name in ("arm", "metric", "quantile", "low", "high")},
        "ratio": item.seen,
        "gate": gate is not None,
        "verdict": None if gate is None else gate.verdict,
        "reason": item.reason if gate is None else gate.reason,
    }


def _check_row(check: Check, judgement: Judgement) -> dict[str, Any]:
    """Return the check, and whether the verdict allows for it: no gate is open for it, or the error bars cover it."""
    keeps_open = any(check.check in gate.blocked_by and check.arm in (None, gate.arm) for gate in judgement.gates)
    allowed = not check.ok and (judgement.overall == PASS or (check.shift is not None and not keeps_open))
    limits = not check.ok and not allowed
    judged = {name for gate in judgement.gates for name in (gate.kind, gate.gate)}
    return {name: getattr(check, name) for name in ("check", "ok", "arm", "reason")} | {
        "allowed": allowed,
        "opens": [name for name in check.gates or check.opens if limits and name in judged],
        "remedy": check.remedy if limits else "",
    }


_EVENT_COLUMNS = ("frame", "reason", "shape", "dynamic", "cache", "breaks")


def _events(run: Run) -> list[dict[str, Any]]:
    """List the serving events of all arms, those that cost requests most first."""
    joined = zip(run.events, run.attribution.event_requests, run.attribution.event_backlog, strict=True)
    found = [item for item in joined if item[0].serving]
    found.sort(key=lambda item: (-item[0].seconds, -item[1].size, item[0].arm, item[0].start_ns, item[0].event_id))
    return [
        {
            **{name: getattr(event, name) for name in ("event_id", "trial", "arm", "replica", "kind", "seconds")},
            **{name: event.row.get(name) for name in _EVENT_COLUMNS},
            "backend_s": None if (backend := number(event.row.get("backend_ns"))) is None else backend / SECOND,
            "request_ids": list(event.request_ids[:_MOST_REQUEST_IDS]),
            "requests_hit": int(hit.size),
            "requests_behind": int(behind.size),
            "offset_s": run.offset_s(event.trial, event.start_ns),
        }
        for event, hit, behind in found[:_MOST_EVENTS]
    ]


def _latency_series(run: Run) -> dict[str, Any]:
    """Return each arm's bins that hold requests, as columns by trial and time; `bin_s` is their width."""
    longest = max((trial.seconds for trial in run.trials), default=0.0)
    bin_s = float(max(1, math.ceil(longest / _MOST_BINS)))
    return {"bin_s": bin_s, "arms": {arm: _bins(run, arm, bin_s) for arm in run.arms}}


_BINS = ("trial", "t_s", "n", "failed", "ttft_p50_ms", "ttft_p99_ms", "e2e_p50_ms", "e2e_p99_ms")


def _bins(run: Run, arm: str, bin_s: float) -> dict[str, list[Any]]:
    requests = run.requests
    found: dict[str, list[Any]] = {name: [] for name in _BINS}
    for trial in run.trials:
        own = requests.sound(arm, trial.number)
        since = (requests.start_ns[own] - trial.start_ns) // int(bin_s * SECOND)
        # Not a table of all bins, since a broken clock may say any time; mostly in order, so that few are sorted.
        numbers = np.unique(since[np.flatnonzero(np.diff(since, prepend=-1))])
        place = np.searchsorted(numbers, since).astype(np.int32)
        counts = [np.bincount(place[rows], minlength=len(numbers)) for rows in (slice(None), requests.failed[own])]
        ttft = quantiles_of_groups(requests.ttft_ms[own], place, (0.5, 0.99))
        e2e = quantiles_of_groups(requests.e2e_ms[own], place, (0.5, 0.99))
        columns = (np.full(len(numbers), trial.number), numbers * bin_s, *counts, *ttft.T, *e2e.T)
        for name, column in zip(_BINS, columns, strict=True):
            found[name] += column.tolist()
    return found


def _distribution(run: Run) -> dict[str, Any]:
    """Return histograms on edges common to the arms."""
    metrics: dict[str, dict[str, Any]] = {}
    for metric in EMBED_METRICS if run.embeds else ("ttft", "e2e"):
        values = run.requests.metric_ms(metric)
        usable = run.usable & (values > 0)
        metrics[metric] = {}
        if not usable.any():
            continue
        low, high = (
            float(of(values, where=usable, initial=start)) for of, start in ((np.min, math.inf), (np.max, 0.0))
        )
        edges = np.geomspace(low * 0.999, max(high, low * 1.01) * 1.001, _CURVE_BINS + 1)
        for arm in run.arms:
            counts = [np.histogram(values[rows], edges)[0] for rows in index_parts(usable & run.of_arm(arm))]
            metrics[metric][arm] = {"edges_ms": edges.tolist(), "counts": np.sum(counts, axis=0).tolist()}
    return metrics


def _design(run: Run) -> dict[str, Any]:
    planned, open_loop = run.planned, run.reported_open_loop
    return {
        "design": run.design,
        "duration_s": max((trial.seconds for trial in run.trials), default=0.0),
        "trials": len(run.trials),
        "trial_names": run.records.trial_names,
        "block_s": run.block_s,
        "blocks": run.blocks,
        "planned": sum(planned.values()) if planned else None,
        "open_loop": bool(run.requests.scheduled.all()) if open_loop is None else open_loop,
        "concurrency": run.concurrency,
        "pressure": in_words(run.records.experiment),
    }
