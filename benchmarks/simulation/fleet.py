"""Arms of several replicas that work in steps: each gets some of its arm's requests, and meets every shape anew."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import pyarrow as pa

from analysis.records.requests import REQUESTS
from benchmarks.simulation.engine import Engine, Stepped, serve_in_steps
from benchmarks.simulation.scenario import Scenario, arrivals, lasting_noise
from benchmarks.simulation.server import Bools, Floats, Ints, Pause

EPOCH_NS = 1_700_000_000_000_000_000
NETWORK_S = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Two arms of `replicas` each.

    `rate`: requests/s to each arm, whose log wanders by `cox`. `median_tokens`, `spread`: of prompts, lognormal.
    `weights`: of the replicas, equal by default. `cached`: share of the requests whose prompt is found in a prefix
    cache but for a tenth, on each replica by its own luck. `warm`: shapes up to this length are ready before traffic
    and never compile. `new_shapes` of an arm's first-seen shapes are compiled for `compile_s` each, anywhere in the run
    past its first 30 s; `cliff_tokens`: prompts from there on stop the treatment for `cliff_s` in one of three cases,
    as where memory must be made for them. `faster`: how many times faster the control is.
    """

    duration_s: float = 600.0
    rate: float = 2.0
    cox: float = 0.0
    design: Literal["mirrored", "split"] = "mirrored"
    replicas: int = 1
    weights: tuple[float, ...] = ()
    engine: Engine = field(default_factory=Engine)
    faster: float = 1.0
    median_tokens: float = 760.0
    spread: float = 0.985
    longest_tokens: int = 32_000
    answer_tokens: float = 60.0
    cached: float = 0.0
    step: int = 64
    warm: int = 0
    new_shapes: int = 0
    compile_s: float = 0.0
    shared: float = 0.12
    private: float = 0.03
    private_stalls: int = 0
    host_stalls: int = 0
    collections_s: float = 0.0
    cliff_tokens: int = 0
    cliff_s: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replica:
    """What one replica was sent and what became of it; `pair` is the place of each request in its arm's schedule."""

    name: str
    pair: Ints
    sent_s: Floats
    prompts: Ints
    answers: Ints
    served: Stepped

    @property
    def compiled(self) -> list[Pause]:
        return [pause for pause in self.served.pauses if pause.request >= 0]


def fleet(made: Fleet, rng: np.random.Generator) -> tuple[list[Replica], list[Replica]]:
    """The replicas of the treatment and of the control."""
    weather = Scenario(duration_s=made.duration_s, rate=made.rate, cox=made.cox)
    shared = lasting_noise(weather, made.shared, rng)
    times, prompts, answers = _requests(made, weather, rng)
    host = [(float(at), float(rng.uniform(0.5, 3.0))) for at in _moments(made, made.host_stalls, rng)]
    arms = []
    for arm in ("compiled", "eager"):
        if made.design == "split" and arm == "eager":
            times, prompts, answers = _requests(made, weather, rng)
        weights = np.array(made.weights or [1.0] * made.replicas)
        place = rng.choice(made.replicas, size=len(times), p=weights / weights.sum())
        must = _compiled(made, times, prompts, place, rng) if arm == "compiled" else np.zeros(len(times), np.bool_)
        replicas = []
        for number in range(made.replicas):
            own = np.flatnonzero(place == number)
            stalls = list(host)
            if made.collections_s:
                count = rng.poisson(made.duration_s / made.collections_s)
                stalls += [(float(at), float(rng.uniform(0.05, 0.2))) for at in _moments(made, count, rng)]
            cost = prompts[own].copy()
            if made.cached:
                cost = np.where(rng.uniform(size=own.size) < made.cached, -(-cost // 10), cost)
            if arm == "compiled":
                count = made.private_stalls if number == 0 else 0
                stalls += [(float(at), float(rng.uniform(0.5, 5.0))) for at in _moments(made, count, rng)]
                if made.cliff_tokens:
                    over = own[(prompts[own] >= made.cliff_tokens) & (rng.uniform(size=own.size) < 1 / 3)]
                    stalls += [(float(at), made.cliff_s) for at in times[over]]
            slower = np.exp(shared + lasting_noise(weather, made.private, rng))
            there = rng.exponential(NETWORK_S, own.size)
            arrived = times[own] + there
            order = np.argsort(arrived, kind="stable")
            own, arrived = own[order], arrived[order]
            served = serve_in_steps(
                arrived,
                cost[order],
                answers[own],
                engine=made.engine,
                slower=slower / (made.faster if arm == "eager" else 1.0),
                outside=stalls,
                compiles=must[own],
                compile_s=made.compile_s,
            )
            replicas.append(
                Replica(
                    name=f"{arm}-{number}",
                    pair=own,
                    sent_s=times[own],
                    prompts=prompts[own],
                    answers=answers[own],
                    served=served,
                )
            )
        arms.append(replicas)
    return arms[0], arms[1]


def replica_table(replica: Replica, arm: str, rng: np.random.Generator, *, tokens: bool, copies: bool) -> pa.Table:
    """The replica's requests as clients recorded them."""
    count, served = replica.pair.size, replica.served
    back = rng.exponential(NETWORK_S, count)
    sent = _ns(replica.sent_s)
    columns: dict[str, object] = {
        "request_id": [f"{pair}-{arm}" for pair in replica.pair.tolist()],
        "pair_id": [str(pair) if copies else None for pair in replica.pair.tolist()],
        "trial": np.ones(count, dtype=np.int32),
        "arm": [arm] * count,
        "replica": [replica.name] * count,
        "scheduled_ns": sent,
        "sent_ns": sent,
        "first_token_ns": _ns(served.first_s + back),
        "end_ns": _ns(served.end_s + back),
        "status": ["OK"] * count,
        "prompt_tokens": replica.prompts.astype(np.int32),
        "output_tokens": replica.answers.astype(np.int32),
    }
    if tokens:
        lists = [
            np.append(first, served.decoded_s[low:high]) + late
            for first, low, high, late in zip(served.first_s, served.begun, served.ended, back, strict=True)
        ]
        lengths = np.array([len(item) for item in lists], dtype=np.int64)
        flat = _ns(np.concatenate(lists)) - np.repeat(sent, lengths) if count else np.zeros(0, dtype=np.int64)
        edges = pa.array(np.append(0, np.cumsum(lengths)), pa.int32())
        columns["token_ns"] = pa.ListArray.from_arrays(edges, pa.array(flat, pa.int64()))
    made = [
        pa.array(columns[item.name], item.type) if item.name in columns else pa.nulls(count, item.type)
        for item in REQUESTS
    ]
    return pa.table(made, schema=REQUESTS)


def _ns(seconds: Floats) -> Ints:
    return EPOCH_NS + (np.asarray(seconds) * 1e9).astype(np.int64)


def _moments(made: Fleet, count: int, rng: np.random.Generator) -> Floats:
    return np.sort(rng.uniform(10.0, made.duration_s - 10.0, count))


def _requests(made: Fleet, weather: Scenario, rng: np.random.Generator) -> tuple[Floats, Ints, Ints]:
    times = arrivals(weather, rng)
    prompts = np.exp(math.log(made.median_tokens) + made.spread * rng.standard_normal(len(times)))
    answers = made.answer_tokens * np.exp(0.86 * rng.standard_normal(len(times)))
    return times, np.clip(np.rint(prompts), 1, made.longest_tokens).astype(int), np.rint(answers).astype(int) + 2


def _compiled(made: Fleet, times: Floats, prompts: Ints, place: Ints, rng: np.random.Generator) -> Bools:
    """Which requests are the first of a shape on their replica that has to be compiled."""
    must = np.zeros(len(times), dtype=np.bool_)
    if made.new_shapes:
        shape = -(-prompts // made.step)
        _, first = np.unique(place * 1_000_000 + shape, return_index=True)
        late = first[(times[first] > 30.0) & (prompts[first] > made.warm)]
        must[rng.choice(late, size=min(made.new_shapes, late.size), replace=False)] = True
    return must
