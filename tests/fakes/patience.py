"""How long a test waits for what it expects: machines are busy, and a wait that succeeds costs nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PATIENCE_S = 120.0


def wait_for(
    condition: Callable[[], T],
    within_s: float = PATIENCE_S,
    *,
    sleep: Callable[[float], object] = time.sleep,
    every_s: float = 0.02,
    otherwise: Callable[[], object] = str,
) -> T:
    """Return the first answer of `condition` that is true.

    Raise AssertionError after `within_s` seconds, with what `otherwise` then returns. Greenlets run meanwhile where
    `sleep` is theirs.
    """
    end = time.monotonic() + within_s
    while not (answer := condition()):
        assert time.monotonic() < end, f"not within {within_s:g} s: {otherwise()}"
        sleep(every_s)
    return answer
