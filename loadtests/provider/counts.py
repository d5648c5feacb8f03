"""How many requests of each arm ended, and failed, in each second of the last hour."""

from __future__ import annotations

from collections import defaultdict

import pyarrow as pa
import pyarrow.compute as pc

from loadtests.provider.question import LONGEST_WINDOW_S

COLUMNS = ("arm", "status", "end_ns")
_SECOND = 1_000_000_000
_KEPT_S = int(LONGEST_WINDOW_S)


class Counts:
    """Grows by batches of the requests table. What was cancelled ended by its client's will, or with the run: it counts
    as neither."""

    def __init__(self) -> None:
        self._ended: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        self._failed: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        self._ever: dict[str, int] = defaultdict(int)

    def add(self, batch: pa.RecordBatch) -> None:
        """The requests of the batch count."""
        if not set(COLUMNS) <= set(batch.schema.names):
            return
        status = pc.fill_null(batch.column("status"), "")
        rows = pa.table(
            {
                "arm": pc.fill_null(batch.column("arm"), ""),
                "second": pc.divide(pc.fill_null(batch.column("end_ns"), 0), _SECOND),
                "failed": pc.not_equal(status, "OK"),
            }
        )
        kept = pc.and_(pc.is_valid(batch.column("end_ns")), pc.not_equal(status, "CANCELLED"))
        for row in rows.filter(kept).group_by(["arm", "second", "failed"]).aggregate([([], "count_all")]).to_pylist():
            arm, second, count = row["arm"], row["second"], row["count_all"]
            self._ever[arm] += count
            self._ended[arm][second] += count
            if row["failed"]:
                self._failed[arm][second] += count

    def forget(self, now_ns: int) -> None:
        """Seconds before the longest window are gone; the sum of all stays."""
        oldest = now_ns // _SECOND - _KEPT_S
        for table in (*self._ended.values(), *self._failed.values()):
            for second in [second for second in table if second < oldest]:
                del table[second]

    def ever(self, arm: str) -> int:
        """Requests of `arm` that ended since the run began."""
        return self._ever.get(arm, 0)

    def since(self, arm: str, at_ns: int) -> tuple[int, int]:
        """(ended, failed) of `arm` in whole seconds from the one of `at_ns` on."""
        first = at_ns // _SECOND
        tables = (self._ended.get(arm, {}), self._failed.get(arm, {}))
        ended, failed = (sum(count for second, count in table.items() if second >= first) for table in tables)
        return ended, failed
