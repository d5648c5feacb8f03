"""When requests start: open-loop schedules as sorted integer nanoseconds from the start of the trial.

Every schedule is made before the run and never waits for an answer. Each function is pure: it takes a numpy
`Generator` and returns offsets in [0, duration), possibly none. All but `replay` are one renewal process at unit
rate, stretched through the integral of the rate (time change). So for one generator state a higher rate gives the
same pattern, only faster, and a longer duration extends a schedule without changing its beginning.

The first gap is drawn from the equilibrium law of the gaps: the process looks as if it had run for ever, and the
expected count is the integral of the rate exactly, for any burstiness. A process whose first gap is an ordinary one
has about (CV^2 - 1) / 2 requests more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from servers.fields import ConfigError

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

MAX_REQUESTS = 20_000_000  # a schedule is held in memory; above this a setting is a slip of the pen
_CHUNK = 1 << 22


def poisson(rate: float, duration_s: float, *, rng: np.random.Generator) -> IntArray:
    """Offsets (ns) of a Poisson process of `rate` requests/s over `duration_s`."""
    return gamma(rate, 1.0, duration_s, rng=rng)


def gamma(rate: float, burstiness: float, duration_s: float, *, rng: np.random.Generator) -> IntArray:
    """Offsets (ns) of a renewal process with gamma gaps of mean 1/rate and coefficient of variation burstiness^-0.5.

    `burstiness` is the shape of the gamma law, as vLLM's benchmark option of that name has it: 1 is a Poisson
    process, below 1 comes in bursts, above 1 is more even.
    """
    _above_zero("rate", rate, "requests/s")
    _above_zero("duration_s", duration_s, "seconds")
    return _arrivals([0.0], [duration_s], [rate], [rate], burstiness, rng)


def piecewise(
    segments: Sequence[tuple[float, float]], duration_s: float, *, rng: np.random.Generator, burstiness: float = 1.0
) -> IntArray:
    """Offsets (ns) under a rate that is constant from each segment's start to the next: [(start_s, rate), ...].

    The first segment starts at 0 and the last ends at `duration_s`. A rate of 0 is a pause.
    """
    _above_zero("duration_s", duration_s, "seconds")
    if not segments:
        raise ConfigError("piecewise rates are empty: give [[0, rate], [start_s, rate], ...]")
    starts = [float(start) for start, _ in segments]
    rates = [float(rate) for _, rate in segments]
    if starts[0] != 0.0:
        raise ConfigError(f"the first piecewise segment starts at {starts[0]} s: start it at 0")
    for before, after in pairwise(starts):
        if not before < after:
            raise ConfigError(f"piecewise segments start at {before} s and then at {after} s: give rising starts")
    if not starts[-1] < duration_s:
        raise ConfigError(
            f"the last piecewise segment starts at {starts[-1]} s but duration_s is {duration_s}: "
            "start it earlier or raise duration_s"
        )
    return _arrivals(starts, [*starts[1:], duration_s], rates, rates, burstiness, rng)


def ramp(
    start_rate: float, end_rate: float, duration_s: float, *, rng: np.random.Generator, burstiness: float = 1.0
) -> IntArray:
    """Offsets (ns) under a rate that goes linearly from `start_rate` to `end_rate` requests/s over `duration_s`."""
    _above_zero("duration_s", duration_s, "seconds")
    return _arrivals([0.0], [duration_s], [start_rate], [end_rate], burstiness, rng)


def steps(rates: Sequence[float], step_s: float, *, rng: np.random.Generator, burstiness: float = 1.0) -> IntArray:
    """Offsets (ns) under each of `rates` (requests/s) for `step_s` in turn: the staircase that finds saturation."""
    _above_zero("step_s", step_s, "seconds")
    if not rates:
        raise ConfigError("step rates are empty: give [rate, rate, ...]")
    starts = [index * step_s for index in range(len(rates) + 1)]
    return _arrivals(starts[:-1], starts[1:], list(rates), list(rates), burstiness, rng)


def replay(offsets_ns: IntArray, duration_s: float, *, time_scale: float = 1.0, start_s: float = 0.0) -> IntArray:
    """Offsets (ns) of a trace's requests from `start_s` on, times stretched by `time_scale`, cut to `duration_s`.

    `time_scale` 0.5 is twice as fast, 2 half as fast; `start_s` counts in the trace's own time. A trace that ends
    before the window does is an error: the load would fall silent unnoticed.
    """
    rows = replay_window(offsets_ns, duration_s, time_scale=time_scale, start_s=start_s)
    return _stretched(offsets_ns[rows], time_scale, start_s)


def replay_window(offsets_ns: IntArray, duration_s: float, *, time_scale: float = 1.0, start_s: float = 0.0) -> slice:
    """The rows of the trace that `replay` uses, so that their lengths can be taken along. Same arguments and errors."""
    _above_zero("duration_s", duration_s, "seconds")
    _above_zero("time_scale", time_scale, "a factor")
    if not 0 <= start_s < math.inf:
        raise ConfigError(f"trace_start_s is {start_s}: give seconds from 0 on")
    length_s = float(offsets_ns[-1]) / 1e9 if len(offsets_ns) else 0.0
    held_s = max(0.0, (length_s - start_s) * time_scale)
    if held_s < duration_s:
        raise ConfigError(
            f"the trace has {held_s:.6g} s of traffic from trace_start_s = {start_s:g} at time_scale = {time_scale:g} "
            f"but duration_s is {duration_s:g}: lower duration_s or trace_start_s, or raise time_scale"
        )
    first = int(np.searchsorted(offsets_ns, round(start_s * 1e9), side="left"))
    later = _stretched(offsets_ns[first:], time_scale, start_s)
    return slice(first, first + int(np.searchsorted(later, round(duration_s * 1e9), side="left")))


def rampup_kept(offsets_ns: IntArray, rampup_s: float, *, rng: np.random.Generator) -> npt.NDArray[np.bool_]:
    """True for requests that stay when the load rises linearly from nothing over the first `rampup_s`.

    A request at t < rampup_s stays with probability t / rampup_s; later ones always stay. Shape (n,).
    """
    if not 0 <= rampup_s < math.inf:
        raise ConfigError(f"rampup_s is {rampup_s}: give seconds from 0 on")
    # One draw a request whatever its time, so that a longer ramp-up changes nothing else.
    draws = rng.random(len(offsets_ns))
    return draws * (rampup_s * 1e9) <= offsets_ns.astype(np.float64)


def _stretched(offsets_ns: IntArray, time_scale: float, start_s: float) -> IntArray:
    since_start: IntArray = offsets_ns - round(start_s * 1e9)
    if time_scale == 1.0:
        return since_start
    stretched: IntArray = np.floor(since_start * time_scale).astype(np.int64)
    return stretched


def _arrivals(
    starts_s: Sequence[float],
    ends_s: Sequence[float],
    start_rates: Sequence[float],
    end_rates: Sequence[float],
    burstiness: float,
    rng: np.random.Generator,
) -> IntArray:
    """Offsets (ns) under a rate that is linear on each [start, end); segments touch and rise."""
    for rate in (*start_rates, *end_rates):
        if not 0 <= rate < math.inf:
            raise ConfigError(f"rate is {rate}: give requests/s of 0 or more")
    if not 0.001 <= burstiness <= 1e6:
        raise ConfigError(f"burstiness is {burstiness}: give a value from 0.001 to 1000000; 1 is Poisson")
    start = np.asarray(starts_s, dtype=np.float64)
    end = np.asarray(ends_s, dtype=np.float64)
    rate0 = np.asarray(start_rates, dtype=np.float64)
    rate1 = np.asarray(end_rates, dtype=np.float64)
    reached = np.concatenate([[0.0], np.cumsum((rate0 + rate1) / 2 * (end - start))])
    total = float(reached[-1])
    if total <= 0:
        raise ConfigError("every rate is 0: give at least one rate above 0")
    if total > MAX_REQUESTS:
        raise ConfigError(
            f"the schedule would hold about {total:.3g} requests; the limit is {MAX_REQUESTS}: "
            "lower a rate or duration_s"
        )
    events = _unit_renewals(total, burstiness, rng)
    segment = np.minimum(np.searchsorted(reached, events, side="right") - 1, len(start) - 1)
    excess = events - reached[segment]
    rate_before = rate0[segment]
    slope = ((rate1 - rate0) / (end - start))[segment]
    # Solve rate*t + slope*t^2/2 = excess for t; this form keeps its digits when the slope is 0 or nearly so.
    root = np.sqrt(np.maximum(rate_before * rate_before + 2 * slope * excess, 0.0))
    divisor = rate_before + root
    since = np.divide(2 * excess, divisor, out=np.zeros_like(excess), where=divisor > 0)
    at_s = np.minimum(start[segment] + since, end[segment])
    offsets = np.minimum(np.floor(at_s * 1e9).astype(np.int64), math.ceil(end[-1] * 1e9) - 1)
    return np.maximum.accumulate(offsets) if len(offsets) else offsets


def _unit_renewals(total: float, burstiness: float, rng: np.random.Generator) -> FloatArray:
    """Rising event times in [0, total) of a stationary renewal process with gamma gaps of mean 1. Shape (n,)."""
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


def _above_zero(key: str, value: float, unit: str) -> None:
    if not 0 < value < math.inf:
        raise ConfigError(f"{key} is {value}: give {unit} above 0")
