"""What servers of somebody else say of their load during the traffic: requests, cache, preemptions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from analysis.arrays import Floats, Ints
from analysis.run.run import Run

GAUGES = ("running", "waiting", "cache_pct")
_NEAR_NS = 2_000_000_000  # of a sample that says how it was just before a stretch, or just after


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSamples:
    """The samples of one page in one trial, in order of time; NaN for what it does not say."""

    trial: int
    arm: str
    replica: str | None  # None where the page speaks for all of the arm's
    at_ns: Ints
    running: Floats
    waiting: Floats
    cache_pct: Floats
    preemptions: Floats  # since the sample before; a server that started again has had none

    def between(self, start_ns: int, end_ns: int) -> slice:
        """The samples from just before the stretch until just after it."""
        inside = slice(*np.searchsorted(self.at_ns, (start_ns, end_ns + 1)).tolist())
        first, last = inside.start, inside.stop
        if first and start_ns - self.at_ns[first - 1] <= _NEAR_NS:
            first -= 1
        if last < len(self.at_ns) and self.at_ns[last] - end_ns <= _NEAR_NS:
            last += 1
        return slice(first, last)


@dataclass(frozen=True, slots=True, kw_only=True)
class Meanwhile:
    """The most that an arm had of each in a stretch, and how many preemptions; None for what no page says."""

    running: float | None
    waiting: float | None
    cache_pct: float | None
    preemptions: float | None


def load_samples(run: Run) -> tuple[LoadSamples, ...]:
    """The samples during each trial's traffic, in order of trial, arm and replica; empty where no page was read."""
    table = run.records.server_load
    if table is None:
        return ()
    table = table.filter(pc.and_(pc.is_valid(table["arm"]), pc.is_valid(table["at_ns"]))).sort_by("at_ns")
    samples = []
    for trial in run.trials:
        at_ns = table["at_ns"].to_numpy()
        during = pa.array((at_ns > trial.start_ns) & (at_ns <= trial.end_ns))
        own = table.filter(pc.and_(pc.equal(pc.fill_null(table["trial"], trial.number), trial.number), during))
        replicas = pc.fill_null(own["replica"], "")
        for arm, replica in sorted(set(zip(own["arm"].to_pylist(), replicas.to_pylist(), strict=True))):
            rows = own.filter(pc.and_(pc.equal(own["arm"], arm), pc.equal(replicas, replica)))
            columns = {name: _floats(rows, name) for name in (*GAUGES, "preemptions")}
            # A counter that fell began anew, and what is not known twice has not risen as far as anybody knows.
            columns["preemptions"] = np.maximum(0.0, np.diff(columns["preemptions"], prepend=np.nan))
            at = np.asarray(rows["at_ns"].to_numpy(), dtype=np.int64)
            samples.append(LoadSamples(trial=trial.number, arm=arm, replica=replica or None, at_ns=at, **columns))
    return tuple(samples)


def meanwhile(samples: Sequence[LoadSamples], *, arm: str, trial: int, start_ns: int, end_ns: int) -> Meanwhile | None:
    """What the arm's pages say of the stretch; None where they say nothing. Replicas add up, but for their caches."""
    own = [(item, item.between(start_ns, end_ns)) for item in samples if (item.arm, item.trial) == (arm, trial)]
    own = [(item, part) for item, part in own if part.stop > part.start]
    if not own:
        return None

    def most(name: str) -> list[float]:
        known = [getattr(item, name)[part] for item, part in own]
        return [float(np.nanmax(values)) for values in known if np.isfinite(values).any()]

    rises = [item.preemptions[part.start + 1 : part.stop] for item, part in own]  # the first is of before
    known = [float(np.nansum(values)) for values in rises if np.isfinite(values).any()]
    running, waiting, cache = most("running"), most("waiting"), most("cache_pct")
    return Meanwhile(
        running=sum(running) if running else None,
        waiting=sum(waiting) if waiting else None,
        cache_pct=max(cache) if cache else None,
        preemptions=sum(known) if known else None,
    )


def _floats(rows: pa.Table, name: str) -> Floats:
    return np.asarray(rows[name].cast(pa.float64()).to_numpy(), dtype=np.float64)
