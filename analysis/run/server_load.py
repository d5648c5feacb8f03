"""What external servers report of their load during the traffic: requests, cache, preemptions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from analysis.arrays import Floats

GAUGES = ("running", "waiting", "cache_pct")
_NEAR_NS = 1_000_000_000  # pages are read about once a second


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLoad:
    """The most that an arm had of each in a stretch, and how many preemptions; None for what no page says."""

    running: float | None
    waiting: float | None
    cache_pct: float | None
    preemptions: float | None


def server_load(table: pa.Table | None, *, arm: str, trial: int, start_ns: int, end_ns: int) -> ServerLoad | None:
    """What the arm's pages say of the stretch, by the samples in it and a second to either side.

    `table` has the schema SERVER_LOAD. Replicas add up, but for their caches. None where the pages say nothing.
    """
    if table is None:
        return None
    at, of_trial = pc.field("at_ns"), pc.field("trial")
    near = (at >= start_ns - _NEAR_NS) & (at <= end_ns + _NEAR_NS)
    own = table.filter((pc.field("arm") == arm) & (of_trial.is_null() | (of_trial == trial)) & near).sort_by("at_ns")
    if not own.num_rows:
        return None
    replicas = pc.fill_null(own["replica"], "")
    pages = [own.filter(pc.equal(replicas, name)) for name in pc.unique(replicas)]

    def most(name: str) -> list[float]:
        known = [_known(page, name) for page in pages]
        return [float(values.max()) for values in known if values.size]

    counters = [_known(page, "preemptions") for page in pages]
    # A counter that fell began anew.
    rises = [float(np.maximum(np.diff(values), 0.0).sum()) for values in counters if values.size > 1]
    running, waiting, cache = (most(name) for name in GAUGES)
    return ServerLoad(
        running=sum(running) if running else None,
        waiting=sum(waiting) if waiting else None,
        cache_pct=max(cache) if cache else None,
        preemptions=sum(rises) if rises else None,
    )


def _known(page: pa.Table, name: str) -> Floats:
    values = np.asarray(page[name].cast(pa.float64()).to_numpy(), dtype=np.float64)
    return values[np.isfinite(values)]
