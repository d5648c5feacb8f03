"""What external servers report of their load during the traffic: requests, cache, preemptions."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from operator import or_

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from analysis.arrays import Floats
from analysis.wording import counted, digits

_NEAR_NS = 1_000_000_000  # pages are read about once a second


def server_load(table: pa.Table | None, arm: str, spans: Iterable[tuple[int, int, int]]) -> str:
    """The most of each that the arm's pages say: "8 running, 31 waiting, cache 99.5 %, 3 preemptions".

    `table` has the schema SERVER_LOAD. `spans` are (trial, start, end) in ns; a second to either side counts. Replicas
    add up, but for their caches. Empty where the pages say nothing.
    """
    if table is None:
        return ""
    at, of_trial = pc.field("at_ns"), pc.field("trial")
    near = [
        (of_trial.is_null() | (of_trial == trial)) & (at >= start - _NEAR_NS) & (at <= end + _NEAR_NS)
        for trial, start, end in spans
    ]
    own = table.filter((pc.field("arm") == arm) & reduce(or_, near)).sort_by("at_ns")
    replicas = pc.fill_null(own["replica"], "")
    pages = [own.filter(pc.equal(replicas, name)) for name in pc.unique(replicas)]
    most = {
        name: [float(known.max()) for page in pages if (known := _known(page, name)).size]
        for name in ("running", "waiting", "cache_pct")
    }
    parts = [f"{digits(sum(most[name]))} {name}" for name in ("running", "waiting") if most[name]]
    parts += [f"cache {digits(max(most['cache_pct']))} %"] if most["cache_pct"] else []
    counters = [known for page in pages if (known := _known(page, "preemptions")).size > 1]
    # A counter that fell began anew.
    rises = sum(float(np.maximum(np.diff(values), 0.0).sum()) for values in counters)
    return ", ".join([*parts, *([counted(rises, "preemption", digits)] if counters else [])])


def _known(page: pa.Table, name: str) -> Floats:
    values = np.asarray(page[name].cast(pa.float64()).to_numpy(), dtype=np.float64)
    return values[np.isfinite(values)]
