"""What follows for an experiment from what its arms are asked for: tokens, or the vector of a text."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from analysis.records.tables import RecordError
from analysis.settings.metrics import check_defined
from analysis.settings.slo_targets import parse_slo
from loadtests.experiments.config_errors import as_config_error
from loadtests.traffic.lengths import workloads_of
from servers.fields import ConfigError

if TYPE_CHECKING:
    from loadtests.experiments.model import Experiment

# What has no meaning for one of the tasks, with why and what to do.
_OF_ANSWERS = 'an embedding has no answer of tokens: remove {key}, or use model.task = "generate"'
_OF_SESSIONS = "an embedding has no next turn: remove {key}"
_EMBED_LEAVES_OUT = (
    ("traffic", ("turns_mean", "think_time_s"), _OF_SESSIONS),
    ("traffic", ("ignore_eos",), _OF_ANSWERS),
    ("engine", ("max_new_tokens",), _OF_ANSWERS),
    ("parity", ("tokens", "texts", "max_kl", "max_different"), _OF_ANSWERS),
)


def check_task(experiment: Experiment) -> None:
    """All arms are asked for the same, and traffic, targets and gates fit it. Otherwise ConfigError."""
    task = experiment.task
    for index, arm in enumerate(experiment.own_arms):
        if arm.config.model.task != task:
            raise ConfigError(
                f'arms[{index}].model.task is "{arm.config.model.task}" but [model] says "{task}": one traffic is sent '
                "to all arms, so set model.task at the top alone"
            )
    workload = experiment.traffic.workload
    names = [*workloads_of(task), "trace"]
    if workload not in names:
        raise ConfigError(f'traffic.workload is "{workload}" but model.task is "{task}": use {", ".join(names)}')
    if task == "generate":
        _leave_out(
            experiment, "parity", ("min_cosine",), 'it compares vectors: remove {key}, or use model.task = "embed"'
        )
        return
    if experiment.external_arms:
        raise ConfigError(
            f'arm "{experiment.external_arms[0].name}" is external and model.task is "embed": external arms are asked '
            "for tokens alone, so leave it out"
        )
    if experiment.traffic.prompts == "chat":
        raise ConfigError(
            'traffic.prompts is "chat" and a text to embed is no chat: use traffic.prompts = "ids" or "text"'
        )
    for table, keys, why in _EMBED_LEAVES_OUT:
        _leave_out(experiment, table, keys, why)
    with as_config_error(RecordError):
        check_defined(experiment.gates.metrics, task, "gates.metrics")
        check_defined((target.metric for target in parse_slo(experiment.slo)), task, "slo")
        check_defined(experiment.goodput.limits, task, "goodput")


def _leave_out(experiment: Experiment, table: str, names: tuple[str, ...], why: str) -> None:
    settings: Any = getattr(experiment, table)
    for item in fields(settings):
        if item.name in names and (value := getattr(settings, item.name)) != item.default:
            raise ConfigError(f"{table}.{item.name} is {json.dumps(value)} but {why.format(key=item.name)}")
