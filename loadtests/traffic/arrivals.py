"""When requests start: open-loop schedules as sorted integer nanoseconds from the start of the trial.

All but `replay` are one renewal process at unit rate, stretched through the integral of the rate (time change). So for
one generator state a higher rate gives the same pattern, only faster, and a longer duration extends a schedule.

The first gap has the equilibrium law of the gaps, so that the expected count is the integral of the rate for any
burstiness. With an ordinary first gap it would be about (CV^2 - 1) / 2 more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tailgate.analysis.arrays import Bools, Floats, Ints
from tailgate.loadtests.traffic.settings import TrafficConfig
from tailgate.servers.complaint import ConfigError

MAX_REQUESTS = 20_000_000  # a schedule is held in memory; above this a setting is a slip of the pen
HIGHEST_RATE = 1e6  # of a saturation search
_CHUNK = 1 << 22


def staircase(low: float, high: float, steps: int) -> tuple[float, ...]:
    """Return the rates of a saturation search's first trial: `steps` of them with equal ratios between neighbours."""
    ratio = (high / low) ** (1 / (steps - 1))
    return tuple(rounded(low * ratio**index) for index in range(steps))


def rounded(rate: float) -> float:
    """Return the rate to four digits: what is sent is what is written."""
    return float(f"{rate:.4g}")


def rate_profile(config: TrafficConfig, levels: Sequence[float] = ()) -> Floats:
    """Return rows (start_s, end_s, requests/s) that touch and rise, shape (stretches, 3). `levels` are the rates of a
    saturation search."""
    starts: Sequence[float] = (0.0,)
    rates: Sequence[float] = (config.rate,)
    if config.arrivals == "piecewise":
        starts, rates = zip(*config.piecewise_rates, strict=True)
    elif config.arrivals == "saturation":
        rates = levels
        starts = [0.0, *(config.rampup_s + index * config.step_s for index in range(1, len(rates)))]
    return np.array([starts, [*starts[1:], config.duration_s], rates]).T


def renewals(profile: Floats, *, burstiness: float = 1.0, rng: np.random.Generator) -> Ints:
    """Return offsets (ns), possibly none, of a renewal process under the rates of `profile`.

    At a constant rate its gaps have a gamma law of mean 1/rate and shape `burstiness`, as in vLLM's benchmark.
    """
    start, end, rate = profile.T
    reached = np.concatenate([[0.0], np.cumsum(rate * (end - start))])
    total = float(reached[-1])
    if total > MAX_REQUESTS:
        raise ConfigError(
            f"the schedule would hold about {total:,.3g} requests, and the limit is {MAX_REQUESTS:,}: lower "
            "traffic.rate or traffic.duration_s"
        )
    events = _unit_renewals(total, burstiness, rng)
    segment = np.minimum(np.searchsorted(reached, events, side="right") - 1, len(start) - 1)
    at_s = np.minimum(start[segment] + (events - reached[segment]) / rate[segment], end[segment])
    return np.maximum.accumulate(np.minimum(np.floor(at_s * 1e9).astype(np.int64), math.ceil(end[-1] * 1e9) - 1))


def replay(offsets_ns: Ints, duration_s: float, *, time_scale: float = 1.0, start_s: float = 0.0) -> tuple[Ints, slice]:
    """Return offsets (ns) of a trace's requests from `start_s` on, stretched by `time_scale`, and which rows they are.

    `start_s` counts in the trace's own time. A trace that ends before `duration_s` is an error: the load would fall
    silent unnoticed.
    """
    held_s = max(0.0, (float(offsets_ns[-1]) / 1e9 - start_s) * time_scale)
    if held_s < duration_s:
        raise ConfigError(
            f"the trace has {held_s:.6g} s of traffic from trace_start_s = {start_s:g} at time_scale = {time_scale:g} "
            f"but duration_s is {duration_s:g}: lower duration_s or trace_start_s, or raise time_scale"
        )
    start_ns = round(start_s * 1e9)
    first = int(np.searchsorted(offsets_ns, start_ns, side="left"))
    offsets = offsets_ns[first:] - start_ns
    if time_scale != 1.0:
        offsets = np.floor(offsets * time_scale).astype(np.int64)
    count = int(np.searchsorted(offsets, round(duration_s * 1e9), side="left"))
    return offsets[:count], slice(first, first + count)


def rampup_kept(offsets_ns: Ints, rampup_s: float, *, rng: np.random.Generator) -> Bools:
    """Return True for requests that stay, with probability t / rampup_s at t < rampup_s. Shape (n,)."""
    # One draw a request whatever its time, so that a longer ramp-up changes nothing else.
    draws = rng.random(len(offsets_ns))
    return draws * (rampup_s * 1e9) <= offsets_ns.astype(np.float64)


def _unit_renewals(total: float, burstiness: float, rng: np.random.Generator) -> Floats:
    """Return rising event times in [0, total) of a stationary renewal process with gamma gaps of mean 1. Shape (n,)."""
    # Equilibrium law of the first gap: a uniform share of a length-biased gap, and the length-biased
    # Gamma(k) is Gamma(k + 1).
    last = float(rng.random() * rng.standard_gamma(burstiness + 1.0) / burstiness)
    parts = [np.array([last])]
    while last < total:
        remaining = total - last
        count = min(_CHUNK, int(remaining + 6 * math.sqrt(remaining / burstiness)) + 16)
        gaps = (
            rng.standard_exponential(count) if burstiness == 1.0 else rng.standard_gamma(burstiness, count) / burstiness
        )
        # Added into the first gap, not afterwards: the sum then does not depend on where the chunks end.
        gaps[0] += last
        part = np.cumsum(gaps)
        parts.append(part)
        last = float(part[-1])
    events = np.concatenate(parts)
    return events[: np.searchsorted(events, total, side="left")]
