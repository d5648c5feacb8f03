"""The server processes of one trial's arms: started, watched, asked and stopped."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import grpc
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc
from pydantic import TypeAdapter

from tailgate.analysis.records.documents import write_json
from tailgate.loadtests.experiments.checks import same_kind_of_device
from tailgate.loadtests.experiments.model import ManagedArm
from tailgate.loadtests.external.grpc_channel import open_channel
from tailgate.loadtests.trials.context import RunError, StartError, TrialContext
from tailgate.loadtests.trials.machines import MonitorProcess
from tailgate.loadtests.trials.processes import child_environment, thread_variables
from tailgate.loadtests.trials.served_parity import TIMEOUT_S, Answers, Question, ask
from tailgate.loadtests.trials.telemetry import Collector
from tailgate.servers.address import FREE_PORT
from tailgate.servers.clock import now_ns
from tailgate.servers.complaint import ConfigError
from tailgate.servers.metadata import INFERENCE_SERVICE
from tailgate.servers.processes import Child, Listening, describe_exit
from tailgate.servers.rpc.telemetry_pb2 import SnapshotResponse

FRESH_CACHE = "compile-cache"  # compiled code of this trial alone
_POLL_S = 0.1
_STOP_GRACE_S = 10.0

_LISTENING = TypeAdapter(Listening).validate_json


@dataclass(slots=True)
class _Replica:
    """One server process, from launch to ready. It has a channel once its port is known."""

    arm: ManagedArm
    name: str
    child: Child
    deadline: float
    targets: tuple[str, ...] = ()  # of its frontends
    channel: grpc.Channel | None = None
    ready: bool = False
    dead: bool = False


class Replicas:
    """Every replica of every arm that tailgate starts. `snapshots` has each one's report when it was warm."""

    def __init__(self, trial: TrialContext, *, collector: Collector, monitor: MonitorProcess) -> None:
        self._trial = trial
        self._monitor = monitor
        self._collector = collector
        self._replicas: dict[str, _Replica] = {}
        self.snapshots: dict[str, SnapshotResponse] = {}

    def start(self) -> None:
        """Start every replica and wait until it is warm, in an order drawn from the seed: no arm always goes first."""
        experiment = self._trial.experiment
        self._trial.status.phase = "starting arms"
        every = [(arm, name) for arm in experiment.managed_arms for name in arm.replica_names]
        rng = np.random.default_rng([experiment.seed, self._trial.number])
        waiting = [every[index] for index in rng.permutation(len(every))]
        while waiting or not all(replica.ready for replica in self._replicas.values()):
            self._trial.check()
            starting = sum(not replica.ready for replica in self._replicas.values())
            while waiting and starting < experiment.trials.starting_at_once:
                self._launch(*waiting.pop(0))
                starting += 1
            for replica in self._replicas.values():
                self._advance(replica)
            time.sleep(_POLL_S)
        self._trial.facts.ready_ns = now_ns()
        self._trial.write_facts()

    def _launch(self, arm: ManagedArm, name: str) -> None:
        trials, security = self._trial.experiment.trials, self._trial.experiment.security
        # With the logs: an arm called "generator" must not pass for the account of a load process.
        config_path = self._trial.logs / f"{name}.json"
        write_json(config_path, arm.config.to_dict(), indent=2)
        fresh = trials.compile_cache == "fresh"
        cache = self._trial.folder / FRESH_CACHE / name if fresh else self._trial.shared_cache
        cache.mkdir(parents=True, exist_ok=True)
        command = [*self._trial.arm_command, "--config", str(config_path.resolve()), "--port", "0", "--replica", name]
        command += ["--cache-dir", str(cache.resolve()), "--json"]
        if security.token_env:
            command += ["--token-env", security.token_env]
        if self._trial.status.exported:
            command += ["--metrics-port", FREE_PORT]
        environment = child_environment(self._trial.logs) | thread_variables(arm.config)
        self._trial.status.replicas[name].stage = "starting"
        log_path = self._trial.logs / f"{name}.log"
        child = Child(name, command, log_path=log_path, environment=environment, parse=_LISTENING)
        self._monitor.name(name, child.pid, arm=arm.name)
        deadline = time.monotonic() + trials.ready_timeout_s
        self._replicas[name] = _Replica(arm=arm, name=name, child=child, deadline=deadline)

    def _advance(self, replica: _Replica) -> None:
        """Take the replica one step nearer to ready, where that needs no waiting."""
        state, child = self._trial.status.replicas[replica.name], replica.child
        ended, failure = child.poll(), ""  # read first: a replica reports its failure before it ends
        if state.stage == "failed":
            failure = f"failed: {state.detail}"
        elif ended is not None:
            failure = f"ended with {describe_exit(ended)} during start-up: {child.log_tail()}"
        elif not replica.ready and time.monotonic() > replica.deadline:
            limit = self._trial.experiment.trials.ready_timeout_s
            failure = (
                f"was not ready after {limit:g} s (it was at: {state.text()}): raise trials.ready_timeout_s: "
                f"{child.log_tail(2)}"
            )
        if failure:
            raise StartError(f'arm "{replica.arm.name}": {replica.name} {failure}: see {child.log_path}')
        if replica.ready:
            return
        if replica.channel is None:
            self._find_port(replica)
        elif is_serving(replica.channel):
            replica.ready = True
            state.stage = "ready"

    def _find_port(self, replica: _Replica) -> None:
        messages, _ = replica.child.receive()
        if not messages:
            return
        listening = cast("Listening", messages[0])
        replica.targets = tuple(f"127.0.0.1:{port}" for port in (listening.port, *listening.further_ports))
        if listening.metrics_port:
            page = (f"127.0.0.1:{listening.metrics_port}", "/metrics")
            self._trial.status.pages = {**self._trial.status.pages, replica.name: page}
        security = self._trial.experiment.security
        replica.channel = open_channel(replica.targets[0], security)
        self._collector.follow(replica.arm.name, replica.name, replica.targets[0], security)

    def compare(self) -> None:
        """Write what each start cost to trial.json. Raises ConfigError where replicas report that they run different
        things, unless the experiment compares models."""
        experiment = self._trial.experiment
        for replica in self._replicas.values():
            snapshot = self._collector.snapshot(replica.name)
            if snapshot is None:
                raise RunError(f"{replica.name} does not report what it runs: see {replica.child.log_path}")
            self.snapshots[replica.name] = snapshot
        self._trial.facts.startup = {
            arm.name: start_up([self.snapshots[name] for name in arm.replica_names]) for arm in experiment.managed_arms
        }
        self._trial.write_facts()
        if not experiment.compare_models:
            check_alike(self.snapshots, experiment.control.replica_names[0])

    @property
    def targets(self) -> dict[str, tuple[str, ...]]:
        """Return host:port of every frontend of each arm."""
        names = {arm.name: arm.replica_names for arm in self._trial.experiment.managed_arms}
        return {arm: sum((self._replicas[name].targets for name in names[arm]), ()) for arm in names}

    @property
    def process_ids(self) -> list[int]:
        """Return the process of every replica that lives."""
        return [replica.child.pid for replica in self._replicas.values() if not replica.dead]

    @property
    def all_dead(self) -> bool:
        """Return whether no process is left, as far as `watch` has seen."""
        return all(replica.dead for replica in self._replicas.values())

    def watch(self) -> None:
        """Report every death since the last call, in trial.json and on the screen."""
        for replica in self._replicas.values():
            code = replica.child.poll()
            if code is None or replica.dead:
                continue
            replica.dead = True
            trial, child, at_ns = self._trial, replica.child, now_ns()
            death = {"arm": replica.arm.name, "replica": replica.name, "at_ns": at_ns, "exit_code": code}
            trial.facts.deaths.append(death | self._collector.unfinished(replica.name, at_ns))
            trial.write_facts()
            trial.status.replicas[replica.name].stage = "dead"
            trial.status.note(f"{replica.name} died ({describe_exit(code)}): {child.log_tail(1)}: see {child.log_path}")

    def answers(self, questions: Sequence[Question]) -> dict[str, Answers | str]:
        """Return the answers of each replica, or why there are none."""
        timeout_s = min(TIMEOUT_S, self._trial.experiment.traffic.timeout_s * len(questions))
        answers: dict[str, Answers | str] = {}
        for replica in self._replicas.values():
            self._trial.status.detail = replica.name
            if replica.channel is None or replica.child.poll() is not None:
                answers[replica.name] = "its process is gone"
                continue
            answers[replica.name] = ask(replica.channel, questions, check=self._trial.check, timeout_s=timeout_s)
        return answers

    def last_words(self) -> dict[str, dict[str, Any]]:
        """Return counters, memory and blind spots of every replica that still serves, and what it still compiles."""
        final = {}
        for name, replica in self._replicas.items():
            if replica.child.poll() is not None or replica.channel is None or not is_serving(replica.channel):
                continue
            if (snapshot := self._collector.snapshot(name, timeout_s=2.0)) is not None:
                final[name] = final_account(snapshot) | self._collector.unfinished(name, now_ns())
        return final

    def stop(self) -> None:
        """End every process. Those that drain in time end by themselves."""
        for replica in self._replicas.values():
            if replica.channel is not None:
                replica.channel.close()
            replica.child.ask_to_stop()
        # The load is gone, so there is little to drain; all share one grace time.
        deadline = time.monotonic() + _STOP_GRACE_S
        for replica in self._replicas.values():
            replica.child.stop(max(0.0, deadline - time.monotonic()))


def is_serving(channel: grpc.Channel) -> bool:
    """Return whether the server behind `channel` says that it is ready."""
    request = health_pb2.HealthCheckRequest(service=INFERENCE_SERVICE)
    try:
        answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=2.0)
    except grpc.RpcError:
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def start_up(snapshots: Sequence[SnapshotResponse]) -> dict[str, Any]:
    """Return what an arm's start cost: the slowest of its replicas for times, their sum for memory."""
    items: dict[str, int] = {}
    memory: Counter[str] = Counter()
    for snapshot in snapshots:
        for key, value in snapshot.startup_ns.items():
            items[key] = max(items.get(key, 0), value)
        memory.update(snapshot.memory_bytes)  # adds
    first = snapshots[0]
    return {
        "items_ns": items,
        "memory_bytes": dict(memory),
        "versions": dict(first.versions),
        # what no replica of the arm could see of its compilers, or one could not
        "blind_spots": sorted({text for snapshot in snapshots for text in snapshot.blind_spots}),
        "device": first.device,
        "dtype": first.dtype,
    }


def final_account(snapshot: SnapshotResponse) -> dict[str, Any]:
    """Return what trial.json holds of a replica that still serves at the end."""
    return {
        "counters": dict(snapshot.counters),
        "memory_bytes": dict(snapshot.memory_bytes),
        "blind_spots": list(snapshot.blind_spots),
    }


def check_alike(snapshots: Mapping[str, SnapshotResponse], first: str) -> None:
    """Raise ConfigError unless all replicas report that they run the same thing: that of the control's `first`, or
    where it is not here that of any."""
    for name, snapshot in snapshots.items():
        control = snapshots.get(first) or next(iter(snapshots.values()))
        for what, value, expected in (
            ("dtype", snapshot.dtype, control.dtype),
            ("vocabulary", snapshot.vocab_size, control.vocab_size),
            ("device", snapshot.device, control.device),
        ):
            alike = same_kind_of_device(str(value), str(expected)) if what == "device" else value == expected
            if not alike:
                raise ConfigError(
                    f"{name} runs with {what} {value} but the control with {expected}: not comparable; "
                    "make them equal, or set compare_models = true at the top if that is the question"
                )
