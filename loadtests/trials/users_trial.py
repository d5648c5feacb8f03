"""A trial of users' traffic: arms and splitter run already and go on afterwards; what passes is recorded."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from loadtests.external.client_security import bearer_token
from loadtests.trials.channels import Pulse, check_alike, configuration, start_up
from loadtests.trials.context import RunError, TrialContext
from loadtests.trials.processes import child_environment
from loadtests.trials.status import Load, ReplicaState, read_load
from loadtests.trials.steering import Steering
from loadtests.trials.telemetry import Collector, Restart
from loadtests.trials.trial import take_all
from loadtests.trials.weights import Splitter
from loadtests.users import OBSERVED, Observed
from servers.clock import now_ns
from servers.processes import Child
from servers.rpc.telemetry_pb2 import SnapshotResponse

_COMMAND = (sys.executable, "-P", "-m", "loadtests.users")
_POLL_S = 0.1
_STOP_GRACE_S = 10.0
_SNAPSHOT_S = 10.0
_LATE_NS = 2_000_000_000


class UsersTrial:
    """Records what passes the splitter of `observed`, and what its replicas tell, until `steering` ends it or its time
    is over."""

    def __init__(
        self, context: TrialContext, *, observed: Observed, splitter: Splitter | None, steering: Steering
    ) -> None:
        self.context = context
        self.splitter = splitter
        self._observed, self._steering = observed, steering
        context.logs.mkdir(parents=True, exist_ok=True)
        self.collector = Collector(
            context.folder, trial=context.number, status=context.status, since_ns=observed.since_ns
        )
        self._observer: Child | None = None
        self._pulse: Pulse | None = None
        self._end_ns: int | None = None
        self._counted_before: dict[str, dict[str, int]] = {}
        self._restarts = 0  # those that were looked at
        self._arms = {name: arm for arm, replicas in observed.arms.items() for name in replicas.values()}
        self._recording = True

    def run(self) -> None:
        """The traffic was recorded until its end."""
        context, facts = self.context, self.context.facts
        context.status.load = Load()
        context.status.phase = "meeting the arms"
        security = context.experiment.security
        token = bearer_token(security)
        targets: dict[str, str] = {}
        for arm, replicas in self._observed.arms.items():
            for address, replica in replicas.items():
                context.status.replicas[replica] = ReplicaState(stage="starting")
                self.collector.follow(arm=arm, replica=replica, target=address, token=token)
                targets[replica] = address
        self._meet(targets)
        facts.start_ns = self._observed.since_ns
        context.write_facts()
        (context.folder / OBSERVED).write_text(json.dumps(asdict(self._observed), indent=2) + "\n", encoding="utf-8")
        self._observer = Child(
            "users",
            [*_COMMAND, str(context.folder.resolve())],
            log_path=context.logs / "users.log",
            environment=child_environment(),
            commands=True,
        )
        self._pulse = Pulse(targets, gone=self._unreachable, back=self._returned, token=token)
        context.status.phase = "traffic of users"
        end_ns = facts.start_ns + int(facts.duration_s * 1e9)
        while now_ns() < (end_ns if self._end_ns is None else self._end_ns):
            context.check()
            if (code := self._observer.poll()) is not None:
                raise RunError(f"users' requests are not recorded any more: who does it {self._observer.ending(code)}")
            if self.collector.failure is not None:
                raise RunError(self.collector.failure)
            context.status.load = read_load(context.folder)
            self._count_restarts()
            self._steering.poll(self)
            time.sleep(_POLL_S)
        facts.duration_s = (now_ns() - facts.start_ns) / 1e9
        self._await_ends(self._observer)
        self._end_records()
        facts.complete = True
        context.write_facts()

    def close(self, *, hurry: bool) -> None:
        """Nothing is recorded any more. The traffic goes on."""
        self.context.status.phase, self.context.status.detail = "stopping", ""
        take_all(self._end_records, self.context.keep_facts)

    def end_load(self, at_ns: int | None) -> None:
        """Nothing is recorded from the instant on. The traffic goes on: it is not ours."""
        if at_ns is not None:
            self._end_ns = at_ns

    def _meet(self, targets: Mapping[str, str]) -> None:
        """Every replica has said what it runs."""
        facts = self.context.facts
        snapshots = {}
        for replica, target in targets.items():
            snapshot = self.collector.snapshot(replica, timeout_s=_SNAPSHOT_S)
            if snapshot is None:
                raise RunError(
                    f"{replica} at {target} does not tell its telemetry within {_SNAPSHOT_S:g} s: is it a tailgate "
                    "server that serves, and is security.token_env what it asks for?"
                )
            snapshots[replica] = snapshot
        self._counted_before = {replica: dict(snapshot.counters) for replica, snapshot in snapshots.items()}
        facts.startup = {
            arm: start_up([snapshots[replica] for replica in replicas.values()])
            for arm, replicas in self._observed.arms.items()
            if replicas
        }
        facts.ready = dict.fromkeys(facts.startup, self._observed.since_ns)
        self._compare(snapshots)

    def _compare(self, snapshots: Mapping[str, SnapshotResponse]) -> None:
        """The arms are what their replicas say that they are, and not what the experiment would have started; and they
        differ in no more than they may. Otherwise ConfigError."""
        first = {arm: next(iter(replicas.values())) for arm, replicas in self._observed.arms.items() if replicas}
        for row in self.context.facts.arms:
            if (replica := first.get(row["name"])) is not None:
                row["config"] = configuration(replica, snapshots[replica])
        control = first.get(self.context.experiment.control.name)
        if control is not None and not self.context.experiment.compare_models:
            check_alike(snapshots, snapshots[control])

    def _await_ends(self, observer: Child) -> None:
        """What came before the end has ended too, or lasted for as long as a request may."""
        status = self.context.status
        observer.command("end")
        deadline = time.monotonic() + self._observed.timeout_s + _STOP_GRACE_S
        while observer.poll() is None and time.monotonic() < deadline:
            self.context.check()
            status.load = read_load(self.context.folder)
            status.detail = "what is under way is waited for"
            time.sleep(_POLL_S)

    def _unreachable(self, replica: str) -> None:
        self._died(replica)
        self.context.status.replicas[replica].stage = "dead"
        self.context.status.note(f"{replica} at {self._address(replica)} cannot be reached any more")

    def _count_restarts(self) -> None:
        """A replica that is another process than before has died, also where nobody missed it meanwhile."""
        for restart in self.collector.restarts[self._restarts :]:
            self._restarts += 1
            if not is_known(restart, self.context.facts.deaths):
                self._died(restart.replica, at_ns=restart.serving_ns)
                self.context.status.note(f"{restart.replica} has started anew")

    def _died(self, replica: str, *, at_ns: int | None = None) -> None:
        death = {"arm": self._arms[replica], "replica": replica, "at_ns": at_ns or now_ns(), "exit_code": None}
        self.context.facts.deaths.append(death)
        self.context.keep_facts()

    def _returned(self, replica: str) -> None:
        """Its death stands, and it serves again."""
        self.context.status.replicas[replica].stage = "ready"
        self.context.status.note(f"{replica} answers again")

    def _address(self, replica: str) -> str:
        addresses = {name: at for replicas in self._observed.arms.values() for at, name in replicas.items()}
        return addresses.get(replica, "?")

    def _end_records(self) -> None:
        """Requests and telemetry are on disk. A second call does nothing."""
        if not self._recording:
            return
        self._recording = False
        take_all(
            lambda: self._pulse.stop() if self._pulse is not None else None,
            lambda: self._observer.stop(_STOP_GRACE_S) if self._observer is not None else None,
            # First the counts, then what they count: traffic goes on, and more may be recorded than was counted.
            self._last_words,
            lambda: self.collector.settle(timeout_s=2.0),
            self.collector.stop,
        )

    def _last_words(self) -> None:
        final = {}
        for replicas in self._observed.arms.values():
            for replica in replicas.values():
                if (snapshot := self.collector.snapshot(replica, timeout_s=2.0)) is not None:
                    before = self._counted_before.get(replica, {})
                    final[replica] = {
                        "counters": counted_since(before, snapshot.counters),
                        "memory_bytes": dict(snapshot.memory_bytes),
                        "blind_spots": list(snapshot.blind_spots),
                    }
        self.context.facts.final = final


def is_known(restart: Restart, deaths: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the death before it is one of `deaths`. One that is missed for a second is known at the latest about
    when it serves again."""
    return any(
        death["replica"] == restart.replica and restart.before_ns < death["at_ns"] < restart.serving_ns + _LATE_NS
        for death in deaths
    )


def counted_since(before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, int]:
    """What was counted from one snapshot to the other. A process that has started anew counts from nothing. What is in
    flight is no count, but how many are now."""
    before = {name: count for name, count in before.items() if name != "in_flight"}
    anew = any(now.get(name, 0) < count for name, count in before.items())
    return {name: count - (0 if anew else before.get(name, 0)) for name, count in now.items()}


def observed_of(
    context: TrialContext, *, log: Path, admin: str, arms: Mapping[str, tuple[str, ...]], since_ns: int
) -> Observed:
    """What is observed of the replicas at these addresses. They have the names that an experiment gives its own."""
    return Observed(
        log=str(log.resolve()),
        log_at=log.stat().st_size if log.exists() else 0,
        admin=admin,
        arms={arm: {address: f"{arm}-{index}" for index, address in enumerate(known)} for arm, known in arms.items()},
        timeout_s=context.experiment.traffic.timeout_s,
        since_ns=since_ns,
    )
