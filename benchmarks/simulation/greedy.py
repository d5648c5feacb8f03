"""How often greedy parity of servers that others wrote errs, on made-up servers whose truth is known.

A server is a table of logits for each text so far: the best two lie 2 nats apart on average and within 0.1 in one token
of twenty, which is more ties than real models have.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np

from benchmarks.simulation.table import Table
from tailgate.analysis.arrays import Floats
from tailgate.analysis.judging.gates.greedy import judge_greedy
from tailgate.analysis.records.asked_answers import GreedyAnswer, Twice

ALPHA = 0.05
PROMPTS, TOKENS = 48, 24
CANDIDATES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """`weights` names what it computes. Logits are off by `kernel` (sd, nats) alike each time, and by `batch` anew each
    time. It samples where it `samples`, and answers `faulty` of the prompts with something else from some token on."""

    weights: str = "one"
    kernel: float = 0.0
    batch: float = 0.0
    samples: bool = False
    faulty: float = 0.0
    name: str = "control"

    def answer(self, seed: int, prompt: int, time: int) -> GreedyAnswer:
        """Return its answer to the prompt, the first or the second time."""
        draws = _random(seed, prompt, time, self.name)
        fault = _random(seed, prompt, self.name, "fault")
        breaks = int(fault.integers(TOKENS)) if fault.random() < self.faulty else TOKENS
        noise = self.batch * draws.normal(size=(TOKENS, CANDIDATES))
        if self.samples:
            noise += draws.gumbel(size=noise.shape)
        text = ""  # named by where it last left the likeliest one, and how
        chosen: list[str] = []
        for at in range(TOKENS):
            true = _logits(self.weights if at < breaks else "broken", seed, prompt, text)[at]
            best = int((true + self.kernel * _kernel(self.name, seed, prompt, text)[at] + noise[at]).argmax())
            chosen.append(f"{text}{at}.{best}")
            if best != _logits("one", seed, prompt, text)[at].argmax():
                text = f"{text}{at}.{best}/"
        return GreedyAnswer(digest=str(prompt), asked=TOKENS, text=" ".join(chosen), pieces=TOKENS)

    def twice(self, seed: int, prompts: int) -> Twice:
        """Return its answers to so many prompts, and to the same once more."""
        first, second = (tuple(self.answer(seed, prompt, time) for prompt in range(prompts)) for time in (0, 1))
        return first, second


def _random(*names: object) -> np.random.Generator:
    return np.random.default_rng(int.from_bytes(hashlib.blake2b(repr(names).encode(), digest_size=8).digest()))


@cache
def _logits(weights: str, seed: int, prompt: int, text: str) -> Floats:
    """Return the logits of every candidate at every place after the text, shape (tokens, candidates)."""
    rng = _random(weights, seed, prompt, text)
    falling = -np.cumsum(rng.exponential(2.0, (TOKENS, CANDIDATES)), axis=1)
    return np.asarray(rng.permuted(falling, axis=1))


@cache
def _kernel(name: str, seed: int, prompt: int, text: str) -> Floats:
    return _random(name, seed, prompt, text, "kernel").normal(size=(TOKENS, CANDIDATES))


EXACT, BF16 = Server(), Server(kernel=0.04)
OTHER_WEIGHTS = Server(weights="two", kernel=0.04)
# name, control, arm: equal but for what no arm can be blamed for
EQUAL: Sequence[tuple[str, Server, Server]] = (
    ("other kernels, rounding of bfloat16", BF16, BF16),
    ("other kernels and batches that round, sd 0.05", Server(kernel=0.05, batch=0.05), Server(kernel=0.05, batch=0.05)),
    ("batches that round, sd 0.15", Server(batch=0.15), Server(batch=0.15)),
    ("batches that round, sd 0.5", Server(batch=0.5), Server(batch=0.5)),
    ("the arm samples", BF16, replace(BF16, samples=True)),
    ("the control samples", replace(BF16, samples=True), BF16),
    ("both sample", replace(BF16, samples=True), replace(BF16, samples=True)),
)


def _verdict(control: Server, arm: Server, allowed: float, seed: int) -> str:
    _logits.cache_clear()
    _kernel.cache_clear()
    asked = {1: (control.twice(seed, PROMPTS), replace(arm, name="arm").twice(seed, PROMPTS))}
    return judge_greedy("arm", asked, allowed=allowed, alpha=ALPHA).verdict


def greedy_table(table: Table) -> None:
    """Add the rows on external arms."""

    def share(control: Server, arm: Server, wanted: str, allowed: float = 0.0) -> float:
        verdicts = table.over_seeds(partial(_verdict, control, arm, allowed))
        return sum(verdict == wanted for verdict in verdicts) / len(verdicts)

    add: Callable[..., None] = table.add
    for name, control, arm in EQUAL:
        add(f"greedy parity: FAIL of equal arms: {name}", share(control, arm, "FAIL"), most=ALPHA)
    add("greedy parity: PASS of equal arms: to the bit", share(EXACT, EXACT, "PASS"), least=0.99)
    add("greedy parity: PASS of equal arms: rounding of bfloat16, half may differ", share(BF16, BF16, "PASS", 0.5))
    for control in (EXACT, BF16):
        add("greedy parity: FAIL of other weights", share(control, OTHER_WEIGHTS, "FAIL"), least=0.99)
    for faulty in (0.33, 0.125, 0.1):
        arm = replace(EXACT, faulty=faulty)
        name = f"another answer to {faulty:g} of the prompts"
        add(f"greedy parity: PASS of {name}", share(EXACT, arm, "PASS"), most=ALPHA)
        add(f"greedy parity: PASS of {name}, 0.05 allowed", share(EXACT, arm, "PASS", 0.05))
    for sd in (0.1, 0.2, 0.4, 0.8):
        lossy = Server(kernel=sd)
        add(f"greedy parity: FAIL where logits are off by {sd:g} nats", share(BF16, lossy, "FAIL"))
        add(f"greedy parity: PASS where logits are off by {sd:g} nats", share(BF16, lossy, "PASS"), most=ALPHA)
