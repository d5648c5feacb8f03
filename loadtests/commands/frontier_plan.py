"""The experiment that `tailgate frontier` runs: of any experiment, one whose loads rise in steps, with enough arms.

Where the experiment has the control alone, or where it is asked for, the arms are the standard set: every prompt padded
to one length, buckets with the ladder that pads the traffic's lengths least, and dynamic shapes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from analysis.frontier.search import Left
from analysis.judging.load_steps import requests_to_see
from analysis.records.tables import RecordError
from analysis.settings.gate_limits import GateLimits, Goodput, usual_for
from analysis.settings.slo_targets import parse_slo
from analysis.statistics.exposure import ExposureError, best_ladder
from loadtests.experiments.config_errors import as_config_error
from loadtests.experiments.model import Experiment
from loadtests.experiments.reading import from_table, load_table
from loadtests.experiments.toml_limits import table_of
from loadtests.trials.preflight import check_arm
from loadtests.trials.trial_schedule import TrialSchedules
from servers.config import ArmConfig
from servers.fields import ConfigError
from servers.ladders import default_lengths

STANDARD = ("compiled-padded", "compiled-bucketed", "compiled-dynamic")
_STEPS, _STEP_S, _SETTLE_S = 8, 30.0, 10.0
_LONGEST_STEP_S = 300.0
_BELOW, _ABOVE = 4.0, 8.0  # times the rate of an experiment that names one
_SHORTEST_TRIAL_S, _LONGEST_TRIAL_S, _MOST_RPS = 0.001, 1e7, 1e9  # as traffic.duration_s and traffic.rates have it
_OF_ONE_RATE = ("rate", "burstiness", "design", "duration_s")
_OF_ARRIVALS = {"trace": ("time_scale", "trace_start_s"), "closed": ("concurrency", "pause_s")}
_LISTED = ("piecewise", "ramp", "steps")
_SHARED_KEYS = ("replicas", "device", "model", "engine")


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierPlan:
    """An experiment to search, and the arms of the standard set that do not fit its model or device."""

    experiment: Experiment
    dropped: tuple[Left, ...] = ()


def frontier_plan(
    source: str | Path,
    *,
    settings: Sequence[str] = (),
    seed: int | None = None,
    slo: Sequence[str] = (),
    standard: bool = False,
) -> FrontierPlan:
    """The experiment in `source` as a search. ConfigError for one that is none, or that `tailgate run` would refuse."""
    table = load_table(source, settings=settings, seed=seed, slo=slo)
    arms = table.get("arms", [])
    tables = isinstance(arms, list) and all(isinstance(arm, dict) for arm in arms)
    control = _control(arms) if tables and (standard or len(arms) < 2) else None
    if control is not None:
        # Beside its double the control is as `run` would have it.
        table["arms"] = [control, {**control, "name": _another_name(control), "control": False}]
    traffic, share = table_of(table, "traffic"), _allowed_share(table)
    _own(from_table({**table, "traffic": _as_given(traffic)}))
    # A search starts as many trials as its budget has time for.
    table |= {"traffic": _in_steps(traffic, share), "trials": {**table_of(table, "trials"), "count": 1}}
    experiment = from_table(table)
    if control is None:
        return FrontierPlan(experiment=experiment)
    check_arm(next(arm.config for arm in experiment.own_arms if arm.control))
    return _with_standard_arms(table, control)


def asks_for_verdicts(experiment: Experiment) -> bool:
    """Whether the experiment sets any limit of a gate. What is required of blocks and of the load generator is none."""
    usual = GateLimits.read(usual_for(experiment.task))
    other = {name: getattr(usual, name) for name in ("block_s", "alpha", "max_generator_lag_ms")}
    return experiment.gates.model_copy(update=other) != usual


def _own(experiment: Experiment) -> Experiment:
    if experiment.external_arms:
        arm = experiment.external_arms[0]
        raise ConfigError(
            f'arm "{arm.name}" is external (kind = "{arm.kind}"), and a frontier starts its arms afresh: leave it out, '
            'or use `tailgate run` with traffic.arrivals = "saturation"'
        )
    return experiment


def _allowed_share(table: Mapping[str, Any]) -> float:
    """The smallest share of requests that an objective of the experiment lets miss; 1 where there is none."""
    with as_config_error(RecordError):
        shares = [target.allowed_share for target in parse_slo(table_of(table, "slo"))]
        attainment = Goodput.read(table_of(table, "goodput")).attainment
    shares += [1.0 - attainment] if attainment is not None else []
    return min((share for share in shares if share > 0), default=1.0)


def _as_given(traffic: Mapping[str, Any]) -> dict[str, Any]:
    """The [traffic] table without what is for the search alone, as `tailgate run` would send it: nothing that a search
    replaces is thrown away unread."""
    arrivals = traffic.get("arrivals", "poisson")
    if arrivals == "saturation":
        return dict(traffic)
    of_search = ("step_s", "settle_s") if arrivals in _LISTED else ("step_s", "settle_s", "rates")
    given = {key: value for key, value in traffic.items() if key not in of_search}
    if arrivals == "piecewise" and _is_range(traffic.get("rates")):
        given["arrivals"] = "ramp"
    if arrivals in ("poisson", "gamma") and "rate" not in given:
        given["rate"] = 1.0  # traffic.rates may bring the loads
    return {"duration_s": _LONGEST_TRIAL_S, **given}


def _is_range(rates: object) -> bool:
    return isinstance(rates, (list, tuple)) and not any(isinstance(rate, (list, tuple)) for rate in rates)


def _in_steps(traffic: Mapping[str, Any], allowed_share: float) -> dict[str, Any]:
    """The [traffic] table with loads that rise in steps: its own, or around its rate. These are as long as it takes at
    that rate until a step without a miss speaks for an objective that lets `allowed_share` miss."""
    arrivals = traffic.get("arrivals", "poisson")
    if arrivals == "saturation":
        return dict(traffic)
    one_rate = arrivals in ("poisson", "gamma")
    rate = float(traffic["rate"]) if one_rate and "rate" in traffic else 0.0
    if not traffic.get("rates") and not rate:
        what = "neither traffic.rate nor traffic.rates is given" if one_rate else f'traffic.arrivals is "{arrivals}"'
        raise ConfigError(
            f"{what} and a frontier raises the load in steps: give --set traffic.rates=[LOWEST,HIGHEST] in requests/s"
        )
    dropped = (*_OF_ONE_RATE, *_OF_ARRIVALS.get(arrivals, ()))
    searched = {**{key: value for key, value in traffic.items() if key not in dropped}, "arrivals": "saturation"}
    if "step_s" not in searched:
        seen_s = requests_to_see(allowed_share) / rate if rate else 0.0
        wanted_s = _seconds(searched, "settle_s", _SETTLE_S) + seen_s
        searched["step_s"] = max(_STEP_S, math.ceil(min(_LONGEST_STEP_S, wanted_s)))
    searched.setdefault("rates", [float(f"{rate / _BELOW:.3g}"), float(f"{min(rate * _ABOVE, _MOST_RPS):.3g}")])
    steps_s = _STEPS * (_seconds(searched, "step_s", _STEP_S) or _STEP_S)
    searched["duration_s"] = max(_SHORTEST_TRIAL_S, _seconds(searched, "rampup_s", 0.0) + steps_s)
    if searched["duration_s"] > _LONGEST_TRIAL_S:
        raise ConfigError(
            f"traffic.step_s is {searched['step_s']:g}, and a start of {_STEPS} such steps takes {steps_s:g} s; the "
            f"limit is {_LONGEST_TRIAL_S:g}: give a shorter one"
        )
    return searched


def _seconds(traffic: Mapping[str, Any], key: str, usual: float) -> float:
    """The seconds under `key`; `usual` where there are none, or none that are usable, which reading the experiment
    refuses."""
    given = traffic.get(key, usual)
    usable = isinstance(given, (int, float)) and math.isfinite(given) and given >= 0
    return float(given) if usable else usual


def _control(arms: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The table of the control: that which says so, else the first, else an eager arm."""
    given = arms or [{"preset": "eager"}]
    control = {**next((arm for arm in given if arm.get("control") is True), given[0]), "control": True}
    if control.get("kind", "tailgate") != "tailgate":
        raise ConfigError(
            f'the control is external (kind = "{control["kind"]}"), and the standard set is of arms that tailgate '
            "starts: name the arms in the experiment"
        )
    return control


def _another_name(control: Mapping[str, Any]) -> str:
    return next(name for name in STANDARD if name != control.get("name", control.get("preset")))


def _with_standard_arms(table: Mapping[str, Any], control: Mapping[str, Any]) -> FrontierPlan:
    """The control with the standard set beside it, without what does not fit."""
    shared = {key: control[key] for key in _SHARED_KEYS if key in control}
    arms, dropped = [dict(control)], []
    for preset in STANDARD:
        arm = {**shared, "name": preset, "preset": preset}
        try:
            pair = from_table({**table, "arms": [control, arm]})
            own = next(item for item in pair.own_arms if not item.control)
            check_arm(own.config)
            if preset == "compiled-bucketed":
                arm["shapes"] = {"length_ladder": list(_best_lengths(pair, own.config))}
                from_table({**table, "arms": [control, arm]})
        except ConfigError as error:
            dropped.append(Left(arm=preset, reason=f"was not tried: {error}"))
        else:
            arms.append(arm)
    if len(arms) == 1:
        raise ConfigError(f"no policy of the standard set fits: {dropped[0].arm} {dropped[0].reason}")
    return FrontierPlan(experiment=from_table({**table, "arms": arms}), dropped=tuple(dropped))


def _best_lengths(experiment: Experiment, arm: ArmConfig) -> tuple[int, ...]:
    """The ladder, with as many steps as the usual one, that pads the lengths of the traffic least."""
    longest = arm.engine.prefill_tokens
    usual = default_lengths(longest)
    lengths = TrialSchedules.of(experiment).draw(1).ints("prompt_tokens")
    with as_config_error(ExposureError):
        best = best_ladder(np.minimum(lengths, longest), len(usual), multiple=usual[0], last=longest)
    return tuple(best.ladder)
