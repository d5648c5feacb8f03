"""An experiment as a ramp of its candidate, and the run of it with the traffic of the experiment."""

from __future__ import annotations

from loadtests.experiments.model import Experiment
from loadtests.trials.context import TrialContext
from loadtests.trials.ramp_control import RampControl
from loadtests.trials.run import Orchestrator
from loadtests.trials.steering import Steering
from servers.complaint import ConfigError


def ramped(experiment: Experiment, *, at_most_s: float | None = None) -> Experiment:
    """The experiment as a ramp of its candidate beside its control: split by weights, looked at after every block.

    Raises ConfigError where it cannot be one.
    """
    limits = experiment.ramp
    names = [arm.name for arm in experiment.arms if not arm.control]
    candidate = limits.candidate or (names[0] if len(names) == 1 else "")
    if candidate not in names:
        given = f'is "{limits.candidate}"' if limits.candidate else "is not given"
        raise ConfigError(
            f"ramp.candidate {given}: name one of {', '.join(names)}, such as ramp.candidate = {names[0]}"
        )
    if experiment.external_arms:
        raise ConfigError(
            f'arm "{experiment.external_arms[0].name}" is external and goes direct: a ramp moves the traffic of arms '
            "that tailgate starts behind its own splitter"
        )
    if experiment.traffic.direct:
        raise ConfigError("traffic.direct = true goes past the splitter, whose weights a ramp moves: leave it out")
    control = experiment.control.name
    arms = tuple(
        arm.replace(weight=int(arm.name == control)) for arm in experiment.arms if arm.name in (control, candidate)
    )
    duration_s = min(limits.longest_s, at_most_s or limits.longest_s)
    return experiment.replace(
        arms=arms,
        traffic={**dict(experiment.traffic), "design": "split", "duration_s": duration_s},
        trials=experiment.trials.replace(count=1),
        gates=experiment.gates.model_copy(update={"sequential": True}),
        ramp=limits.model_copy(update={"candidate": candidate}),
    )


class RampRun(Orchestrator):
    """Runs an experiment that `ramped` has made, as one trial."""

    def _steering(self, context: TrialContext) -> Steering | None:
        assert self._judge is not None
        return RampControl(context.folder.parent, self.experiment, judge=self._judge)
