"""One clock for every process of a run: integer nanoseconds since the epoch that never step back.

The wall clock is read once, and the monotonic clock, which processes of a host share, carries on from there.
"""

from __future__ import annotations

import os
import time

ANCHOR_VARIABLE = "TAILGATE_CLOCK_ANCHOR_NS"


def _read_anchor() -> int:
    given = os.environ.get(ANCHOR_VARIABLE)
    return int(given) if given else time.time_ns() - time.monotonic_ns()


ANCHOR_NS = _read_anchor()


def now_ns() -> int:
    """Return nanoseconds since the epoch, monotonic here and equal across processes that share the anchor."""
    return ANCHOR_NS + time.monotonic_ns()


def anchored_environment() -> dict[str, str]:
    """Return the environment entry that makes a child process share this process's clock."""
    return {ANCHOR_VARIABLE: str(ANCHOR_NS)}
