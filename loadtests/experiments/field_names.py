"""The names that serving benchmarks use on their command lines, turned into settings of an experiment.

The meaning is that of `vllm bench serve`: --request-rate in requests/s with `inf` for all at once, --burstiness as the
shape of the gamma law, --max-concurrency as the most requests under way, --num-prompts as how many are sent, and
--goodput as limits in ms that each good request meets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from analysis.settings.gate_limits import Goodput
from servers.complaint import ConfigError
from servers.fields import read

# Settings that say when requests start, and that another way to say it replaces.
_ARRIVALS = (
    *("arrivals", "rate", "rates", "burstiness", "concurrency", "pause_s", "num_prompts"),
    *("max_concurrency", "step_s", "settle_s", "time_scale", "trace_start_s"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldFlags:
    """What was given on the command line; None or empty where nothing was."""

    request_rate: float | None = None
    burstiness: float | None = None
    max_concurrency: int | None = None
    num_prompts: int | None = None
    goodput: Sequence[str] = ()

    def change(self, table: dict[str, Any]) -> None:
        """The experiment's table has the settings that the flags mean. What contradicts raises ConfigError."""
        if self == FieldFlags():
            return
        if self.goodput:
            given = table.get("goodput")
            kept = {key: given[key] for key in ("attainment_pct",) if isinstance(given, dict) and key in given}
            table["goodput"] = {**kept, **parse_goodput_flag(self.goodput)}
        traffic = table.setdefault("traffic", {})
        if not isinstance(traffic, dict):
            return  # which is refused when the table is read
        if self.request_rate is not None:
            self._set_rate(traffic, self.request_rate)
        elif self.num_prompts is not None:
            self._set_count(traffic, self.num_prompts)
        if self.burstiness is not None:
            if traffic.get("arrivals", "poisson") == "poisson":
                traffic["arrivals"] = "gamma"
            traffic["burstiness"] = self.burstiness
        if self.max_concurrency is not None and self.request_rate != math.inf:
            traffic["max_concurrency"] = self.max_concurrency

    def _set_rate(self, traffic: dict[str, Any], rate: float) -> None:
        if traffic.get("arrivals") == "trace" and traffic.get("workload", "conversation") != "trace":
            traffic.pop("trace", None)  # which gave the times alone
        for key in _ARRIVALS:
            traffic.pop(key, None)
        if math.isinf(rate):
            slots = self.max_concurrency or self.num_prompts
            if slots is None:
                raise ConfigError(
                    "--request-rate inf sends everything at once: say how much with --num-prompts, or how much may "
                    "be under way with --max-concurrency"
                )
            if self.burstiness is not None:
                raise ConfigError("--burstiness has no meaning with --request-rate inf: leave one out")
            traffic |= {"arrivals": "closed", "concurrency": slots}
            if self.num_prompts is not None:
                traffic |= {"num_prompts": self.num_prompts, "concurrency": min(slots, self.num_prompts)}
            return
        traffic |= {"arrivals": "poisson", "rate": rate}
        if self.num_prompts is not None:
            self._set_count(traffic, self.num_prompts)

    def _set_count(self, traffic: dict[str, Any], count: int) -> None:
        traffic["num_prompts"] = count
        rate = traffic.get("rate")
        if isinstance(rate, int | float) and rate > 0:
            sending_s = long_enough(count, float(rate), self.burstiness or 1.0)
            traffic["duration_s"] = sending_s + float(traffic.get("rampup_s", 0))


def long_enough(count: int, rate: float, burstiness: float) -> float:
    """Seconds in which `count` arrivals at `rate` requests/s almost surely come: six standard deviations more."""
    return math.ceil((count + 6 * math.sqrt((count + 1) / min(burstiness, 1.0)) + 6) / rate)


def parse_goodput_flag(parts: Sequence[str]) -> dict[str, float]:
    """Return {"ttft": 200.0} of ["ttft:200"], with e2el as e2e. Raises ConfigError."""
    limits: dict[str, float] = {}
    for part in parts:
        name, _, value = part.partition(":")
        try:
            limits["e2e" if name == "e2el" else name] = float(value)
        except ValueError:
            raise ConfigError(f'--goodput "{part}" is not NAME:MS: give one such as ttft:200') from None
    return read(Goodput, limits, where="--goodput").limits
