"""The samples of the machine monitor by trial, kind and device or process: columns, and numbers over the traffic."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from analysis.arrays import Bools, Floats, Ints
from analysis.records.plain_values import mapping
from analysis.records.plain_values import seconds as seconds_of
from analysis.records.schemas import RUN_HOST
from analysis.run.trials import SECOND, Trial

_LONGEST_GAP = 3.0  # sampling intervals; what lies between samples farther apart was not sampled


class Samples:
    """The table of samples, by trial, kind and device or process."""

    def __init__(self, table: pa.Table | None) -> None:
        if table is not None:
            known = [pc.is_valid(table.column(name)) for name in ("kind", "name", "at_ns")]
            table = table.filter(pc.and_(pc.and_(known[0], known[1]), known[2])).sort_by("at_ns")
        self._table = table

    def of(self, kind: str, trial: Trial) -> Iterator[Rows]:
        """The samples of each host, device, process or allocator (`kind`) in the trial, in the order of names; none
        without a monitor."""
        if self._table is None:
            return
        chosen = pc.and_(
            pc.equal(self._table.column("kind"), kind),
            pc.equal(pc.fill_null(self._table.column("trial"), trial.number), trial.number),
        )
        table = self._table.filter(chosen)
        hosts = pc.fill_null(table.column("host"), RUN_HOST)
        places = sorted(set(zip(hosts.to_pylist(), table.column("name").to_pylist(), strict=True)))
        for host, name in places:
            own = pc.and_(pc.equal(hosts, host), pc.equal(table.column("name"), name))
            yield Rows(table.filter(own), trial, host, name)


class Rows:
    """The samples of one device, host or process in one trial, in order of time."""

    def __init__(self, table: pa.Table, trial: Trial, host: str, name: str) -> None:
        self._table = table
        self.trial, self.host, self.name = trial.number, host, name
        arms = table.column("arm").drop_null()
        self.arm: str | None = str(arms[0]) if len(arms) else None  # of a replica
        self.at_ns: Ints = table.column("at_ns").to_numpy()
        self.inside: Bools = (self.at_ns > trial.start_ns) & (self.at_ns <= trial.end_ns)
        interval_s = seconds_of(mapping(trial.info.get("monitor")).get("interval_s")) or 1.0
        # A sample stands for the time since the one before it, unless that is too long ago.
        since = np.diff(self.at_ns, prepend=self.at_ns[:1] - int(interval_s * SECOND)) / 1e9
        longest_s = _LONGEST_GAP * max(interval_s, 1e-3)
        self.weight_s: Floats = np.where(since > longest_s, interval_s, since)

    @property
    def seconds(self) -> float:
        """Seconds of the traffic that the samples stand for."""
        return float(self.weight_s[self.inside].sum())

    def whole(self, name: str) -> Floats:
        """The column over all samples, NaN where it is null."""
        return np.asarray(self._table.column(name).cast(pa.float64(), safe=False).to_numpy(), dtype=np.float64)

    def column(self, name: str) -> Floats:
        """The column over the samples during the traffic, NaN where it is null."""
        return self.whole(name)[self.inside]

    def known(self, name: str, start_ns: int, end_ns: int) -> tuple[Ints, Floats]:
        """(at_ns, values) of what was read of the column from `start_ns` to `end_ns`."""
        values = self.whole(name)
        keep: Bools = (self.at_ns >= start_ns) & (self.at_ns <= end_ns) & np.isfinite(values)
        return self.at_ns[keep], values[keep]

    def reported(self, name: str) -> float:
        """The share of the samples during the traffic that have the column."""
        column = self._table.column(name).filter(pa.array(self.inside))
        return 1.0 - float(column.null_count) / max(1, len(column))

    def level(self, name: str, of: Callable[[Floats], np.float64]) -> float | None:
        """The `of` (np.min, np.median, np.max) of the column during the traffic; None where nothing is known of it."""
        values = self.column(name)
        known = values[np.isfinite(values)]
        return float(of(known)) if known.size else None

    def rate(self, name: str) -> float | None:
        """How much a counter rose in a second of the traffic; None where it is not known twice. Where the counter fell,
        since what it counted started again, the interval is left out."""
        values, at_ns = self.column(name), self.at_ns[self.inside]
        known = np.isfinite(values)
        values, at_ns = values[known], at_ns[known]
        rise, took = np.diff(values), np.diff(at_ns) / 1e9
        kept = (rise >= 0) & (took > 0)
        return float(rise[kept].sum() / took[kept].sum()) if kept.any() else None

    def reasons(self) -> list[list[str] | None]:
        """The throttle reasons of each sample during the traffic; None where they are unknown."""
        reasons: list[list[str] | None] = self._table.column("throttle").filter(pa.array(self.inside)).to_pylist()
        return reasons
