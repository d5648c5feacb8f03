"""Sleeping to a moment under gevent, to some tens of microseconds and without turning the processor.

gevent's own timers are as coarse as its poll, a millisecond. The kernel's timers wake it through a file descriptor when
they expire (timerfd of Linux). Where less than a fifth of a millisecond is left, it goes in naps of one turn of the
loop, which keep a core busy.

1,000 moments a second on two shared cores were missed by 60 us in the median, by 390 us with naps alone, by 650 us with
gevent's timers alone. Python 3.13 has `os.timerfd_create`: with it as the oldest version ctypes can go.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from typing import Any

import gevent
from gevent.hub import get_hub

from tailgate.servers.clock import now_ns

_COARSE_NS = 1_500_000
# Setting the kernel's timer takes some ten microseconds. A caller that is due again within less than this loses
# more to the timer than to reading the clock in every turn of the loop.
_WORTH_IT_NS = 200_000
_NAP_S = 0.000_001
_MONOTONIC, _NONBLOCK_CLOEXEC = 1, 0o2004000
_READ = 1


class _ITimerSpec(ctypes.Structure):
    _fields_ = (("every_s", ctypes.c_long), ("every_ns", ctypes.c_long), ("s", ctypes.c_long), ("ns", ctypes.c_long))


LIBC: Any = ctypes.CDLL(None, use_errno=True)
LIBC.timerfd_settime.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


class KernelTimer:
    """One kernel timer that wakes one greenlet of one hub."""

    __slots__ = ("_spec", "_where", "descriptor", "hub", "process", "watcher")

    def __init__(self) -> None:
        self.descriptor = int(LIBC.timerfd_create(_MONOTONIC, _NONBLOCK_CLOEXEC))
        if self.descriptor < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self.hub = get_hub()
        self.process = os.getpid()
        self.watcher = self.hub.loop.io(self.descriptor, _READ)
        self._spec = _ITimerSpec()
        self._where = ctypes.addressof(self._spec)

    def wait(self, left_ns: int) -> None:
        """Sleep for `left_ns` (below a second). This voids what was left of an interrupted wait."""
        self._spec.ns = left_ns
        LIBC.timerfd_settime(self.descriptor, 0, self._where, None)
        self.hub.wait(self.watcher)
        with suppress(BlockingIOError):
            os.read(self.descriptor, 8)


spare_timers: list[KernelTimer] = []


def _timer() -> KernelTimer | None:
    hub = get_hub()
    while spare_timers:
        timer = spare_timers.pop()
        if timer.hub is hub and timer.process == os.getpid():
            return timer
        # of a hub that is gone, or of the process that this one was forked from, which goes on using it
        os.close(timer.descriptor)
    try:
        return KernelTimer()
    except OSError:
        return None  # no descriptor left: naps do


def sleep_until(at_ns: int) -> None:
    """Sleep until `at_ns` on the shared clock, or a little longer."""
    left_ns = at_ns - now_ns()
    while left_ns > _COARSE_NS:
        gevent.sleep((left_ns - 1_000_000) / 1e9)
        left_ns = at_ns - now_ns()
    if left_ns <= 0:
        return
    timer = _timer() if left_ns > _WORTH_IT_NS else None
    try:
        while left_ns > 0:
            if timer is not None:
                timer.wait(left_ns)
            else:
                gevent.sleep(0.000_2 if left_ns > 300_000 else _NAP_S)
            left_ns = at_ns - now_ns()
    finally:
        if timer is not None:
            spare_timers.append(timer)
