"""A load that waits for its answers: a fixed number of requests to each arm, and the next when one has ended.

It imitates users who wait, and serves to find the throughput at a given concurrency. A server that stalls stops it, so
its latencies hide the tail; records of it are marked as closed loop and no verdict on tails is made of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count

import gevent
import numpy as np
from gevent.event import AsyncResult

from loadtests.generator.request_copy import Prepared
from loadtests.generator.trial_config import TrialConfig
from loadtests.traffic.schedule import EVERY_ARM, PlannedRequest, Schedule, planned_requests
from servers.clock import now_ns

_AFTER_FAILURE_S = 0.1  # an arm that refuses at once must not fill the disk with refusals
_ROWS_AT_ONCE = 128


class ClosedLoop:
    """Keeps this worker's share of `concurrency` requests under way to each arm, for `duration_s`.

    With `num_prompts` each arm gets the rows of the schedule once and that is the end; otherwise they come round again.
    Between an answer and the next request lies an exponential pause of `pause_s` on average. `prepare` encodes a
    planned request with its pair id, and `launch` starts it.
    """

    def __init__(
        self,
        schedule: Schedule,
        config: TrialConfig,
        *,
        workers: int,
        prepare: Callable[[PlannedRequest, str], Prepared],
        launch: Callable[[Prepared, int], None],
    ) -> None:
        self._schedule = schedule
        self._config = config
        # Shares are by index, so that the first row tells which one this is.
        worker = int(schedule.ints("index")[0]) % workers if len(schedule) else 0
        self._slots = config.concurrency // workers + (worker < config.concurrency % workers)
        self._seed = (config.seed, config.trial, worker)
        self._prepare, self._launch = prepare, launch
        self.end_ns = 0  # no request starts at it or later; may be set before `run`
        self._greenlets: list[gevent.Greenlet[..., None]] = []
        everywhere = EVERY_ARM in schedule.table["arm"].to_pylist()
        self._arms: tuple[str | None, ...] = config.arms if everywhere else (None,)

    def run(self, start_ns: int) -> None:
        """Every slot has sent its last request and has its answer. An error in one ends all and is raised."""
        ends_ns = start_ns + int(self._config.duration_s * 1e9)
        self.end_ns = min(self.end_ns or ends_ns, ends_ns)
        try:
            for arm in self._arms:
                rows = self._rows(arm)
                for number in range(self._slots):
                    self._greenlets.append(gevent.spawn(self._slot, rows, number, start_ns))
            gevent.joinall(self._greenlets, raise_error=True)
        finally:
            gevent.killall(self._greenlets, block=False)

    def _rows(self, arm: str | None) -> Iterator[tuple[PlannedRequest, str]]:
        for turn in count():
            mark = f".{turn}" if turn else ""
            for plan in planned_requests(self._schedule.table, at_once=_ROWS_AT_ONCE):
                yield plan._replace(arm=arm), f"{self._config.trial}-{plan.index}{mark}"
            if self._config.num_prompts or not len(self._schedule):
                return

    def _slot(self, rows: Iterator[tuple[PlannedRequest, str]], number: int, start_ns: int) -> None:
        # Arms get the same pauses: only their answers differ.
        rng = np.random.default_rng(np.random.SeedSequence(self._seed, spawn_key=(number,)))

        def following() -> tuple[Prepared, AsyncResult] | None:
            row = next(rows, None)
            if row is None:
                return None
            plan, pair_id = row
            phase = "rampup" if now_ns() < start_ns + int(self._config.rampup_s * 1e9) else "measure"
            prepared, ended = self._prepare(plan._replace(phase=phase), pair_id), AsyncResult()
            for copy in prepared:
                copy.on_done = ended.set
            return prepared, ended

        pending = following()
        gevent.sleep(max(0.0, (start_ns - now_ns()) / 1e9))
        while pending is not None and now_ns() < self.end_ns:
            prepared, ended = pending
            self._launch(prepared, now_ns())
            pending = following()  # encoded while the answer is awaited
            well = ended.get()
            pause_s = float(rng.standard_exponential()) * self._config.pause_s
            if pause_s or not well:
                gevent.sleep(max(pause_s, 0.0 if well else _AFTER_FAILURE_S))
