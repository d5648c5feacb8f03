"""A ramp of production traffic: servers and splitter run already, and outlive the program that moves the weights.

A controller that is killed leaves the splitter with its weights. The next ramp begins with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from tailgate.analysis.judging.ramp import Standing, lacks
from tailgate.analysis.settings.ramp_limits import RampLimits
from tailgate.loadtests.experiments.files import check_makeable
from tailgate.loadtests.experiments.model import Experiment
from tailgate.loadtests.provider.answers import GOALS, Evidence
from tailgate.loadtests.provider.server import ProviderServer
from tailgate.loadtests.trials.context import TrialContext
from tailgate.loadtests.trials.ramp import Candidate, RampControl
from tailgate.loadtests.trials.run import Orchestrator
from tailgate.loadtests.trials.steering import Judge, Steered, Steering
from tailgate.loadtests.trials.users_trial import UsersTrial
from tailgate.loadtests.trials.weights import UNANSWERED, Splitter, WeightController, splitter_of
from tailgate.loadtests.users.observer import Observer
from tailgate.servers.clock import now_ns
from tailgate.servers.complaint import ConfigError
from tailgate.servers.splitter.admin import (
    Admin,
    SplitterError,
    configured_shares,
    live_shares,
    log_path,
    replica_addresses,
)

# The last interim analysis says nothing of now once it is older than four blocks, and a minute.
_STALE_S: Final = 60.0
_STALE_BLOCKS: Final = 4


class UsersRamp(Orchestrator):
    """Ramps the experiment that `ramped` has made, whose requests users send.

    With `users.provider` others move the weights: they are recorded, and the candidate is judged for those who ask.
    """

    def __init__(self, experiment: Experiment, *, out: Path) -> None:
        super().__init__(experiment, out=out)
        self._splitter: Splitter | None = None
        self._provider: ProviderServer | None = None
        self._log = ""
        self._arms: dict[str, tuple[str, ...]] = {}
        self._step = 0

    def prepare(self) -> None:
        """Check that the splitter answers, splits over both arms and reports what is needed. Raises ConfigError."""
        users, names = self.experiment.users, [arm.name for arm in self.experiment.arms]
        users.check()
        self.experiment.security.check("security")
        check_makeable(self._out)
        try:
            self._splitter = splitter_of(users, names)
            self._log, self._arms = users.access_log, dict(users.replicas)
            if users.admin:
                self._ask_envoy(Admin(users.admin))
            weights = self._splitter.shares().weights
        except SplitterError as error:
            raise ConfigError(str(error)) from None
        for name in names:
            if name not in weights:
                raise ConfigError(f'production traffic is not split over "{name}": it goes to {", ".join(weights)}')
        if not self._log:
            raise ConfigError(
                "the split writes no request log: start it with --request-log FILE, or give users.access_log"
            )
        if not users.provider:
            self._step = step_of(weights, self.experiment.ramp, control=self.experiment.control.name)
        elif self._provider is None:
            self._provider = ProviderServer(users.provider, note=self.status.note)

    def _ask_envoy(self, admin: Admin) -> None:
        """Read what the split itself knows, where the experiment does not say it."""
        self._log = self._log or log_path(admin)
        for arm, addresses in replica_addresses(admin).items():
            if arm in (item.name for item in self.experiment.arms):
                self._arms.setdefault(arm, addresses)
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
        admin, log = self.experiment.users.admin, Path(self._log)
        observer = Observer(
            context.folder,
            log=log,
            log_at=log.stat().st_size if log.exists() else 0,
            admin=Admin(admin) if admin else None,
            arms={
                arm: {address: f"{arm}-{index}" for index, address in enumerate(addresses)}
                for arm, addresses in self._arms.items()
            },
            timeout_s=self.experiment.traffic.timeout_s,
            since_ns=now_ns(),
        )
        for row in context.facts.arms:
            row["replicas"] = list(observer.arms.get(row["name"], {}).values())
        trial = UsersTrial(context, observer=observer, splitter=self._splitter, steering=self._steering(context))
        if self._provider is None:
            trial.run()
            return
        self._provider.open()
        self.status.note(f"answering Argo Rollouts and Flagger at {self._provider.judgement_url}")
        try:
            trial.run()
        finally:
            self._provider.close()

    def _steering(self, context: TrialContext) -> list[Steering]:
        assert self._judge is not None
        experiment, run_dir = self.experiment, context.folder.parent
        if self._provider is not None:
            return [PassiveRamp(run_dir, experiment=experiment, judge=self._judge, provider=self._provider)]
        return [RampControl(run_dir, experiment, judge=self._judge, step=self._step)]


class PassiveRamp:
    """Records what weights another program gives the arms, moves none, and gives `provider` the evidence."""

    def __init__(self, run_dir: Path, *, experiment: Experiment, judge: Judge, provider: ProviderServer) -> None:
        limits, self._gates = experiment.ramp, experiment.gates
        self._run, self._limits, self._judge, self._provider = run_dir.name, limits, judge, provider
        self._candidate = Candidate(limits, experiment.gates)
        arms = (experiment.control.name, limits.candidate)
        self._weights = WeightController(run_dir, arms, passive=True)
        self._failed: tuple[str, ...] = ()  # as last seen; a candidate that has failed stays so

    def poll(self, trial: Steered) -> None:
        """Record the weights in force, and renew the evidence."""
        assert trial.splitter is not None
        try:
            if self._weights.poll(trial.splitter) is not None:
                self._candidate.begin(trial)
        except UNANSWERED as error:
            trial.context.status.detail = f"the splitter does not answer: {error}"
        self._provider.evidence = self._evidence(trial)

    def _evidence(self, trial: Steered) -> Evidence:
        candidate, limits, interim = self._candidate, self._limits, self._judge.last()
        load = trial.context.status.load.arms.get(candidate.name)
        standing = Standing(step=0, step_s=0.0) if interim is None else candidate.standing(interim)
        failed = [alarm.why for alarm in candidate.alarms(trial)]
        failed += [standing.failed] if standing.failed is not None else []
        self._failed = tuple(failed) or self._failed
        missing = self._missing(interim)
        margin = f"it is surely at most {100.0 * limits.step_margin:g} % slower than the control"
        # Every gate that has passed says more than the margin of a step.
        standing = replace(standing, safe=standing.safe or standing.passed)
        return Evidence(
            run=self._run,
            candidate=candidate.name,
            at_ns=now_ns(),
            failed=self._failed,
            lacks={goal: missing or lacks(standing, limits, to_whole=goal == "promotion") for goal in GOALS},
            passed="every gate with interim evidence has passed" if standing.passed else margin,
            unseen=load is None or load.finished < limits.least_requests,
            requests=standing.requests,
            interim=None if interim is None else int(interim["number"]),
        )

    def _missing(self, interim: Mapping[str, Any] | None) -> str | None:
        """Return why nothing is sure now, whatever the gates say; None where that can be."""
        if not self._weights.held:
            return "the weights in force are not known"
        if interim is None:
            return "there is no interim analysis yet: the first comes after a block (traffic.block_s) of requests"
        if int(interim["at_ns"]) < self._candidate.began_ns:
            return "the last interim analysis is of the weights before"
        age_s, limit_s = (now_ns() - int(interim["at_ns"])) / 1e9, max(_STALE_S, _STALE_BLOCKS * self._gates.block_s)
        old = f"the last interim analysis is {age_s:.0f} s old; the limit is {limit_s:g} s"
        return old if age_s > limit_s else None


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
