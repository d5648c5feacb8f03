"""How the parts of an experiment must fit together. A contradiction raises ConfigError."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tailgate.analysis.settings.metrics import check_defined
from tailgate.analysis.settings.slo_targets import parse_slo
from tailgate.analysis.wording import counted
from tailgate.loadtests.traffic.lengths import FIT_OF
from tailgate.servers.complaint import ConfigError
from tailgate.servers.config import Task
from tailgate.servers.fields import as_toml

if TYPE_CHECKING:
    from tailgate.loadtests.experiments.model import Experiment, ExperimentArm

# What is of no use for a task.
_LEFT_OUT: Mapping[Task, Mapping[str, tuple[str, ...]]] = {
    "embed": {
        "traffic": ("ignore_eos",),
        "engine": ("max_new_tokens",),
        "parity": ("tokens", "texts", "max_kl", "max_different"),
    },
    "generate": {"parity": ("min_cosine",)},
}


def check_whole(experiment: Experiment) -> None:
    """Raise ConfigError unless the parts of the experiment fit together."""
    _check_arms(experiment.arms)
    _check_task(experiment)
    if not experiment.compare_models:
        _check_comparable(
            experiment, "make them equal, or set compare_models = true at the top if that is the question"
        )
    if experiment.parity.full:
        check_parity(experiment)
    if experiment.external_arms and (why := next(_ruled_out(experiment), None)):
        raise ConfigError(f'arm "{experiment.external_arms[0].name}" is external and {why}')
    _check_design(experiment)
    _check_security(experiment)
    _check_pressure(experiment)
    traffic, targets = experiment.traffic, parse_slo(experiment.slo)
    if traffic.arrivals == "saturation" and not targets:
        raise ConfigError(
            '[slo] is empty, so nothing says which load an arm holds (traffic.arrivals is "saturation", as in a '
            "frontier): add a target, such as --set slo.p99_ttft_ms=500"
        )
    if experiment.gates.sequential and traffic.arrivals == "saturation":
        raise ConfigError(
            'gates.sequential (--until-decided) ends the run once it is decided, but traffic.arrivals = "saturation" '
            "asks for its whole length: leave one of the two out"
        )
    with_code = [arm.name for arm in experiment.managed_arms if arm.compile.artifact]
    if with_code and experiment.trials.compile_cache == "shared":
        raise ConfigError(
            f'arms.{with_code[0]}.compile.artifact is set but trials.compile_cache is "shared", so that every arm '
            'would find its code, and it theirs: use trials.compile_cache = "fresh"'
        )


def _check_task(experiment: Experiment) -> None:
    """Raise ConfigError unless all arms are asked for the same, and traffic, targets and gates fit it."""
    task = experiment.task
    for arm in experiment.managed_arms:
        if arm.model.task != task:
            raise ConfigError(
                f'arms.{arm.name}.model.task is "{arm.model.task}" but [model] says "{task}": one traffic is sent '
                "to all arms, so set model.task at the top alone"
            )
    workload = experiment.traffic.workload
    if workload not in (FIT_OF[task], "trace"):
        raise ConfigError(
            f'traffic.workload is "{workload}" but model.task is "{task}": use "{FIT_OF[task]}" or "trace"'
        )
    for table, keys in _LEFT_OUT[task].items():
        settings: Any = getattr(experiment, table)
        for key in keys:
            if (value := getattr(settings, key)) != type(settings).model_fields[key].default:
                raise ConfigError(f'{table}.{key} is {as_toml(value)} but model.task is "{task}": remove {key}')
    if task == "embed":
        check_defined(experiment.gates.metrics, task, "gates.metrics")
        check_defined((target.metric for target in parse_slo(experiment.slo)), task, "slo")


def _check_arms(arms: Sequence[ExperimentArm]) -> None:
    if not 2 <= len(arms) <= 26:
        raise ConfigError(f"arms has {counted(len(arms), 'entry')}: give 2 to 26 [[arms]] tables")
    names = [arm.name for arm in arms]
    if len({name.replace(".", "_") for name in names}) < len(names):  # the splitter's statistics write "_" for "."
        raise ConfigError(
            f'arms have the names {", ".join(names)}: give each a name of its own ("." and "_" count as equal)'
        )
    if (controls := sum(arm.control for arm in arms)) != 1:
        raise ConfigError(
            f"{counted(controls, 'arm')} of {', '.join(names)} have control = true: set it on exactly one, with which "
            "the others are compared"
        )


def check_parity(experiment: Experiment) -> None:
    """Raise ConfigError unless arms are comparable, and what is quantised has texts and a control that is not."""
    if experiment.external_arms:
        raise ConfigError(
            f'arm "{experiment.external_arms[0].name}" is external and parity looks into the arms that it starts: '
            "leave external arms out, or set parity.full = false"
        )
    _check_comparable(experiment, "make them equal, as parity compares policies alone")
    control = next(arm for arm in experiment.managed_arms if arm.control).model
    if control.quantisation != "none":
        raise ConfigError(
            f'the control "{experiment.control.name}" has model.quantisation "{control.quantisation}" and parity holds '
            "all arms to it: make an arm without quantisation the control, or set parity.full = false"
        )
    if experiment.quantised_arms and not control.id.startswith("random:") and not experiment.parity.texts:
        raise ConfigError(
            f'arm "{experiment.quantised_arms[0].name}" is quantised, so that parity judges it by texts, and '
            "parity.texts names none: give a file with a list of token ids on each line"
        )


def _check_comparable(experiment: Experiment, remedy: str) -> None:
    """Raise ConfigError unless arms differ in `shapes`, `compile` and the quantisation of their weights alone."""
    if experiment.external_arms:
        other_arm = experiment.external_arms[0]
        raise ConfigError(
            f'arms.{other_arm.name} is external (kind = "{other_arm.kind}"): nothing can check that it differs from '
            "the other arms in its policy alone; write compare_models = true at the top of the experiment to compare "
            "them as whole servers"
        )
    control = next(arm for arm in experiment.managed_arms if arm.control)
    for arm in experiment.managed_arms:
        for part in ("model", "engine"):
            for key, value in getattr(arm, part):
                other = getattr(getattr(control, part), key)
                alike = same_kind_of_device(value, other) if key == "device" else value == other
                if not alike and key != "quantisation":  # a treatment, as the policies are
                    raise ConfigError(
                        f"arms.{arm.name}.{part}.{key} is {as_toml(value)} but the control {control.name} has "
                        f'{as_toml(other)}: "{arm.name}" would not be comparable; {remedy}'
                    )


def same_kind_of_device(one: str, other: str) -> bool:
    """Return whether two devices are alike: cuda:0 and cuda:1 are, cpu and cuda are not."""
    return one.partition(":")[0] == other.partition(":")[0]


def _check_design(experiment: Experiment) -> None:
    traffic, arms = experiment.traffic, experiment.arms
    if traffic.design == "split" and sum(arm.weight for arm in arms) == 0:
        raise ConfigError("every arm has weight 0: give at least one arm a weight of 1 or more")
    if traffic.design != "split" and (weighted := next((arm for arm in arms if arm.weight != 1), None)):
        raise ConfigError(
            f'arms.{weighted.name}.weight is {weighted.weight} but traffic.design = "{traffic.design}" does not split '
            'by weight: remove it or use design = "split"'
        )
    # How many machines stand behind the address of an external arm is unknown.
    sizes = {arm.replicas for arm in experiment.managed_arms}
    if traffic.design == "mirrored" and len(sizes) > 1:
        raise ConfigError(
            f"arms have {', '.join(f'{arm.name}: {arm.replicas}' for arm in experiment.managed_arms)} replicas, "
            "but a mirrored design gives each arm the same requests: "
            'make them equal, or use design = "split"'
        )
    own = [arm.name for arm in experiment.managed_arms]
    if traffic.remote_workers and own and experiment.external_arms:
        raise ConfigError(
            f"traffic.remote_workers is {traffic.remote_workers} but {', '.join(own)} would be reached without the "
            "splitter, at an address of this host alone: serve them elsewhere and name them as external arms"
        )
    if traffic.design == "switchback":
        needed = len(arms) * traffic.block_s
        if traffic.duration_s < needed:
            raise ConfigError(
                f"traffic.duration_s is {traffic.duration_s:g} but {len(arms)} arms take turns of block_s = "
                f"{traffic.block_s:g}: give at least {needed:g}"
            )
        if experiment.gates.block_s != traffic.block_s:
            raise ConfigError(
                f"gates.block_s is {experiment.gates.block_s:g} but the switchback has blocks of traffic.block_s = "
                f"{traffic.block_s:g}: remove gates.block_s"
            )


def _check_security(experiment: Experiment) -> None:
    """Refuse TLS and a token of the run's own splitter and arms that are set on one side alone, or without effect."""
    security, splitter = experiment.security, experiment.splitter
    if security.token_env and not experiment.managed_arms:
        raise ConfigError(
            "[security] has a token but every arm is external: give token_env in the [[arms]] table that needs it"
        )
    if security.tls and not splitter.tls_certificate:
        raise ConfigError(
            "[security] says how TLS is done but the run's splitter has none: set splitter.tls_certificate and "
            "tls_key, or remove the tls_ keys (an external arm has its own in its [[arms]] table)"
        )


def _check_pressure(experiment: Experiment) -> None:
    """Refuse pressure that does not weigh on every arm alike."""
    on_cpu = [arm.name for arm in experiment.managed_arms if not arm.model.device.startswith("cuda")]
    if experiment.pressure.gpu_gib and on_cpu:
        raise ConfigError(
            f'pressure.gpu_gib is {experiment.pressure.gpu_gib:g} but arm "{on_cpu[0]}" is on no GPU that is named: '
            "set model.device to cuda or cuda:N, or give pressure.processors"
        )


def _ruled_out(experiment: Experiment) -> Iterator[str]:
    """Yield the settings that an external arm rules out, or that have no effect on it."""
    if experiment.task == "embed":
        yield 'model.task is "embed": external arms are asked for tokens alone, so leave it out'
    if experiment.traffic.design == "split":
        yield (
            'traffic.design is "split": the splitter has only managed arms behind it, so use design = "mirrored" or '
            '"switchback", or judge your own gateway\'s split by its records (tailgate analyze)'
        )
    if experiment.splitter != type(experiment.splitter)():
        yield "[splitter] is set: all arms are dialled directly, so remove the table"
    if turn_s := experiment.machines.processor_turn_s:
        yield f"machines.processor_turn_s is {turn_s:g}: its processes stay where they are, so set it to 0"
    if experiment.pressure.weighs:
        yield "[pressure] weighs on machines of this run: put the same pressure on all arms by hand"
