"""Locust's statistics in bulk: what `events.request.fire` would add for each request, added for hundreds at once.

At 10,000 requests/s Locust's own listener takes a quarter of a core, because each request is four entries counted one
by one. Without other listeners the sums are made first and added once. The figures are the same.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any, Final

from locust import stats as locust_stats

AT_ONCE: Final = 256
KEPT_S: Final = 60  # Locust shows rates of the last twelve seconds


class LocustCounts:
    """Successful requests on their way to one Locust `Environment`'s statistics: call `flush` each second."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self._waiting: dict[tuple[str, str], tuple[list[float], list[int]]] = {}
        self._count = 0

    @property
    def alone(self) -> bool:
        """Whether Locust itself is the only listener, so that no other misses an event."""
        return len(self._environment.events.request._handlers) == 1

    def add(self, protocol: str, name: str, response_ms: float, length: int) -> None:
        """One more good answer; it counts after the next flush, which comes by itself when many wait."""
        entry = self._waiting.get((name, protocol))
        if entry is None:
            entry = self._waiting[name, protocol] = ([], [])
        entry[0].append(response_ms)
        entry[1].append(length)
        self._count += 1
        if self._count >= AT_ONCE:
            self.flush()

    def flush(self) -> None:
        """Everything added so far counts."""
        waiting, self._waiting, self._count = self._waiting, {}, 0
        stats: Any = self._environment.stats
        at = time.time()
        for key, (times_ms, lengths) in waiting.items():
            buckets = Counter(map(locust_stats.bucket_response_time, times_ms))
            for entry in (stats.total, stats.entries[key]):
                _add(entry, times_ms, sum(lengths), buckets, at)

    def forget(self, at_s: float) -> None:
        """Nothing is kept of the single seconds up to a minute before `at_s`, nor of what Locust notes every five
        seconds for the charts of its own page. Without this a day costs a load process tens of MiB."""
        stats: Any = self._environment.stats
        for entry in (stats.total, *stats.entries.values()):
            for per_second in (entry.num_reqs_per_sec, entry.num_fail_per_sec):
                for second in [second for second in per_second if second < at_s - KEPT_S]:
                    del per_second[second]
        stats.history.clear()


def _add(entry: Any, times_ms: list[float], length: int, buckets: Counter[int], at: float) -> None:
    """As locust.stats.StatsEntry.log does for one."""
    second = int(at)
    if entry.use_response_times_cache and entry.last_request_timestamp and second > int(entry.last_request_timestamp):
        entry._cache_response_times(second - 1)
    entry.num_requests += len(times_ms)
    entry.num_reqs_per_sec[second] += len(times_ms)
    entry.last_request_timestamp = at
    entry.total_response_time += sum(times_ms)
    lowest = min(times_ms)
    entry.min_response_time = lowest if entry.min_response_time is None else min(entry.min_response_time, lowest)
    entry.max_response_time = max(entry.max_response_time, *times_ms)
    for bucket, count in buckets.items():
        entry.response_times[bucket] += count
    entry.total_content_length += length
