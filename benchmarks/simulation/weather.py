"""What all made-up servers live through: when requests come, noise that lasts, moments at which something stops."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tailgate.analysis.arrays import Floats

BLOCK_S = 30.0
ANSWERS_SIGMA = 0.86  # standard deviation of the log lengths of answers in conversations

Stalls = list[tuple[float, float]]  # (start, seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weather:
    """One trial of `duration_s`, with requests at `rate` per second to each arm.

    `cox`: standard deviation of the log rate, which wanders; 0 is a Poisson process. `shared` and `private`: standard
    deviations of noise in log work that lasts for about `lasting_s`, common to the arms and own to each. `design`:
    mirrored arms get the same requests, split ones their own.
    """

    duration_s: float = 600.0
    rate: float = 4.0
    cox: float = 0.0
    shared: float = 0.12
    private: float = 0.03
    lasting_s: float = 20.0
    design: Literal["mirrored", "split"] = "mirrored"


def lasting_noise(
    weather: Weather, spread: float, rng: np.random.Generator, *, lasting_s: float | None = None
) -> Floats:
    """Log noise for each second of the run, autocorrelated over `lasting_s`. Mean 0, standard deviation `spread`."""
    seconds = int(weather.duration_s) + 1
    keep = math.exp(-1.0 / (lasting_s or weather.lasting_s))
    steps = rng.standard_normal(seconds) * spread
    noise = np.empty(seconds)
    noise[0] = steps[0]
    for second in range(1, seconds):
        noise[second] = keep * noise[second - 1] + math.sqrt(1 - keep * keep) * steps[second]
    return noise


def arrivals(weather: Weather, rng: np.random.Generator) -> Floats:
    """Draw ascending arrival times in seconds."""
    highest = weather.rate * math.exp(4 * weather.cox)
    count = rng.poisson(highest * weather.duration_s)
    times = np.sort(rng.uniform(0, weather.duration_s, count))
    if weather.cox:
        level = np.exp(lasting_noise(weather, weather.cox, rng) - weather.cox**2 / 2)
        times = times[rng.uniform(size=count) < level[times.astype(int)] * weather.rate / highest]
    return times


def answers(mean_s: float, count: int, rng: np.random.Generator) -> Floats:
    """Draw work in seconds, lognormal as the answers of conversations are."""
    return np.asarray(mean_s * np.exp(ANSWERS_SIGMA * rng.standard_normal(count) - ANSWERS_SIGMA**2 / 2))


def stalls(weather: Weather, count: int, least_s: float, most_s: float, rng: np.random.Generator) -> Stalls:
    """Draw stalls of `least_s` to `most_s`, anywhere but in the first and the last ten seconds."""
    starts = np.sort(rng.uniform(10.0, weather.duration_s - 10.0, count))
    return [(float(at), float(rng.uniform(least_s, most_s))) for at in starts]


def host_stalls(weather: Weather, count: int, rng: np.random.Generator) -> Stalls:
    """Draw stalls of the whole host, of 0.5 to 3 s."""
    return stalls(weather, count, 0.5, 3.0, rng)


def collections(weather: Weather, mean_s: float, rng: np.random.Generator) -> Stalls:
    """Draw garbage collections of 50 to 200 ms, `mean_s` apart on average; none if that is 0."""
    return stalls(weather, rng.poisson(weather.duration_s / mean_s), 0.05, 0.2, rng) if mean_s else []


def private_stalls(weather: Weather, count: int, rng: np.random.Generator) -> Stalls:
    """Draw stalls of one server for 0.5 to 5 s, unrelated to its requests."""
    return stalls(weather, count, 0.5, 5.0, rng)
