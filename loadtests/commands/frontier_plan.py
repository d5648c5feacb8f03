"""The experiment that `tailgate frontier` runs: of any experiment, one whose loads rise in steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tailgate.analysis.judging.load_steps import requests_to_see
from tailgate.analysis.settings.slo_targets import parse_slo
from tailgate.loadtests.experiments.files import table_of
from tailgate.loadtests.experiments.model import Experiment
from tailgate.loadtests.experiments.reading import from_table, load_table
from tailgate.loadtests.traffic.arrivals import HIGHEST_RATE
from tailgate.servers.complaint import ConfigError

_STEPS, _STEP_S, _LONGEST_STEP_S = 8, 30.0, 300.0
_BELOW, _ABOVE = 4.0, 8.0  # times the rate of an experiment that names one
_LONGEST_TRIAL_S = 1e7  # as traffic.duration_s has it
# What only traffic has that is no search: how it arrives, and for how long.
_OF_OTHER_TRAFFIC = ("rate", "burstiness", "design", "duration_s", "time_scale", "trace_start_s")


def frontier_plan(source: str | Path, *, settings: Sequence[str] = ()) -> Experiment:
    """Return the experiment in `source` as a search. Raises ConfigError for one that is none."""
    table = load_table(source, settings=settings)
    given = table_of(table, "traffic")
    # A search starts as many trials as its budget has time for.
    table |= {"traffic": _searched(given), "trials": {**table_of(table, "trials"), "count": 1}}
    experiment = from_table(table)
    if experiment.external_arms:
        arm = experiment.external_arms[0]
        raise ConfigError(
            f'arm "{arm.name}" is external (kind = "{arm.kind}"), and a frontier starts its arms afresh: leave it out, '
            'or use `tailgate run` with traffic.arrivals = "saturation"'
        )
    if given.get("arrivals") != "saturation":
        table["traffic"] |= _steps(experiment, given)
        experiment = from_table(table)
    return experiment


def _searched(traffic: Mapping[str, Any]) -> dict[str, Any]:
    """Return the [traffic] table with loads that rise in steps: its own, or around its rate."""
    arrivals = traffic.get("arrivals", "poisson")
    if arrivals == "saturation":
        return dict(traffic)
    kept = {key: value for key, value in traffic.items() if key not in _OF_OTHER_TRAFFIC}
    if not traffic.get("rates"):
        rate = traffic.get("rate") if arrivals in ("poisson", "gamma") else None
        if not isinstance(rate, (int, float)) or not 0 < rate <= HIGHEST_RATE:
            what = f"traffic.rate is {rate}" if "rate" in traffic else f'traffic.arrivals is "{arrivals}"'
            raise ConfigError(
                f"{what}, and a frontier raises the load in steps: give --set traffic.rates=[LOWEST,HIGHEST] in "
                "requests/s"
            )
        kept["rates"] = [float(f"{rate / _BELOW:.3g}"), float(f"{min(rate * _ABOVE, HIGHEST_RATE):.3g}")]
    return {**kept, "arrivals": "saturation", "duration_s": _LONGEST_TRIAL_S}


def _steps(experiment: Experiment, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return how long a step and a start take, of traffic that is no search itself.

    Unless step_s is given, a step is as long as it takes at the rate until one without a miss speaks for every
    objective.
    """
    traffic = experiment.traffic
    step_s, rate = traffic.step_s, given.get("rate")
    if "step_s" not in given:
        shares = [target.allowed_share for target in parse_slo(experiment.slo)]
        least = min((share for share in shares if share > 0), default=1.0)
        seen_s = requests_to_see(least) / rate if isinstance(rate, (int, float)) and rate > 0 else 0.0
        step_s = max(_STEP_S, float(round(min(_LONGEST_STEP_S, traffic.settle_s + seen_s) + 0.5)))
    return {"step_s": step_s, "duration_s": traffic.rampup_s + _STEPS * step_s}
