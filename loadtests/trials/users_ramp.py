"""A ramp of production traffic: servers and splitter run already, and outlive the program that moves the weights.

A controller that is killed leaves the splitter with its weights. The next ramp begins with them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

from tailgate.analysis.settings.ramp_limits import RampLimits
from tailgate.loadtests.experiments.files import check_makeable
from tailgate.loadtests.experiments.model import Experiment
from tailgate.loadtests.provider.answers import Evidence
from tailgate.loadtests.provider.server import ProviderServer
from tailgate.loadtests.trials.context import RunError, TrialContext
from tailgate.loadtests.trials.ramp import Candidate, RampControl
from tailgate.loadtests.trials.replicas import check_alike, final_account, start_up
from tailgate.loadtests.trials.run import Orchestrator
from tailgate.loadtests.trials.status import Load, ReplicaState, read_load
from tailgate.loadtests.trials.steering import Judge, Steered, Steering
from tailgate.loadtests.trials.telemetry import Collector
from tailgate.loadtests.trials.trial import take_all
from tailgate.loadtests.trials.weights import UNANSWERED, Splitter, splitter_of
from tailgate.loadtests.users.observer import Observer
from tailgate.servers.clock import now_ns
from tailgate.servers.complaint import ConfigError
from tailgate.servers.rpc.telemetry_pb2 import SnapshotResponse
from tailgate.servers.splitter.admin import (
    Admin,
    SplitterError,
    configured_shares,
    live_shares,
    log_path,
    replica_addresses,
)

_POLL_S = 0.1
_OBSERVE_S = 0.5
_LAST_S = 1.5  # by then the splitter has written what had ended when the end was asked for
_END_GRACE_S = 10.0
_SNAPSHOT_S = 10.0


class UsersRamp(Orchestrator):
    """Ramps the experiment that `ramped` has made, whose requests users send. Raises ConfigError.

    With `users.provider` others move the weights: they are recorded, and the candidate is judged for those who ask.
    """

    def __init__(self, experiment: Experiment, *, out: Path) -> None:
        super().__init__(experiment, out=out)
        users = experiment.users
        self._admin = Admin(users.admin) if users.admin else None
        self._splitter = splitter_of(users, [arm.name for arm in experiment.arms])
        self._provider = ProviderServer(users.provider, note=self.status.note) if users.provider else None
        self._log, self._arms = users.access_log, dict(users.replicas)
        self._step = 0

    def prepare(self) -> None:
        """Check that the splitter answers, splits over both arms and reports what is needed. Raises ConfigError."""
        self.experiment.security.check("security")
        check_makeable(self._out)
        try:
            if self._admin is not None:
                self._ask_envoy(self._admin)
            weights = self._splitter.shares().weights
        except SplitterError as error:
            raise ConfigError(str(error)) from None
        for arm in self.experiment.arms:
            if arm.name not in weights:
                raise ConfigError(f'production traffic is not split over "{arm.name}": it goes to {", ".join(weights)}')
        if not self._log:
            raise ConfigError(
                "the split writes no request log: start it with --request-log FILE, or give users.access_log"
            )
        if self._provider is None:
            self._step = step_of(weights, self.experiment.ramp, control=self.experiment.control.name)

    def _ask_envoy(self, admin: Admin) -> None:
        """Read what the split itself knows, where the experiment does not say it."""
        self._log = self._log or log_path(admin)
        self._arms = {**replica_addresses(admin), **self._arms}
        candidate, users = self.experiment.ramp.candidate, self.experiment.users
        if users.route or users.provider:
            return  # this splitter's weights are not moved here
        if percent := live_shares(admin).shadows.get(candidate):
            raise ConfigError(
                f"{candidate} gets copies of {percent:g} % of the requests: end them first, by tailgate split --admin "
                f"{admin.address} --shadow {candidate}=0%"
            )
        if share := configured_shares(admin).weights.get(candidate, 0):
            # Envoy forgets live weights when it starts anew.
            raise ConfigError(
                f"the split gives {candidate} weight {share} after a restart: start it with "
                f"--weight {candidate}=0, so that a restart gives it nothing"
            )

    def _run_trials(self, run_dir: Path) -> None:
        context = self._context(self.experiment, 1, run_dir)
        context.folder.mkdir()
        log, names = Path(self._log), [arm.name for arm in self.experiment.arms]
        observer = Observer(
            context.folder,
            log=log,
            log_at=log.stat().st_size if log.exists() else 0,
            admin=self._admin,
            arms={
                arm: {address: f"{arm}-{index}" for index, address in enumerate(addresses)}
                for arm, addresses in self._arms.items()
                if arm in names
            },
            timeout_s=self.experiment.traffic.timeout_s,
            since_ns=now_ns(),
        )
        assert self._judge is not None
        with ExitStack() as stack:
            if self._provider is None:
                steering = RampControl(run_dir, self.experiment, judge=self._judge, step=self._step).poll
            else:
                self._provider.open()
                stack.callback(self._provider.close)
                self.status.note(f"answering Argo Rollouts and Flagger at {self._provider.judgement_url}")
                steering = PassiveRamp(run_dir, self.experiment, judge=self._judge, provider=self._provider).poll
            UsersTrial(context, observer=observer, splitter=self._splitter, steering=steering).run()


class UsersTrial:
    """Records what `observer` sees and what the replicas of its arms report, until `steering` ends it or its time is
    over."""

    def __init__(self, context: TrialContext, *, observer: Observer, splitter: Splitter, steering: Steering) -> None:
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
            self._steering(self)
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
        for replica, target in self._targets.items():
            context.status.replicas[replica] = ReplicaState(stage="starting")
            self.collector.follow(self._arms[replica], replica, target, context.experiment.security)
        for replica, target in self._targets.items():
            snapshot = self.collector.snapshot(replica, timeout_s=_SNAPSHOT_S)
            if snapshot is None:
                raise RunError(
                    f"{replica} at {target} reports no telemetry within {_SNAPSHOT_S:g} s: is it a tailgate "
                    "server that serves, and is security.token_env what it asks for?"
                )
            self._first[replica] = snapshot
        for row in facts.arms:
            row["replicas"] = names = list(self._observer.arms.get(row["name"], {}).values())
            if names:
                facts.startup[row["name"]] = start_up([self._first[name] for name in names])
                row["config"] = json.loads(self._first[names[0]].config_json)
        if not context.experiment.compare_models:
            check_alike(self._first, f"{context.experiment.control.name}-0")

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


class PassiveRamp:
    """Records what weights another program gives the arms, moves none, and gives `provider` the evidence."""

    def __init__(self, run_dir: Path, experiment: Experiment, *, judge: Judge, provider: ProviderServer) -> None:
        self._run, self._candidate, self._provider = run_dir.name, Candidate(run_dir, experiment, judge), provider
        self._failed: tuple[str, ...] = ()  # as last seen; a candidate that has failed stays so

    def poll(self, trial: Steered) -> None:
        """Record the weights in force, and renew the evidence."""
        candidate = self._candidate
        try:
            candidate.weights.poll(trial.splitter)
        except UNANSWERED as error:
            trial.context.status.detail = f"the splitter does not answer: {error}"
        load = trial.context.status.load.arms.get(candidate.name)
        standing, failed = candidate.standing, [alarm.why for alarm in candidate.alarms(trial)]
        failed += [standing.failed] if standing.failed is not None else []
        self._failed = tuple(failed) or self._failed
        self._provider.evidence = Evidence(
            run=self._run,
            limits=candidate.limits,
            at_ns=now_ns(),
            failed=self._failed,
            missing=candidate.missing(),
            standing=standing,
            unseen=load is None or load.finished < candidate.limits.least_requests,
            interim=candidate.interim["number"] or None,
        )


def step_of(weights: Mapping[str, int], limits: RampLimits, *, control: str) -> int:
    """Return the step that a ramp begins at, from 0: the last whose share is no more than the candidate's.

    Raises ConfigError where the candidate has everything: the last step is judged before it begins, against a control.
    """
    candidate = weights[limits.candidate]
    share = 100.0 * candidate / max(1, candidate + weights[control])
    if share == 100.0:
        raise ConfigError(
            f"{limits.candidate} has all of the traffic, and {control} none to compare with: set its weight to 0 first"
        )
    return max(0, sum(step <= share for step in limits.steps) - 1)


def counted_since(before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, int]:
    """Return what was counted from one snapshot to the other. A process that was restarted counts from nothing.

    What is in flight is no count, but how many are now.
    """
    before = {name: count for name, count in before.items() if name != "in_flight"}
    anew = any(now.get(name, 0) < count for name, count in before.items())
    return {name: count - (0 if anew else before.get(name, 0)) for name, count in now.items()}
