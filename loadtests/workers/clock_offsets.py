"""How a load worker's clock compares with the master's, from messages that go there and back.

A message leaves at t1 on the worker's clock, reaches the master at t2, is answered at t3, and the answer is back at t4.
The clocks then differ by ((t2 - t1) + (t3 - t4)) / 2, wrong by at most half of the time that both ways took together,
however that time was split between them (D. L. Mills, RFC 5905, section 8). The exchange that took least is the one to
trust; as clocks drift apart, it is trusted less the older it gets.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

from servers.clock import ANCHOR_NS

# Quartz in servers is off by some 20 parts per million and moves with temperature; NTP corrects at up to 500.
DRIFT_PPM = 50
_KEPT = 64


class Exchange(NamedTuple):
    """One message there and back: the worker's clock at both ends, the master's in the middle."""

    sent_ns: int
    received_ns: int
    answered_ns: int
    back_ns: int

    @property
    def offset_ns(self) -> int:
        """What to add to the worker's clock to get the master's."""
        return ((self.received_ns - self.sent_ns) + (self.answered_ns - self.back_ns)) // 2

    @property
    def travel_ns(self) -> int:
        """How long both ways took together."""
        return max(0, (self.back_ns - self.sent_ns) - (self.answered_ns - self.received_ns))

    def uncertainty_ns(self, at_ns: int) -> int:
        """How far `offset_ns` may be off at `at_ns` on the worker's clock."""
        return self.travel_ns // 2 + abs(at_ns - self.back_ns) * DRIFT_PPM // 1_000_000


class ClockComparison:
    """The master's clock as seen from a worker, from the best of its newest exchanges."""

    def __init__(self) -> None:
        self._exchanges: deque[Exchange] = deque(maxlen=_KEPT)
        self._best: Exchange | None = None
        self._same = False
        self.count = 0
        self.worst_ns = 0  # the largest uncertainty that any record was mapped with

    def same(self) -> None:
        """Both are one clock: no exchange is needed and nothing is uncertain."""
        self._same = True

    def add(self, exchange: Exchange) -> None:
        """One more exchange is known. One in which time went back is not believed."""
        if exchange.back_ns < exchange.sent_ns or exchange.answered_ns < exchange.received_ns:
            return
        self._exchanges.append(exchange)
        self.count += 1
        self._best = min(self._exchanges, key=lambda item: item.uncertainty_ns(exchange.back_ns))

    def at(self, ns: int) -> tuple[int, int]:
        """(what to add to this clock at `ns` to get the master's, how far that may be off), in ns."""
        if self._same or self._best is None:
            return 0, 0
        return self._best.offset_ns, self._best.uncertainty_ns(ns)

    def map_at(self, ns: int) -> tuple[int, int]:
        """As `at`, for times that are then recorded: `worst_ns` remembers how uncertain they are."""
        offset, uncertainty = self.at(ns)
        self.worst_ns = max(self.worst_ns, uncertainty)
        return offset, uncertainty

    def summary(self, ns: int) -> dict[str, Any]:
        """For the account: offset, uncertainty now and at worst, the best round trip, how many there were."""
        offset, uncertainty = self.at(ns)
        return {
            "offset_ns": offset,
            "uncertainty_ns": uncertainty,
            "worst_uncertainty_ns": self.worst_ns,
            "round_trip_ns": 0 if self._best is None else self._best.travel_ns,
            "exchanges": self.count,
            "same": self._same,
        }


def host_identity() -> str:
    """One text for all processes of one running kernel, which share a monotonic clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def clock_identity() -> str:
    """One text for all processes whose `servers.clock.now_ns` gives the same time; "" where that cannot be known."""
    host = host_identity()
    return f"{host}/{ANCHOR_NS}" if host else ""
