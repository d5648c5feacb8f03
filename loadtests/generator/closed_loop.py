"""A load that waits for its answers: so many requests always under way to each arm, the next when one has ended.

It imitates users who wait, and serves to find the throughput at a given concurrency. A server that stalls stops it, so
its latencies hide the tail; records of it are marked as closed loop and no verdict on tails is made of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import gevent
import numpy as np
from gevent.event import Event

from loadtests.traffic.schedule import EVERY_ARM, PlannedRequest, Schedule, planned_requests
from servers.clock import now_ns

_AFTER_FAILURE_S = 0.1  # an arm that refuses at once must not fill the disk with refusals
_ROWS_AT_ONCE = 128

# (planned request, pair id, when its call has ended) -> starts it at the given time
Start = Callable[[int], None]
Prepare = Callable[[PlannedRequest, str, Callable[[bool], None]], Start]


class ClosedLoop:
    """Keeps `slots` requests under way to each arm from `start_ns` to `end_ns`, or until each arm had every row once.

    `once` sends the rows of the schedule to each arm one time; otherwise they come round again. Between an answer and
    the next request lies an exponential pause of `pause_s` on average.
    """

    def __init__(
        self,
        schedule: Schedule,
        *,
        arms: Sequence[str],
        slots: int,
        once: bool,
        pause_s: float,
        rampup_s: float,
        trial: int,
        seed: int,
        worker: int,
        prepare: Prepare,
    ) -> None:
        self._schedule = schedule
        self._slots = slots
        self._once = once
        self._pause_s = pause_s
        self._rampup_s = rampup_s
        self._trial = trial
        self._seed = (seed, trial, worker)
        self._prepare = prepare
        self._greenlets: list[gevent.Greenlet[..., None]] = []
        everywhere = EVERY_ARM in schedule.table["arm"].to_pylist()
        self._arms: tuple[str | None, ...] = tuple(arms) if everywhere else (None,)

    def run(self, start_ns: int, end_ns: int) -> None:
        """Every slot has sent its last request and has its answer. An error in one ends all and is raised."""
        try:
            for arm in self._arms:
                rows = self._rows(arm)
                for number in range(self._slots):
                    self._greenlets.append(gevent.spawn(self._slot, rows, number, start_ns, end_ns))
            gevent.joinall(self._greenlets, raise_error=True)
        finally:
            gevent.killall(self._greenlets, block=False)

    def _rows(self, arm: str | None) -> Iterator[tuple[PlannedRequest, str]]:
        turn = 0
        while True:
            mark = f".{turn}" if turn else ""
            for plan in planned_requests(self._schedule.table, at_once=_ROWS_AT_ONCE):
                yield plan._replace(arm=arm), f"{self._trial}-{plan.index}{mark}"
            turn += 1
            if self._once or not len(self._schedule):
                return

    def _slot(self, rows: Iterator[tuple[PlannedRequest, str]], number: int, start_ns: int, end_ns: int) -> None:
        # Arms get the same pauses: only their answers differ.
        rng = np.random.default_rng(np.random.SeedSequence(self._seed, spawn_key=(number,)))
        ended = Event()
        good = [True]

        def on_done(ok: bool) -> None:
            good[0] = ok
            ended.set()

        def prepared() -> Start | None:
            row = next(rows, None)
            if row is None:
                return None
            plan, pair_id = row
            rampup = now_ns() < start_ns + int(self._rampup_s * 1e9)
            return self._prepare(plan._replace(phase="rampup" if rampup else "measure"), pair_id, on_done)

        following = prepared()
        gevent.sleep(max(0.0, (start_ns - now_ns()) / 1e9))
        while following is not None and now_ns() < end_ns:
            ended.clear()
            following(now_ns())
            following = prepared()  # encoded while the answer is awaited
            ended.wait()
            pause_s = float(rng.standard_exponential()) * self._pause_s if self._pause_s else 0.0
            if pause_s or not good[0]:
                gevent.sleep(max(pause_s, 0.0 if good[0] else _AFTER_FAILURE_S))
