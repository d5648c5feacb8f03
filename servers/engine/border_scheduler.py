"""A scheduler whose steps have given numbers of rows: parity's, for what a batch's size may change. No tensors."""

from __future__ import annotations

from collections.abc import Collection

from servers.config import EngineConfig
from servers.engine.scheduler import Scheduler, Step


class BorderScheduler(Scheduler):
    """A scheduler that holds requests back until a decode step of each number of rows in `decodes` has run, and a
    prefill step of each number in `prefills`.

    Decode steps come first, fewest rows first: a row that stays serves the next number too. Then come the prefill steps
    that are left, largest first, each as soon as there is room. A number for which too few requests wait is left out.
    All requests are submitted before the first step. What comes after is as while serving.
    """

    def __init__(self, limits: EngineConfig, *, decodes: Collection[int] = (), prefills: Collection[int] = ()) -> None:
        super().__init__(limits)
        self._decodes = sorted(decodes)
        self._prefills = sorted(prefills)

    def next_step(self, at_ns: int = 0) -> Step | None:
        """As the scheduler's, toward the numbers that are due."""
        step = None
        if self._decodes:
            step = self._next_prefill()
            if step is None:  # so many stand there, or nobody waits
                del self._decodes[0]
                self._decodes_due = 1
        if step is None:
            step = super().next_step(at_ns)
        if step is not None and step.kind == "prefill" and len(step.jobs) in self._prefills:
            self._prefills.remove(len(step.jobs))
        return step

    def _room(self) -> int:
        room = super()._room()
        if self._decodes:
            room = min(room, self._decodes[0] - len(self._active))
            return max((size for size in self._prefills if size <= room), default=room)
        self._prefills = [size for size in self._prefills if size <= len(self._queue)]
        if self._prefills:
            return self._prefills[-1] if room >= self._prefills[-1] else 0
        return room


def enough_requests(decodes: Collection[int], prefills: Collection[int], steps: int) -> int:
    """So many requests let a BorderScheduler run every step that it is asked for, where each is decoded `steps` times
    at least."""
    # who stands in a decode step is new or was so in one of the last `steps`: every so many the rows are counted anew
    standing = sum(sorted(decodes, reverse=True)[::steps]) if decodes else 0
    # the first decode step has begun one request alone
    return standing + sum(size for size in prefills if size > 1 or not decodes)
