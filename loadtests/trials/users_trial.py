"""A trial of production traffic: arms and splitter run already and go on afterwards; what passes is recorded."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import pairwise

from tailgate.loadtests.external.client_security import bearer_token
from tailgate.loadtests.trials.channels import check_alike, configuration, final_account, start_up
from tailgate.loadtests.trials.context import RunError, TrialContext
from tailgate.loadtests.trials.status import Load, ReplicaState, read_load
from tailgate.loadtests.trials.steering import Steering
from tailgate.loadtests.trials.telemetry import Collector
from tailgate.loadtests.trials.trial import take_all
from tailgate.loadtests.trials.weights import Splitter
from tailgate.loadtests.users.observer import Observer
from tailgate.servers.clock import now_ns
from tailgate.servers.rpc.telemetry_pb2 import SnapshotResponse

_POLL_S = 0.1
_OBSERVE_S = 0.5
_LAST_S = 1.5  # by then the splitter has written what had ended when the end was asked for
_END_GRACE_S = 10.0
_SNAPSHOT_S = 10.0


class UsersTrial:
    """Records what `observer` sees and what the replicas of its arms report, until `steering` ends it or its time is
    over."""

    def __init__(
        self, context: TrialContext, *, observer: Observer, splitter: Splitter | None, steering: Sequence[Steering]
    ) -> None:
        self.context = context
        self.splitter = splitter
        self._observer, self._steering = observer, steering
        self.collector = Collector(
            context.folder, trial=context.number, status=context.status, since_ns=observer.since_ns
        )
        self._observe_at_s = 0.0
        self._end_ns = 0
        self._targets = {name: at for replicas in observer.arms.values() for at, name in replicas.items()}
        self._arms = {name: arm for arm, replicas in observer.arms.items() for name in replicas.values()}
        self._first: dict[str, SnapshotResponse] = {}
        self._lost: frozenset[str] = frozenset()

    def run(self) -> None:
        """Record the traffic until its end, and complete the records whatever ends it. The traffic goes on."""
        context, complete = self.context, False
        try:
            self._meet()
            self._record()
            self._await_ends()
            complete = True
        finally:
            context.status.phase, context.status.detail = "stopping", ""
            take_all(
                lambda: time.sleep(_LAST_S),
                lambda: self._observer.close(time.time_ns()),
                # First the counts, then what they count: traffic goes on, and more may be recorded than was counted.
                self._count,
                lambda: self.collector.settle(timeout_s=2.0),
                self.collector.stop,
                context.keep_facts,
            )
            context.facts.complete = complete
            context.write_facts()

    def end_load(self, at_ns: int | None) -> None:
        """Record nothing from the instant on. The traffic goes on: it is not ours."""
        if at_ns is not None:
            self._end_ns = at_ns

    def _record(self) -> None:
        """Record the traffic until it is over, or `end_load` ends it."""
        context, facts = self.context, self.context.facts
        facts.start_ns = self._observer.since_ns
        context.write_facts()
        context.status.phase = "production traffic"
        self._end_ns = facts.start_ns + int(facts.duration_s * 1e9)
        while now_ns() < self._end_ns:
            self._observe()
            if self.collector.failure is not None:
                raise RunError(self.collector.failure)
            self._watch()
            for steering in self._steering:
                steering.poll(self)
            time.sleep(_POLL_S)
        facts.duration_s = (now_ns() - facts.start_ns) / 1e9

    def _meet(self) -> None:
        """Learn what every replica runs. Raises RunError for one that does not report it, and ConfigError where the
        arms differ in more than they may.

        trial.json describes the arms as their replicas do, and not as the experiment would have started them.
        """
        context, facts = self.context, self.context.facts
        context.status.load = Load()
        context.status.phase = "meeting the arms"
        token = bearer_token(context.experiment.security)
        for replica, target in self._targets.items():
            context.status.replicas[replica] = ReplicaState(stage="starting")
            self.collector.follow(arm=self._arms[replica], replica=replica, target=target, token=token)
        for replica, target in self._targets.items():
            snapshot = self.collector.snapshot(replica, timeout_s=_SNAPSHOT_S)
            if snapshot is None:
                raise RunError(
                    f"{replica} at {target} reports no telemetry within {_SNAPSHOT_S:g} s: is it a tailgate "
                    "server that serves, and is security.token_env what it asks for?"
                )
            self._first[replica] = snapshot
        for row in facts.arms:
            names = [name for name, arm in self._arms.items() if arm == row["name"]]
            if names:
                facts.startup[row["name"]] = start_up([self._first[name] for name in names])
                facts.ready[row["name"]] = self._observer.since_ns
                row["config"] = configuration(self._first[names[0]])
        control = next((name for name, arm in self._arms.items() if arm == facts.control), None)
        if control is not None and not context.experiment.compare_models:
            check_alike(self._first, self._first[control])

    def _watch(self) -> None:
        """Record every death: a replica that cannot be reached any more, or that is another process than before."""
        facts, status, lost = self.context.facts, self.context.status, self.collector.lost()
        for replica in sorted(lost - self._lost):
            self._record_death(replica, now_ns())
            status.replicas[replica].stage = "dead"
            status.note(f"{replica} at {self._targets[replica]} cannot be reached any more")
        for replica in sorted(self._lost - lost):
            status.replicas[replica].stage = "ready"
            status.note(f"{replica} answers again")
        self._lost = lost
        for replica, since_ns in list(self.collector.served_since_ns.items()):
            for before_ns, anew_ns in pairwise(since_ns):
                if not any(row["replica"] == replica and row["at_ns"] > before_ns for row in facts.deaths):
                    self._record_death(replica, anew_ns)
                    status.note(f"{replica} was restarted")

    def _record_death(self, replica: str, at_ns: int) -> None:
        death = {"arm": self._arms[replica], "replica": replica, "at_ns": at_ns, "exit_code": None}
        self.context.facts.deaths.append(death)
        self.context.keep_facts()

    def _observe(self) -> None:
        """Record what the splitter has logged, twice a second or, where that is much, in turn with all else."""
        self.context.check()
        if self._observer.is_behind or time.monotonic() >= self._observe_at_s:
            self._observe_at_s = time.monotonic() + _OBSERVE_S
            self._observer.step(time.time_ns())
            self.context.status.load = read_load(self.context.folder)

    def _await_ends(self) -> None:
        """Wait until what came before the end has ended too, or lasted for as long as a request may."""
        self.context.status.detail = "waiting for requests under way"
        self._observer.end(time.time_ns())
        deadline = time.monotonic() + self._observer.timeout_s + _END_GRACE_S
        while not self._observer.settled(time.time_ns()) and time.monotonic() < deadline:
            self._observe()
            time.sleep(_POLL_S)

    def _count(self) -> None:
        final = {}
        for replica, first in self._first.items():
            if (snapshot := self.collector.snapshot(replica, timeout_s=2.0)) is not None:
                counters = counted_since(first.counters, snapshot.counters)
                final[replica] = {**final_account(snapshot), "counters": counters}
        self.context.facts.final = final


def counted_since(before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, int]:
    """Return what was counted from one snapshot to the other. A process that was restarted counts from nothing.

    What is in flight is no count, but how many are now.
    """
    before = {name: count for name, count in before.items() if name != "in_flight"}
    anew = any(now.get(name, 0) < count for name, count in before.items())
    return {name: count - (0 if anew else before.get(name, 0)) for name, count in now.items()}
