"""How a load worker's clock compares with the master's, from messages that go there and back.

A message leaves at t1 on the worker's clock, reaches the master at t2, is answered at t3, and the answer is back at t4.
The clocks then differ by ((t2 - t1) + (t3 - t4)) / 2, wrong by at most half of the time that both ways took together,
however that time was split between them (D. L. Mills, RFC 5905, section 8). The exchange that took least is the one to
trust; as clocks drift apart, it is trusted less the older it gets.
"""

from __future__ import annotations

import socket
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

from tailgate.servers.clock import now_ns

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

    def uncertainty_ns(self, at_ns: int) -> int:
        """Return the largest error of `offset_ns` at `at_ns` on the worker's clock."""
        travel_ns = max(0, (self.back_ns - self.sent_ns) - (self.answered_ns - self.received_ns))
        return travel_ns // 2 + abs(at_ns - self.back_ns) * DRIFT_PPM // 1_000_000


class ClockComparison:
    """The master's clock as seen from a worker: `best` is the best of its newest exchanges. Before the first the clocks
    are one."""

    def __init__(self) -> None:
        self._exchanges: deque[Exchange] = deque(maxlen=_KEPT)
        self.best = Exchange(0, 0, 0, 0)
        self.count = 0
        self._worst_ns = 0  # the largest uncertainty that any record was moved with

    def add(self, exchange: Exchange) -> None:
        """Learn from one more exchange, unless time went back in it."""
        if exchange.back_ns < exchange.sent_ns or exchange.answered_ns < exchange.received_ns:
            return
        self._exchanges.append(exchange)
        self.count += 1
        self.best = min(self._exchanges, key=lambda item: item.uncertainty_ns(exchange.back_ns))

    def offset_of_records(self) -> int:
        """Return the offset for records that are written now, and remember how uncertain their times are."""
        self._worst_ns = max(self._worst_ns, self.best.uncertainty_ns(now_ns()))
        return self.best.offset_ns

    def account(self) -> dict[str, Any]:
        """Return what generator-N.json says of the clock: whose it is, its offset and how well that is known."""
        return {
            "host": socket.gethostname(),
            "offset_ns": self.best.offset_ns,
            "uncertainty_ns": self.best.uncertainty_ns(now_ns()),
            "worst_uncertainty_ns": self._worst_ns,
            "exchanges": self.count,
        }


def host_identity() -> str:
    """Return one text for all processes of one running kernel, which share a monotonic clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
