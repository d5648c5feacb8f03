"""Synthetic run directories: seeded requests, compile events and steps, written as a real run writes them.

Latency is lognormal with a drift that all arms share block by block (correlated in time), and a compile delays every
request of its arm that is in flight, for as long as it lasts.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import tomli_w

from benchmarks.simulation.records import EPOCH_NS, request_table
from tailgate.analysis.arrays import Floats, Ints
from tailgate.analysis.checks.check import ESTIMATES, Check
from tailgate.analysis.checks.table import RULES
from tailgate.analysis.judging.gates import Gate
from tailgate.analysis.records.documents import EDITED, toml_with_checksum, write_document
from tailgate.analysis.records.run_records import read_run
from tailgate.analysis.records.schemas import COMPILE_EVENTS, REQUESTS, STEPS
from tailgate.analysis.records.tables import RecordWriter
from tailgate.analysis.run.run import Run
from tailgate.analysis.run.slo import ShareResult
from tailgate.analysis.statistics.compare import Comparison
from tests.fakes.machines import FakeMachines

SECOND = 1_000_000_000
SENT_NS = 200_000  # after it was due
BLOCK_S = 30  # also the turn of an arm under a switchback
SEPARATE_DAYS = 120  # of runs whose trials do not take turns


def start_of(trial: int, *, day: int = 0) -> int:
    """Return when the trial starts of a run on that day, in ns since the epoch."""
    return EPOCH_NS + (day * 86_400 + trial * 100_000) * SECOND


@dataclass(frozen=True, slots=True, kw_only=True)
class Compile:
    at_s: float
    seconds: float
    kind: str = "recompile"
    shape: str = ""
    reason: str = "tensor 'input_ids' size mismatch at index 1. expected 16, actual 17"


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeArm:
    """How one arm behaves."""

    name: str
    ratio: float = 1.0  # of its latency to the control's
    compiles: Sequence[Compile] = ()
    error_share: float = 0.0
    error_status: str = "INTERNAL"
    eager_steps: int = 0  # of the 20 steps of a trial, those that ran as plain Python though the arm compiles
    weight: float = 1.0
    config: Mapping[str, Any] = field(default_factory=dict)
    enabled: bool = True
    holds_rps: float = float("inf")  # requests/s that it can begin; others wait
    padding: float = 4 / 3  # padded tokens over real ones, of its steps
    warmed: Mapping[str, float] = field(default_factory=dict)  # seconds of its start by shape, where it reports them
    decode: float = 1.0  # its time by token, over that which `ratio` says


EAGER = FakeArm(name="eager", enabled=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeRun:
    """What to write. `server_columns` False leaves out what only our own servers report."""

    name: str = "fake"
    seed: int = 1
    environment: Mapping[str, Any] = field(default_factory=lambda: {"python": "3.11", "device": "made up"})
    compare_models: bool = False
    arms: Sequence[FakeArm] = (EAGER, FakeArm(name="compiled"))
    task: str = "generate"  # "embed": requests have an end and no tokens
    design: str = "mirrored"
    duration_s: float = 780.0
    trials: int = 1
    rate: float = 4.0
    drift: float = 0.15  # spread of the shared drift, in log scale
    own_drift: float = 0.02  # spread of each arm's own, block by block
    own_rho: float = 0.0  # how much of its own drift the next block keeps
    complete: bool = True
    server_columns: bool = True
    telemetry: bool = True
    gates: Mapping[str, Any] = field(default_factory=dict)
    slo: Mapping[str, Any] = field(default_factory=dict)
    parity: Mapping[str, Any] = field(default_factory=dict)
    open_loop: bool = True
    lag_ms: float = 1.0
    ignore_eos: bool = False  # answers have exactly the tokens that were asked for
    machines: FakeMachines | None = None  # the machines, if they were watched
    interference: float = 1.0  # times longer that the control takes while another arm compiles
    day: int = 0  # on which it ran; a trial takes more than one, see SEPARATE_DAYS
    day_ratio: float = 1.0  # how much longer everything took on that day
    start_spread: float = 0.0  # of the log latency of an arm over its starts
    checksums: bool = False  # documents have checksums, as those of a real run; so they cannot be edited by tests


_WRITTEN = tempfile.TemporaryDirectory(prefix="fake-runs-")


def write_run(directory: Path, run: FakeRun) -> Path:
    """Write the run into `directory` and return it. Each run is made once in a process, and copied from then on."""
    made = Path(_WRITTEN.name, hashlib.sha256(repr(run).encode()).hexdigest())
    if not made.exists():
        making = Path(tempfile.mkdtemp(dir=_WRITTEN.name))
        _make_run(making / "run", run)
        (making / "run").rename(made)  # whole, or not there
    return Path(shutil.copytree(made, directory, dirs_exist_ok=True))


def run_in(directory: Path) -> Run:
    return Run.of(read_run(directory))


def _make_run(directory: Path, run: FakeRun) -> None:
    directory.mkdir()
    experiment = _experiment(run)
    experiment = toml_with_checksum(experiment) if run.checksums else f"{experiment}{EDITED}\n"
    (directory / "experiment.toml").write_text(experiment)
    (directory / "environment.json").write_text(json.dumps(run.environment))
    for number in range(1, run.trials + 1):
        folder = directory / f"trial-{number:02}"
        folder.mkdir()
        _write_trial(folder, run, number)
    if run.checksums:
        for path in directory.rglob("*.json"):
            write_document(path, json.loads(path.read_text()))


def _experiment(run: FakeRun) -> str:
    arms = [
        {"name": arm.name, "control": not position, "weight": arm.weight}
        | {part: dict(settings) for part, settings in arm.config.items() if isinstance(settings, Mapping)}
        for position, arm in enumerate(run.arms)
    ]
    table = {"name": run.name, "seed": run.seed, "compare_models": run.compare_models, "arms": arms}
    table["traffic"] = {"design": run.design, "timeout_s": 60, "ignore_eos": run.ignore_eos}
    table["model"] = {"task": run.task} if run.task != "generate" else {}
    table |= {"trials": {"count": run.trials}, "gates": dict(run.gates), "slo": dict(run.slo)}
    return tomli_w.dumps({**table, "parity": dict(run.parity)})


def correlated(rng: np.random.Generator, count: int, spread: float, rho: float) -> np.ndarray[Any, Any]:
    """Return a series with standard deviation `spread` whose neighbours correlate by `rho`."""
    series = np.zeros(count)
    level = rng.standard_normal()
    for index in range(count):
        level = rho * level + np.sqrt(1.0 - rho**2) * rng.standard_normal()
        series[index] = spread * level
    return series


def _write_trial(folder: Path, run: FakeRun, number: int) -> None:
    rng = np.random.default_rng([run.seed, number])
    start = start_of(number, day=run.day)
    count = int(run.rate * run.duration_s)
    offsets = np.sort(rng.uniform(0.0, run.duration_s, count))
    blocks = int(run.duration_s // BLOCK_S) + 1
    shared = correlated(rng, blocks, run.drift, 0.6)
    own = {arm.name: correlated(rng, blocks, run.own_drift, run.own_rho) for arm in run.arms}
    tokens = np.clip(rng.lognormal(3.0, 0.5, count), 2, 200).astype(int)
    shape = rng.standard_normal(count)
    weights = np.array([arm.weight for arm in run.arms])
    levels = run.day_ratio * np.exp(run.start_spread * np.random.default_rng([run.seed, number, 1]).standard_normal(9))
    chosen = rng.choice(len(run.arms), size=count, p=weights / weights.sum())
    if run.design == "switchback":
        chosen = (offsets // BLOCK_S).astype(int) % len(run.arms)
    with RecordWriter(folder / "requests-0.arrow", REQUESTS) as writer:
        for position, arm in enumerate(run.arms):
            noise = 0.05 * rng.standard_normal(count)
            failing = rng.uniform(size=count) < arm.error_share
            block = (offsets // BLOCK_S).astype(int)
            drift = 0.3 * shape + noise + shared[block] + own[arm.name][block]
            scale = levels[position % 9] * arm.ratio * np.exp(drift)
            if position == 0:
                scale = np.where(_during(offsets, run.arms[1:]), scale * run.interference, scale)
            mine = np.flatnonzero((run.design == "mirrored") | (chosen == position))
            table = _requests(run, arm, number, mine, start, offsets[mine], scale[mine], tokens[mine], failing[mine])
            writer.append_batch(table.combine_chunks().to_batches()[0])
    if run.telemetry:
        _write_telemetry(folder, run, number, start, offsets)
    trial = _facts(run, number, start, count)
    if run.machines is not None:
        names, noise = [arm.name for arm in run.arms], np.random.default_rng([run.seed, number, 1])
        trial |= run.machines.facts(names, number, noise)
        run.machines.write(folder, names, number, start, run.duration_s, noise)
    (folder / "trial.json").write_text(json.dumps(trial))
    lag = {"p50": 0.2, "p99": run.lag_ms, "max": 3.0}
    generator = {"worker": 0, "planned": count, "lag_ms": lag, "complete": True, "start_ns": start}
    (folder / "generator-0.json").write_text(json.dumps(generator))


def _facts(run: FakeRun, number: int, start: int, count: int) -> dict[str, Any]:
    trial: dict[str, Any] = {
        **{"trial": number, "design": run.design},
        "arms": [
            {"name": arm.name, "replicas": [f"{arm.name}-0"], "config": _config(arm) | dict(arm.config)}
            for arm in run.arms
        ],
        **{"start_ns": start, "duration_s": run.duration_s},
        "block_s": BLOCK_S,
        **{"open_loop": run.open_loop, "max_concurrency": None, "complete": run.complete, "deaths": []},
        "startup": {arm.name: _startup(arm) for arm in run.arms},
        "planned": {arm.name: count for arm in run.arms} if run.design == "mirrored" else {"*": count},
    }
    return trial


def _startup(arm: FakeArm) -> dict[str, Any]:
    if not arm.warmed:
        return {"items_ns": {"load": SECOND, "warmup 1x16": 2 * SECOND}}
    seconds = {"process": 1.27, "import": 2.85, "load": 0.9, **arm.warmed, "other": 0.04}
    return {
        "items_ns": {item: int(spent_s * SECOND) for item, spent_s in seconds.items()},
        "memory_bytes": {"weights": 6_815_744, "kv_cache": 3_932_160, "process_peak": 604_110_848},
    }


def _config(arm: FakeArm) -> dict[str, Any]:
    model = {"id": "random:tiny", "dtype": "float32"}
    tables = {"model": model, "engine": {"slots": 8}, "compile": {"enabled": arm.enabled}}
    return {"name": arm.name, "preset": arm.name, **tables}


def _requests(
    run: FakeRun,
    arm: FakeArm,
    trial: int,
    index: Ints,
    start: int,
    due_s: Floats,
    scale: Floats,
    tokens: Ints,
    failing: Any,
) -> pa.Table:
    """Return the arm's requests by their number in the trial; all of shape (n,)."""
    waits = np.arange(1, len(index) + 1) / arm.holds_rps
    begun = np.maximum(np.maximum.accumulate(due_s - waits), 0.0) + waits
    first, end = begun + 0.05 * scale, begun + 0.05 * scale + 0.01 * arm.decode * scale * (tokens - 1)
    stall = np.zeros(len(index))
    for compiling in arm.compiles:
        until = compiling.at_s + compiling.seconds
        waited = (due_s < until) & (end > compiling.at_s)
        held = np.where(waited, until - np.maximum(compiling.at_s, due_s), 0.0)
        first = first + np.where(first > compiling.at_s, held, 0.0)
        end, stall = end + held, stall + held
    due_ns, first_ns, end_ns = (start + (at_s * SECOND).astype(np.int64) for at_s in (due_s, first, end))
    gaps = np.repeat((end_ns - first_ns) / (tokens - 1), tokens)
    ends = np.cumsum(tokens)
    times = (np.arange(ends[-1]) - np.repeat(ends - tokens, tokens)) * gaps + np.repeat(first_ns - due_ns, tokens)
    times[ends - 1] = end_ns - due_ns
    lists = pa.ListArray.from_arrays(
        pa.array(np.append(0, ends), pa.int32()), pa.array(times.astype(np.int64)), mask=pa.array(failing)
    )
    names = [f"{trial}-{number}" for number in index.tolist()]
    split, embeds = run.design != "mirrored", run.task == "embed"
    return request_table(
        due_ns + SENT_NS,
        request_id=names if split else [f"{name}-{arm.name}" for name in names],
        pair_id=None if split else names,
        session_id=[f"s{number}" for number in index.tolist()],
        **{"trial": trial, "arm": arm.name, "replica": f"{arm.name}-0", "phase": "measure", "prompt_tokens": 64},
        status=[arm.error_status if fails else "OK" for fails in failing],
        error=["made up" if fails else None for fails in failing],
        scheduled_ns=due_ns,
        first_token_ns=None if embeds else pa.array(first_ns + SENT_NS, mask=failing),
        token_ns=None if embeds else lists,
        end_ns=end_ns + SENT_NS,
        max_tokens=None if embeds else (tokens if run.ignore_eos else 200),
        output_tokens=None if embeds else tokens,
        compile_stall_ns=(stall * SECOND).astype(np.int64) if run.server_columns else None,
    )


def _during(offsets: Floats, arms: Sequence[FakeArm]) -> Any:
    """Return whether an arm compiles at each offset."""
    spans = [(item.at_s, item.at_s + item.seconds) for arm in arms for item in arm.compiles]
    return np.any([(offsets >= begin) & (offsets < end) for begin, end in spans], axis=0) if spans else False


def _trigger(run: FakeRun, arm: FakeArm, trial: int, compiling: Compile, offsets: np.ndarray[Any, Any]) -> list[str]:
    """Return the first request of the compile, which is one of every arm under a mirrored design."""
    index = int(np.searchsorted(offsets, compiling.at_s))
    found = run.design == "mirrored" and index < len(offsets) and offsets[index] < compiling.at_s + compiling.seconds
    return [f"{trial}-{index}-{arm.name}"] if found else []


def _write_telemetry(folder: Path, run: FakeRun, trial: int, start: int, offsets: np.ndarray[Any, Any]) -> None:
    with (
        RecordWriter(folder / "compile_events.arrow", COMPILE_EVENTS) as events,
        RecordWriter(folder / "steps.arrow", STEPS) as steps,
    ):
        kinds = ("encode",) if run.task == "embed" else ("decode", "prefill")  # of steps, in turn
        for arm in run.arms:
            common = {"trial": trial, "arm": arm.name, "replica": f"{arm.name}-0"}
            at = start - 9 * SECOND
            for place, (shape, seconds) in enumerate((arm.warmed or {"1x16": 5.0}).items()):
                if arm.enabled:
                    name = f"{arm.name}-warm" + (f"-{place}" if place else "")
                    warm = {"event_id": name, "kind": "compile", "phase": "warmup", "shape": shape}
                    warm |= {"cache": "miss", "backend_ns": int(0.86 * seconds * SECOND)} if arm.warmed else {}
                    events.append({**common, **warm, "start_ns": at, "end_ns": at + int(seconds * SECOND)})
                at -= int(seconds * SECOND)
            for number, compiling in enumerate(arm.compiles):
                begin, end = (
                    start + int(at_s * SECOND) for at_s in (compiling.at_s, compiling.at_s + compiling.seconds)
                )
                what = {"event_id": f"{arm.name}-{trial}-{number}", "kind": compiling.kind, "phase": "serving"}
                what |= {"reason": compiling.reason, "shape": compiling.shape or f"1x{17 + number}"}
                hit = _trigger(run, arm, trial, compiling, offsets)
                events.append({**common, **what, "start_ns": begin, "end_ns": end, "request_ids": hit})
            for number in range(20):
                at = start + (number + 1) * SECOND
                tokens = {"tokens": 30, "padded_tokens": round(30 * arm.padding)}
                kind = {"step_id": number, "kind": kinds[number % len(kinds)]}
                kind |= {"compiled": arm.enabled and number >= arm.eager_steps, "batch": 3, "padded_batch": 4}
                steps.append({**common, **tokens, **kind, "start_ns": at, "end_ns": at + 10_000_000})


def gate(kind: str = "noninferiority", verdict: str = "PASS", arm: str = "compiled", **more: Any) -> Gate:
    known = {"gate": kind, "value": 1.0, "limit": 1.1, "unit": "ratio", "reason": "It is so."}
    return Gate(arm=arm, kind=kind, verdict=verdict, **known | more)


def check(ok: bool = False, opens: tuple[str, ...] = ESTIMATES, name: str = "load generator", **more: Any) -> Check:
    rule = next(rule for rule in RULES if rule.name == name)
    faults = [] if ok else ["The generator was late"]
    return rule.found(faults, **{"reason": "The generator was late.", "remedy": "", "opens": opens, **more})


def comparison(**more: Any) -> Comparison:
    """A comparison of the p99 of E2E latency in one trial."""
    known = {
        **{"arm": "compiled", "control": "eager", "metric": "e2e", "quantile": 0.99, "margin": 0.1, "alpha": 0.05},
        **{"ratio": 1.0, "blocks": 20, "groups": 8, "trials": 1, "requests": 1000},
    }
    return Comparison(**known | more)


def share(missed: int, requests: int, verdict: str = "INCONCLUSIVE", **more: Any) -> ShareResult:
    known = {"allowed": 0.01, "low": 0.004, "high": 0.07, "design_effect": 1.0}
    return ShareResult(missed=missed, requests=requests, verdict=verdict, **known | more)
