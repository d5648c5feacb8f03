"""How often greedy parity of servers that others wrote errs, on made-up servers whose truth is known.

`python benchmarks/judging.py greedy` prints the table. A server is a table of logits for each text so far: the best two
lie 2 nats apart on average and within 0.1 in one token of twenty, which is more ties than real models have.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np

from analysis.arrays import Floats
from analysis.judging.gates.greedy import NEAR_TIE, GreedyParity, judge_greedy
from analysis.records.asked_answers import AskedAnswer, Twice
from benchmarks.simulation.table import Table

ALPHA = 0.05
PROMPTS, TOKENS = 48, 24
CANDIDATES, ALTERNATIVES = 8, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """`weights` names what it computes. Logits are off by `kernel` (sd, nats) alike each time, and by `batch` anew each
    time. It tells log-probabilities where it `tells`, samples where it `samples`, and answers `faulty` of the prompts
    with something else from some token on."""

    weights: str = "one"
    kernel: float = 0.0
    batch: float = 0.0
    tells: bool = True
    samples: bool = False
    faulty: float = 0.0
    name: str = "control"

    def answer(self, seed: int, prompt: int, time: int) -> AskedAnswer:
        """What it answers to the prompt, asked the first or the second time."""
        luck = _random(seed, prompt, time, self.name)
        fault = _random(seed, prompt, self.name, "fault")
        breaks = int(fault.integers(TOKENS)) if fault.random() < self.faulty else TOKENS
        noise = self.batch * luck.normal(size=(TOKENS, CANDIDATES))
        # A text is named by where it last left the likeliest one, and how.
        text, place = "", 0
        chosen: list[str] = []
        logs: list[Floats] = []
        words: list[list[str]] = []
        while place < TOKENS:
            weights = self.weights if place < breaks else "broken"
            true = _logits(weights, seed, prompt, text)
            logits = true + self.kernel * _kernel(self.name, seed, prompt, text) + noise
            rows = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
            best = rows.argmax(axis=1)
            if self.samples:
                best = (rows + luck.gumbel(size=rows.shape)).argmax(axis=1)
            expected = _logits("one", seed, prompt, text).argmax(axis=1)
            end = TOKENS if weights == "broken" else breaks
            left = np.flatnonzero(best[place:end] != expected[place:end])
            stop = place + int(left[0]) + 1 if left.size else end
            for at in range(place, stop):
                words.append([f"{text}{at}.{number}" for number in range(CANDIDATES)])
                chosen.append(words[-1][best[at]])
                logs.append(rows[at])
            if left.size:
                text = f"{text}{stop - 1}.{best[stop - 1]}/"
            place = stop
        if not self.tells:
            return AskedAnswer(digest=str(prompt), asked=TOKENS, text=" ".join(chosen), pieces=TOKENS)
        return AskedAnswer(
            digest=str(prompt),
            asked=TOKENS,
            text=" ".join(chosen),
            pieces=TOKENS,
            tokens=tuple(chosen),
            log_probs=tuple(
                float(row[names.index(word)]) for row, names, word in zip(logs, words, chosen, strict=True)
            ),
            likeliest=tuple(
                {names[other]: float(row[other]) for other in np.argsort(-row)[:ALTERNATIVES]}
                for row, names in zip(logs, words, strict=True)
            ),
        )

    def twice(self, seed: int, prompts: int) -> Twice:
        """Its answers to so many prompts, and to the same once more."""
        first, second = (tuple(self.answer(seed, prompt, time) for prompt in range(prompts)) for time in (0, 1))
        return first, second


def _random(*names: object) -> np.random.Generator:
    return np.random.default_rng(int.from_bytes(hashlib.blake2b(repr(names).encode(), digest_size=8).digest()))


@cache
def _logits(weights: str, seed: int, prompt: int, text: str) -> Floats:
    """Of every candidate at every place, behind the text: shape (tokens, candidates)."""
    rng = _random(weights, seed, prompt, text)
    falling = -np.cumsum(rng.exponential(2.0, (TOKENS, CANDIDATES)), axis=1)
    return np.asarray(rng.permuted(falling, axis=1))


@cache
def _kernel(name: str, seed: int, prompt: int, text: str) -> Floats:
    return _random(name, seed, prompt, text, "kernel").normal(size=(TOKENS, CANDIDATES))


def judged(control: Server, arm: Server, seed: int, *, prompts: int = PROMPTS, alpha: float = ALPHA) -> GreedyParity:
    """What is made of one look at the two."""
    _logits.cache_clear()
    _kernel.cache_clear()
    asked = [(control.twice(seed, prompts), arm.twice(seed, prompts))]
    return judge_greedy("arm", asked, when="before", near_tie=NEAR_TIE, alpha=alpha)


BF16 = Server(kernel=0.04)
# name, control, arm: equal but for what no arm can be blamed for
EQUAL: Sequence[tuple[str, Server, Server]] = (
    ("other kernels, rounding of bfloat16", BF16, replace(BF16, name="arm")),
    ("other kernels and batches that round, sd 0.05", Server(kernel=0.05, batch=0.05), Server(kernel=0.05, batch=0.05)),
    ("batches that round, sd 0.15", Server(batch=0.15), Server(batch=0.15)),
    ("batches that round, sd 0.5", Server(batch=0.5), Server(batch=0.5)),
    ("the arm samples", BF16, replace(BF16, samples=True)),
    ("the control samples", replace(BF16, samples=True), BF16),
    ("both sample", replace(BF16, samples=True), replace(BF16, samples=True)),
)
# name, arm, whether the control tells, share of FAIL that must be reached
OTHER: Sequence[tuple[str, Server, bool, float]] = (
    ("other weights", Server(weights="two", kernel=0.04), True, 0.99),
    ("other weights, no log-probabilities", Server(weights="two", tells=False), False, 0.99),
    ("another answer to a third of the prompts", replace(BF16, faulty=0.33), True, 0.9),
)


def _verdict(control: Server, arm: Server, seed: int) -> str:
    return judged(control, replace(arm, name="arm"), seed).verdict


def greedy_table(table: Table) -> None:
    """Adds the lines on external arms."""

    def share(control: Server, arm: Server, wanted: str) -> float:
        verdicts = table.over_seeds(partial(_verdict, control, arm))
        return sum(verdict == wanted for verdict in verdicts) / len(verdicts)

    add: Callable[..., None] = table.add
    for told in (True, False):
        how = "" if told else ", no log-probabilities"
        for name, control, arm in EQUAL:
            wrong = share(replace(control, tells=told), replace(arm, tells=told), "FAIL")
            add(f"greedy parity: FAIL of equal arms: {name}{how}", wrong, most=ALPHA)
    add("greedy parity: PASS of equal arms: other kernels, rounding of bfloat16", share(BF16, BF16, "PASS"), least=0.9)
    add(
        "greedy parity: PASS of equal arms: to the bit, no log-probabilities", share(_EXACT, _EXACT, "PASS"), least=0.99
    )
    for name, arm, told, least in OTHER:
        add(f"greedy parity: FAIL of {name}", share(replace(BF16, tells=told), arm, "FAIL"), least=least)
    for faulty in (0.25, 0.125, 0.1):
        arm = replace(BF16, faulty=faulty)
        add(f"greedy parity: FAIL of another answer to {faulty:g} of the prompts", share(BF16, arm, "FAIL"))
        add(f"greedy parity: PASS of another answer to {faulty:g} of the prompts", share(BF16, arm, "PASS"), most=ALPHA)
    for sd in (0.1, 0.2, 0.4, 0.8):
        lossy = Server(kernel=sd)
        add(f"greedy parity: FAIL where logits are off by {sd:g} nats", share(BF16, lossy, "FAIL"))
        add(f"greedy parity: PASS where logits are off by {sd:g} nats", share(BF16, lossy, "PASS"))


_EXACT = Server(tells=False)
