"""How the energy of a token falls with the load: what each arm's own card took in every step of a search."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from analysis.arrays import Codes, Ints
from analysis.judging.load_steps import step_windows
from analysis.run.bed_samples import Samples
from analysis.run.energy import integrated, own_card, shared
from analysis.run.run import Run
from analysis.run.trials import SECOND

_FEWEST_TOKENS = 20.0  # of a step that says what one of them took


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnergy:
    """One arm in one step of one trial, at `rate` requests/s a replica: `watts` of its card, `token_j` joules for each
    token that came out in the step. A million tokens take as many megajoules."""

    arm: str
    trial: int
    rate: float
    watts: float
    token_j: float
    tokens: float


def step_energies(run: Run) -> list[StepEnergy]:
    """Every whole step of every arm that had a card to itself, whose power was watched without a gap."""
    samples, requests, found = Samples(run.records.bed), run.requests, []
    for window in step_windows(run):
        trial = window.trial
        since, until = (trial.start_ns + int(at_s * SECOND) for at_s in (window.start_s, window.end_s))
        for arm in filter(trial.has, run.arms):
            card = own_card(samples, trial, arm)
            if not window.whole or isinstance(card, str) or shared(card, since, until):
                continue
            own = run.of_arm(arm) & (requests.trial == trial.number) & (requests.first_ns > 0) & ~requests.broken
            times = requests.first_ns[own], requests.end_ns[own]
            tokens = _tokens_between(*times, requests.output_tokens[own], since, until)
            joules = integrated(card, since, until)
            if joules is None or tokens < _FEWEST_TOKENS:
                continue
            found.append(
                StepEnergy(
                    arm=arm,
                    trial=trial.number,
                    rate=window.rate / run.replicas(arm),
                    watts=joules / (window.end_s - window.start_s),
                    token_j=joules / tokens,
                    tokens=tokens,
                )
            )
    return sorted(found, key=lambda item: (item.trial, item.rate))


def _tokens_between(first: Ints, end: Ints, tokens: Codes, since: int, until: int) -> float:
    """The tokens that came out from `since` to `until`, those of an answer taken to be evenly spread over it."""
    lasted = end - first + 1  # an answer of one token too
    inside = np.minimum(first + lasted, until) - np.maximum(first, since)
    return float((tokens * np.clip(inside, 0, None) / lasted).sum())
