"""A ramp of users' traffic: servers and splitter run already, and outlive the program that moves the weights.

A controller that is killed leaves the splitter with its weights. The next ramp begins with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from analysis.records.weight_journal import BY_OTHERS
from analysis.settings.ramp_limits import RampLimits
from loadtests.experiments.model import Experiment
from loadtests.traffic.schedule import SCHEDULE, Schedule
from loadtests.trials.context import TrialContext
from loadtests.trials.live_page import LivePage
from loadtests.trials.progress import Status
from loadtests.trials.ramp_control import RampControl
from loadtests.trials.run import Orchestrator
from loadtests.trials.run_directory import check_writable
from loadtests.trials.steering import Steered, Steering
from loadtests.trials.trial_facts import TrialFacts
from loadtests.trials.users_trial import UsersTrial, observed_of
from loadtests.trials.weights import UNANSWERED, EnvoySplitter, Splitter, WeightController, splitter_of
from servers.clock import now_ns
from servers.fields import ConfigError
from servers.splitter.admin import Admin, SplitterError
from servers.splitter.live import configured_shares, live_shares, log_path, replica_addresses


class UsersRamp(Orchestrator):
    """Ramps the experiment that `ramped` has made, whose requests users send."""

    def __init__(
        self,
        experiment: Experiment,
        *,
        out: Path,
        status: Status | None = None,
        page: LivePage | None = None,
    ) -> None:
        super().__init__(experiment, out=out, status=status, page=page)
        self._splitter: Splitter | None = None
        self._log = ""
        self._arms: dict[str, tuple[str, ...]] = {}
        self._step = 0

    def prepare(self) -> None:
        """The splitter answers, splits over both arms and tells what is needed. Otherwise ConfigError."""
        users, names = self.experiment.users, [arm.name for arm in self.experiment.arms]
        users.check()
        self.experiment.security.check()
        check_writable(self._out)
        try:
            self._splitter = splitter_of(users, names)
            self._log, self._arms = users.access_log, dict(users.addresses)
            if users.admin:
                self._ask_envoy(Admin(users.admin))
            weights = self._splitter.shares().weights if self._splitter is not None else dict.fromkeys(names, 0)
        except SplitterError as error:
            raise ConfigError(str(error)) from None
        for name in names:
            if name not in weights:
                raise ConfigError(f'users\' traffic is not split over "{name}": it goes to {", ".join(weights)}')
        if not self._log:
            raise ConfigError(
                "the split writes no request log: start it with --request-log FILE, or give users.access_log"
            )
        if users.moved_by == "tailgate":
            self._step = step_of(weights, self.experiment.ramp, control=self.experiment.control.name)

    def _ask_envoy(self, admin: Admin) -> None:
        """What the split itself knows, where the experiment does not say it."""
        self._log = self._log or log_path(admin)
        for arm, addresses in replica_addresses(admin).items():
            if arm in (item.name for item in self.experiment.arms):
                self._arms.setdefault(arm, addresses)
        candidate = self.experiment.ramp.candidate
        moves = isinstance(self._splitter, EnvoySplitter) and self.experiment.users.moved_by == "tailgate"
        if moves and (percent := live_shares(admin).shadows.get(candidate)):
            raise ConfigError(
                f"{candidate} gets copies of {percent:g} % of the requests: end them first, by tailgate split --admin "
                f"{admin.address} --set-shadow {candidate}=0%"
            )
        if moves and (share := configured_shares(admin).weights.get(candidate, 0)):
            # Envoy forgets live weights when it starts anew.
            raise ConfigError(
                f"the split gives {candidate} weight {share} whenever it starts anew: start it with "
                f"--weight {candidate}=0, so that a restart gives it nothing"
            )

    def _run_trials(self, run_dir: Path) -> None:
        folder = run_dir / "trial-01"
        context = TrialContext(
            experiment=self.experiment,
            number=1,
            folder=folder,
            facts=self._facts(),
            status=self.status,
            check=self._check,
        )
        observed = observed_of(
            context,
            log=Path(self._log),
            admin=self.experiment.users.admin,
            arms=self._arms,
            since_ns=now_ns(),
        )
        steering = self._steering(context)
        assert steering is not None
        self._running = trial = UsersTrial(context, observed=observed, splitter=self._splitter, steering=steering)
        clean = False
        try:
            trial.run()
            clean = True
        finally:
            trial.close(hurry=not clean)

    def _facts(self) -> TrialFacts:
        """What is planned, which is nothing."""
        traffic = self.experiment.traffic
        nothing = Schedule(
            table=SCHEDULE.empty_table(),
            design=traffic.design,
            arms=tuple(arm.name for arm in self.experiment.arms),
            trial=1,
            seed=self.experiment.seed,
            duration_s=traffic.duration_s,
            block_s=traffic.block_s,
            dropped={},
        )
        facts = TrialFacts.of(self.experiment, 1, nothing)
        facts.planned = {}
        facts.arms = [
            {**row, "replicas": [f"{row['name']}-{index}" for index in range(len(self._arms.get(row["name"], ())))]}
            for row in facts.arms
        ]
        return facts

    def _steering(self, context: TrialContext) -> Steering | None:
        assert self._judge is not None
        run_dir, control = context.folder.parent, self.experiment.control.name
        if self.experiment.users.moved_by == "others":
            return Onlooker(run_dir, control=control, candidate=self.experiment.ramp.candidate)
        return RampControl(
            run_dir,
            limits=self.experiment.ramp,
            gates=self.experiment.gates,
            control=control,
            judge=self._judge,
            step=self._step,
        )


class Onlooker:
    """Records what weights another program gives the arms, and moves none."""

    moves_weights = True

    def __init__(self, run_dir: Path, *, control: str, candidate: str) -> None:
        self._weights = WeightController(run_dir, (control, candidate), others=BY_OTHERS, step=0)

    def poll(self, trial: Steered) -> None:
        """Record the weights in force."""
        if trial.splitter is not None:
            try:
                self._weights.watch(trial.splitter)
            except UNANSWERED as error:
                trial.context.status.detail = f"the splitter does not answer: {error}"


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
