"""Open-loop dispatch under gevent: planned requests start at their own instants, whatever the answers do.

Three greenlets share the work. The *preparer* encodes requests a few seconds ahead, so that no prompt is built at the
moment it is due. The *dispatcher* only sleeps and starts. The *bookkeeper* turns ended calls into records and feeds
Locust; the client's readers do nothing but stamp times, so slow bookkeeping cannot make a token look late.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import lru_cache, partial

import gevent
from gevent.event import Event

from tailgate.loadtests.clients.call import Call
from tailgate.loadtests.clients.grpc_call import EMBED_PATH, GENERATE_PATH, EmbedCall, GrpcCall
from tailgate.loadtests.clients.inference import InferenceClient
from tailgate.loadtests.clients.route import Endpoint, Route, external_route, own_encoder
from tailgate.loadtests.generator.histogram import Histogram
from tailgate.loadtests.generator.load_log import LoadLog
from tailgate.loadtests.generator.outcome import record_of
from tailgate.loadtests.generator.precise_sleep import sleep_until
from tailgate.loadtests.generator.preparer import TURN_S, Prepared, Preparer, RequestCopy
from tailgate.loadtests.generator.record import RequestRecord
from tailgate.loadtests.generator.trial_config import TrialConfig
from tailgate.loadtests.traffic.prompts import served_text
from tailgate.loadtests.traffic.schedule import EVERY_ARM, PlannedRequest, Schedule
from tailgate.servers.clock import now_ns
from tailgate.servers.complaint import write_failure

_IN_A_ROW = 16  # requests started late or booked before others take their turn: some 0.3 ms
_HEARTBEAT_S = 0.02
_CHECK_EVERY_NS = 250_000_000  # for an end


def _routes(config: TrialConfig) -> dict[str, Route]:
    """Return the route to each arm, or "*" to all others. Arms at one address share its connections."""
    path, call = (EMBED_PATH, EmbedCall) if config.task == "embed" else (GENERATE_PATH, GrpcCall)

    @lru_cache(None)
    def endpoint(address: str) -> Endpoint:
        return Endpoint(InferenceClient(address, security=config.security, path=path, call=call))

    text = served_text(config.tokenizer, vocab_size=config.vocab_size)
    encode = own_encoder(text, vocab_size=config.vocab_size, ignore_eos=config.ignore_eos, task=config.task)
    routes = {arm: Route(encode, list(map(endpoint, target.split(",")))) for arm, target in config.targets.items()}
    for arm, external in config.external.items():
        routes[arm] = external_route(external, traffic=text, ignore_eos=config.ignore_eos)
    return routes


class Generator:
    """Starts requests and accounts for every one of them: each that was started is recorded exactly once."""

    def __init__(
        self,
        config: TrialConfig,
        *,
        log: LoadLog,
        on_record: Callable[[RequestRecord], None] | None = None,
    ) -> None:
        self._config = config
        self._log = log
        self._on_record = on_record
        self._routes = _routes(config)
        endpoints = {endpoint for route in self._routes.values() for endpoint in route.endpoints}
        self._clients = [endpoint.client for endpoint in endpoints]
        self._inflight: set[Call] = set()
        self._ended: deque[Call] = deque()  # not recorded yet
        self._to_book = Event()
        self._idle = Event()
        self._idle.set()
        self._garbage = log.garbage
        self._dispatcher: gevent.Greenlet[..., None] | None = None
        self._preparer: Preparer | None = None
        self._stopped = False
        self._next_ns = 0  # when the next request is due, of those not sent yet
        self._pending_ns = 0
        self._end_ns: int | None = None
        self._ends_ns: dict[str | None, int] = {}
        self._chores = [gevent.spawn(self._record_loop), gevent.spawn(self._tick), gevent.spawn(self._heartbeat)]

    def connect(self) -> None:
        """Try a connection to every gRPC target, so that the first request does not pay for it."""
        clients = [client for client in self._clients if isinstance(client, InferenceClient)]
        gevent.joinall([gevent.spawn(client.connect, 5.0) for client in clients])

    @property
    def failure(self) -> str | None:
        """Why the schedule was not kept, None while it is."""
        return self._log.error

    def prepare(self, plan: PlannedRequest, pair_id: str) -> Prepared:
        """Return `plan` encoded: one copy for each arm when it goes to every arm, otherwise one."""
        arms: tuple[str | None, ...] = (plan.arm,)
        if plan.arm == EVERY_ARM:
            # Copies leave one after the other, tens of microseconds apart: each arm is first equally often.
            first = plan.index % len(self._config.arms)
            arms = self._config.arms[first:] + self._config.arms[:first]
        return tuple([self._copy(plan, pair_id, arm) for arm in arms])

    def _copy(self, plan: PlannedRequest, pair_id: str, arm: str | None) -> RequestCopy:
        route = self._routes[arm] if arm in self._routes else self._routes["*"]
        request_id = pair_id if arm is None else f"{pair_id}-{arm}"
        return RequestCopy(plan, pair_id, request_id, arm, route, *route.encode(plan, request_id, arm))

    def launch(self, prepared: Prepared, scheduled_ns: int) -> None:
        """Send the copies. Never waits. The lag is now minus `scheduled_ns`.

        Nothing happens once the generator was stopped: who launches is ended a turn of the loop later than that.
        """
        if self._stopped:
            return
        self._log.lag.add(now_ns() - scheduled_ns)
        if self._ends_ns:
            prepared = tuple(copy for copy in prepared if scheduled_ns < self._ends_ns.get(copy.arm, scheduled_ns + 1))
        for copy in prepared:
            copy.scheduled_ns = scheduled_ns
            self._log.begun(copy.arm)
            self._idle.clear()
            self._send(copy)

    def load(self, schedule: Schedule) -> None:
        """Encode the first seconds of `schedule`, and go on encoding a few seconds ahead of time."""
        trial = self._config.trial
        self._log.planned = sum(schedule.planned.values())
        self._preparer = Preparer(
            schedule, prepare=lambda plan: self.prepare(plan, f"{trial}-{plan.index}"), on_failure=self._fail
        )
        self._preparer.filled.wait()

    def run(self, start_ns: int) -> None:
        """Start every loaded request at `start_ns` plus its offset, and wait until all have ended, which they do by
        their deadlines. The garbage window is open meanwhile."""
        self.open_window()
        self._log.start_ns = start_ns
        self._dispatcher = gevent.spawn(self._dispatch, start_ns)
        self._dispatcher.get()
        if self._end_ns is not None or self._ends_ns:
            self._log.planned = self._log.started
        self._idle.wait()

    def end_at(self, at_ns: int) -> None:
        """Send nothing that is due at `at_ns` or later; what is under way then goes on to its end."""
        self._end_ns = at_ns

    def end_arm_at(self, arm: str, at_ns: int) -> None:
        """Do the same with the copies that are pinned to one arm; the others go on."""
        self._ends_ns[arm] = at_ns

    def open_window(self) -> None:
        """Turn garbage collection off until `stop`; count the loop lag and the time of the account from here."""
        self._garbage.open()
        self._log.loop_lag = Histogram()
        self._log.start_ns = now_ns()

    def wait_idle(self, timeout_s: float) -> bool:
        """Return whether everything started had ended and was recorded within `timeout_s`."""
        return bool(self._idle.wait(timeout_s))

    def stop(self, error: str = "cut by the end of the run") -> None:
        """Record what is in flight as CANCELLED, and flush all. A second call does nothing."""
        if self._stopped:
            return
        self._stopped = True
        preparing = None if self._preparer is None else self._preparer.greenlet
        for greenlet in (self._dispatcher, preparing, *self._chores):
            if greenlet is not None and greenlet is not gevent.getcurrent():
                greenlet.kill(block=False)
        for call in list(self._inflight):
            call.cancel(error=error)
        self._book(len(self._ended))
        for client in self._clients:
            client.close()
        self._garbage.close()
        self._guarded(self._log.write)

    def _fail(self, failure: str) -> None:
        self._log.error = failure

    def _dispatch(self, start_ns: int) -> None:
        in_a_row = 0
        for offset_ns, prepared in self._preparer.ready if self._preparer else ():
            scheduled_ns = self._next_ns = start_ns + offset_ns
            in_a_row += 1
            if in_a_row >= _IN_A_ROW:
                gevent.sleep(TURN_S)  # behind the schedule, readers still take their turns: tokens are not late too
                in_a_row = 0
            while (early_ns := scheduled_ns - now_ns()) > 0 and not self._is_over(scheduled_ns):
                sleep_until(scheduled_ns - max(0, early_ns - _CHECK_EVERY_NS))
                in_a_row = 0
            if self._is_over(scheduled_ns):
                return
            self.launch(prepared, scheduled_ns)

    def _is_over(self, at_ns: int) -> bool:
        """Return whether a request due at `at_ns` is no longer sent."""
        return self.failure is not None or (self._end_ns is not None and at_ns >= self._end_ns)

    def _send(self, copy: RequestCopy) -> None:
        endpoint = copy.endpoint = copy.route.endpoint()
        endpoint.running += 1
        call = endpoint.client.start(
            copy.body, headers=copy.headers, timeout_s=self._config.timeout_s, on_done=self._on_done, tag=copy
        )
        if not call.status:
            self._inflight.add(call)

    def _on_done(self, call: Call) -> None:
        copy: RequestCopy = call.tag
        self._inflight.discard(call)
        assert copy.endpoint is not None
        copy.endpoint.running -= 1
        if call.status == "UNAVAILABLE":
            copy.endpoint.refused_ns = call.end_ns
        self._ended.append(call)
        self._to_book.set()

    def _record_loop(self) -> None:
        while True:
            self._to_book.wait()
            self._to_book.clear()
            while self._ended:
                self._book(_IN_A_ROW)
                self._garbage.sweep()  # here too: a second's worth at full rate would be one long pause
                gevent.sleep(TURN_S)  # readers and the dispatcher go first

    def _book(self, limit: int) -> None:
        while self._ended and limit > 0:
            limit -= 1
            call = self._ended.popleft()
            record = record_of(call, self._config.trial)
            self._guarded(partial(self._log.ended, record, call.tag.arm))
            if self._on_record is not None:
                self._on_record(record)
        if not self._inflight and not self._ended:
            self._idle.set()

    def _pending(self) -> int:
        """Return the instant before which all that was due has ended and was recorded."""
        sending = self._dispatcher is not None and not self._dispatcher.ready()
        until_ns = min(now_ns(), self._next_ns) if sending else now_ns()
        return min((call.tag.scheduled_ns for call in (*self._inflight, *self._ended)), default=until_ns)

    def _tick(self) -> None:
        while True:
            gevent.sleep(1.0)
            if not self._log.waiting_bytes:
                # What had ended a second ago is on disk by now.
                self._log.settled_ns = self._pending_ns or None
            self._pending_ns = self._pending() if self._log.started else 0
            self._guarded(self._log.refresh)
            self._garbage.sweep()

    def _heartbeat(self) -> None:
        while True:
            due_ns, histogram = now_ns() + int(_HEARTBEAT_S * 1e9), self._log.loop_lag
            gevent.sleep(_HEARTBEAT_S)
            histogram.add(now_ns() - due_ns)

    def _guarded(self, write: Callable[[], None]) -> None:
        """End the trial with one line where the disk is full or gone, not with a traceback each second."""
        try:
            write()
        except OSError as error:
            if self.failure is None:
                self._fail(f"records cannot be written: {write_failure(error)} and run again")
