"""Arms of several replicas that work in steps: each gets some of its arm's requests, and meets every shape anew."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from benchmarks.simulation.engine import Engine, Stepped, serve_in_steps
from benchmarks.simulation.records import NETWORK_S, request_table, to_ns, token_lists
from benchmarks.simulation.weather import (
    ANSWERS_SIGMA,
    Stalls,
    Weather,
    arrivals,
    collections,
    host_stalls,
    lasting_noise,
    private_stalls,
)
from tailgate.analysis.arrays import Bools, Floats, Ints

TREATMENT, CONTROL = "compiled", "eager"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet(Weather):
    """Two arms of `replicas` each.

    `median_tokens`, `spread`: of prompts, lognormal. `weights`: of the replicas, equal by default. `cached`: share of
    the requests whose prompt is in a prefix cache but for a tenth, drawn for each replica by itself. `new_shapes` of an
    arm's first-seen shapes are compiled for `compile_s` each, anywhere in the run past its first 30 s. `collections_s`:
    mean time between garbage collections of a replica; `host_stalls`: how many times the host stops both arms;
    `private_stalls`: how many times the treatment's first replica stalls for no reason of its requests. `cliff_tokens`:
    prompts from there on stop the treatment for `cliff_s` in one of three cases, as where memory must be made for them.
    `faster`: how many times faster the control is. With `one_address` the replicas of an arm have one name, as behind a
    balancer that does not tell who answered.
    """

    rate: float = 2.0
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
    new_shapes: int = 0
    compile_s: float = 0.0
    collections_s: float = 0.0
    host_stalls: int = 0
    private_stalls: int = 0
    cliff_tokens: int = 0
    cliff_s: float = 1.0
    one_address: bool = False


# 16 rows that delay none of each other: some 10 requests/s.
SLOTS = Fleet(engine=Engine(token_s=0.0, row_s=0.0), rate=4.0, answer_tokens=54.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replica:
    """What one replica was sent and how it ended; `pair` is the place of each request in its arm's schedule."""

    name: str
    pair: Ints
    sent_s: Floats
    prompts: Ints
    answers: Ints
    served: Stepped


def fleet(made: Fleet, rng: np.random.Generator) -> tuple[list[Replica], list[Replica]]:
    """Return the replicas of the treatment and of the control."""
    shared = lasting_noise(made, made.shared, rng)
    host = host_stalls(made, made.host_stalls, rng)
    times, prompts, answers = _requests(made, rng)
    arms = []
    for arm in (TREATMENT, CONTROL):
        if made.design == "split" and arm == CONTROL:
            times, prompts, answers = _requests(made, rng)
        weights = np.array(made.weights or [1.0] * made.replicas)
        place = rng.choice(made.replicas, size=len(times), p=weights / weights.sum())
        # every replica meets every shape anew
        shape = place * 1_000_000 + -(-prompts // made.step)
        new_shapes = made.new_shapes if arm == TREATMENT else 0
        must = first_of_new_shapes(times, shape, new_shapes, rng)
        replicas = []
        for number in range(made.replicas):
            own = np.flatnonzero(place == number)
            outside: Stalls = [*host, *collections(made, made.collections_s, rng)]
            cost = prompts[own].copy()
            if made.cached:
                cost = np.where(rng.uniform(size=own.size) < made.cached, -(-cost // 10), cost)
            if arm == TREATMENT:
                outside += private_stalls(made, made.private_stalls if number == 0 else 0, rng)
                if made.cliff_tokens:
                    over = own[(prompts[own] >= made.cliff_tokens) & (rng.uniform(size=own.size) < 1 / 3)]
                    outside += [(float(at), made.cliff_s) for at in times[over]]
            slower = np.exp(shared + lasting_noise(made, made.private, rng))
            there = rng.exponential(NETWORK_S, own.size)
            arrived = times[own] + there
            order = np.argsort(arrived, kind="stable")
            own = own[order]
            served = serve_in_steps(
                arrived[order],
                cost[order],
                answers[own],
                engine=made.engine,
                slower=slower / (made.faster if arm == CONTROL else 1.0),
                outside=outside,
                compiles=must[own],
                compile_s=made.compile_s,
            )
            replicas.append(
                Replica(
                    name=f"{arm}-{0 if made.one_address else number}",
                    pair=own,
                    sent_s=times[own],
                    prompts=prompts[own],
                    answers=answers[own],
                    served=served,
                )
            )
        arms.append(replicas)
    return arms[0], arms[1]


def first_of_new_shapes(times: Floats, shape: Ints, count: int, rng: np.random.Generator) -> Bools:
    """Mark requests that are the first of a shape to compile: `count` of them, past the first 30 s."""
    must = np.zeros(len(times), dtype=np.bool_)
    if count:
        _, first = np.unique(shape, return_index=True)
        late = first[times[first] > 30.0]
        must[rng.choice(late, size=min(count, late.size), replace=False)] = True
    return must


def recorded(made: Fleet, rng: np.random.Generator, *, tokens: bool = True) -> tuple[list[Replica], pa.Table]:
    """Run both arms; return the treatment's replicas, and what clients record, with `tokens` the times of tokens."""
    arms = fleet(made, rng)
    named = [(replica, arm) for replicas, arm in zip(arms, (TREATMENT, CONTROL), strict=True) for replica in replicas]
    copies = made.design == "mirrored"
    return arms[0], pa.concat_tables([_table(*pair, rng, tokens=tokens, copies=copies) for pair in named])


def _table(replica: Replica, arm: str, rng: np.random.Generator, *, tokens: bool, copies: bool) -> pa.Table:
    """Record the replica's requests as clients do; with `copies`, request i of one arm is that of the other."""
    count, served = replica.pair.size, replica.served
    back = rng.exponential(NETWORK_S, count)
    sent = to_ns(replica.sent_s)
    lists = None
    if tokens:
        times = [
            np.append(first, served.decoded_s[low:high]) + late
            for first, low, high, late in zip(served.first_token_s, served.begun, served.ended, back, strict=True)
        ]
        counts = 1 + served.ended - served.begun
        lists = token_lists(to_ns(np.concatenate([*times, []])) - np.repeat(sent, counts), counts)
    return request_table(
        sent,
        request_id=[f"{pair}-{arm}" for pair in replica.pair.tolist()],
        pair_id=[str(pair) for pair in replica.pair.tolist()] if copies else None,
        arm=arm,
        replica=replica.name,
        first_token_ns=to_ns(served.first_token_s + back),
        end_ns=to_ns(served.end_s + back),
        prompt_tokens=replica.prompts,
        output_tokens=replica.answers,
        token_ns=lists,
    )


def _requests(made: Fleet, rng: np.random.Generator) -> tuple[Floats, Ints, Ints]:
    times = arrivals(made, rng)
    prompts = np.exp(math.log(made.median_tokens) + made.spread * rng.standard_normal(len(times)))
    answers = made.answer_tokens * np.exp(ANSWERS_SIGMA * rng.standard_normal(len(times)))
    return times, np.clip(np.rint(prompts), 1, made.longest_tokens).astype(int), np.rint(answers).astype(int) + 2
