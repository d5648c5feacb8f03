"""Requests of a schedule, encoded a few seconds ahead, so that no prompt is built at the moment it is due."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gevent
from gevent.event import Event
from gevent.queue import Queue

from tailgate.loadtests.clients.route import Endpoint, Route
from tailgate.loadtests.traffic.schedule import PlannedRequest, Schedule, planned_requests

_AHEAD_NS = 5_000_000_000
_LOOK_EVERY_S = 0.05  # whether the next request is due soon enough to be encoded
_ROWS_AT_ONCE = 32  # some 0.3 ms
_IN_A_ROW = 16  # requests encoded before others take their turn: some 0.3 ms
# Not 0: the hub would run greenlets that are ready, for up to 5 ms, before it looks at any socket or timer.
TURN_S = 0.000_001


@dataclass(slots=True, eq=False)
class RequestCopy:
    """One request as it goes to one arm."""

    plan: PlannedRequest
    pair_id: str
    request_id: str
    arm: str | None  # pinned, or None
    route: Route
    body: bytes
    headers: bytes
    endpoint: Endpoint | None = None  # that it went to
    scheduled_ns: int = 0


Prepared = tuple[RequestCopy, ...]


class Preparer:
    """Encodes the requests of a schedule with `prepare`. Iterating `ready` gives (offset in ns from the start, the
    copies) in order of time; the first seconds are there once `filled` is set. `on_failure` is called with the line to
    show."""

    def __init__(
        self,
        schedule: Schedule,
        *,
        prepare: Callable[[PlannedRequest], Prepared],
        on_failure: Callable[[str], None],
    ) -> None:
        self._prepare = prepare
        self._on_failure = on_failure
        self.ready: Queue[Any] = Queue()
        self.filled = Event()
        self.greenlet = gevent.spawn(self._run, schedule)

    def _run(self, schedule: Schedule) -> None:
        try:
            for count, plan in enumerate(planned_requests(schedule.table, at_once=_ROWS_AT_ONCE), start=1):
                while self.ready.qsize() and plan.offset_ns - self.ready.peek_nowait()[0] > _AHEAD_NS:
                    self.filled.set()
                    gevent.sleep(_LOOK_EVERY_S)
                self.ready.put((plan.offset_ns, self._prepare(plan)))
                if count % _IN_A_ROW == 0:
                    gevent.sleep(TURN_S)
        except Exception as error:  # of any kind: the dispatcher must not wait without end
            self._on_failure(f"the schedule cannot be encoded: {error}")
        self.ready.put(StopIteration)  # at which iteration ends
        self.filled.set()
