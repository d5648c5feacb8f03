"""Which of an arm's stalls are called compiles: so few of the calls may be wrong that it does not matter.

A server stands still for other reasons too, and now and then a first-seen shape happens to stand at the begin of such
a stall. How many of these there are shows in the stalls that began without one: each stands for chance / (1 - chance)
others. So every stall has a share of wrong calls among its like, and those are called whose shares come to 2 % on
average and to 5 % each.

Assumed is that stalls of one reason are about as long, that a compile hardly ever begins without a first-seen shape,
and that four arms in five which stall for something else show it by stalls of about that length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from analysis.arrays import Bools, Floats
from analysis.blackbox.firstseen import goes_by_length, more_than_chance

ALPHA = 0.01  # chance that stalls which no compile made are called compiles
WRONG, WRONG_EACH = 0.02, 0.05  # of the calls, and of those like each one
_ALPHA_AMONG_OTHERS = 1e-4  # the same as ALPHA for an arm that stalls for other reasons as well
_OTHERS = 2  # stalls that no compile made, to know that it does
_SEEN = 0.95  # of the stalls that compiles make, those at whose begin the first-seen shape is seen
_EMPTY = 0.5  # of other stalls, those at whose begin no request came; a guess
_NOTHING_ELSE = 0.8  # of arms that compile, those whose stalls of one length are all compiles
_AS_LONG = 0.35  # octaves: standard deviation of the weights of stalls about as long
_SHARES = (np.arange(100) + 0.5) / 100.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evidence:
    """The unexplained stalls of one arm; all of shape (n,).

    `new`: a first-seen shape stood at the begin. `begun`: any request did. `beyond`: its prompts cannot have made it.
    `chance`, `chance_as_long`: that a first-seen shape stood there anyway, among prompts of that time, and among those
    as long. `longest`: how its longest prompt stands out by length, uniform where lengths have no part in it.
    """

    new: Bools
    begun: Bools
    beyond: Bools
    seconds: Floats
    chance: Floats
    chance_as_long: Floats
    longest: Floats

    @property
    def others(self) -> int:
        """Stalls that no compile made, as they began with a request, and not with a first-seen shape."""
        return int((self.begun & ~self.new).sum())


def calls(evidence: Evidence) -> tuple[Bools, float]:
    """(which stalls are called compiles, the chance that so many began with first-seen shapes by themselves)."""
    alike = np.ones(evidence.new.size)
    long = goes_by_length(evidence.longest, alike, others=evidence.others)
    chances = np.maximum(evidence.chance, evidence.chance_as_long) if long else evidence.chance
    beyond = evidence.beyond
    p_value = more_than_chance(evidence.new[beyond], chances[beyond])
    called = np.zeros(evidence.new.size, dtype=np.bool_)
    if p_value > ALPHA:
        return called, p_value
    if (~evidence.new).sum() >= _OTHERS and more_than_chance(evidence.new, chances) > _ALPHA_AMONG_OTHERS:
        return called, p_value
    shares = wrong_shares(evidence, long=long)
    order = np.argsort(shares, kind="stable")
    order = order[(evidence.new & beyond & (shares <= WRONG_EACH))[order]]
    average = np.cumsum(shares[order]) / np.arange(1, order.size + 1)
    called[order[: int((average <= WRONG).sum())]] = True
    return called, p_value


def wrong_shares(evidence: Evidence, *, long: bool) -> Floats:
    """For each stall that began with a first-seen shape the share of wrong calls among its like; 1 for others; (n,).

    Two kinds of stalls are mixed: compiles, and others, at whose begin a first-seen shape stands by chance. With four
    chances in five there are no others, else every share of them is as likely. Other stalls count the more, the closer
    their length. With `long`, and where the stalls about as long go by the length of prompts, only prompts as long tell
    what is chance.
    """
    by_compiles = np.where(evidence.begun, np.where(evidence.new, _SEEN, 1.0 - _SEEN), 1.0 - _SEEN)
    plain = _mixed(evidence, evidence.chance, by_compiles)
    as_long = _mixed(evidence, np.maximum(evidence.chance, evidence.chance_as_long), by_compiles)
    octaves = np.log2(evidence.seconds)
    shares = np.ones(evidence.new.size)
    for index in np.flatnonzero(evidence.new).tolist():
        weights = np.exp(-0.5 * ((octaves - octaves[index]) / _AS_LONG) ** 2)
        others = round(float(weights[evidence.begun & ~evidence.new].sum()))
        by_length = long or goes_by_length(evidence.longest, weights * evidence.begun, others=others)
        logs, wrong = as_long if by_length else plain
        log_mixed = logs @ weights
        highest = float(log_mixed.max())
        mixed = np.exp(log_mixed - highest)
        log_alone = math.log(_NOTHING_ELSE) + float(np.log(by_compiles) @ weights)
        log_others = math.log(1.0 - _NOTHING_ELSE) + highest + math.log(float(mixed.mean()))
        others_too = 1.0 / (1.0 + math.exp(min(50.0, log_alone - log_others)))
        shares[index] = others_too * float(mixed @ wrong[:, index]) / float(mixed.sum())
    return shares


def _mixed(evidence: Evidence, chances: Floats, by_compiles: Floats) -> tuple[Floats, Floats]:
    """(log likelihood, share of others) of each stall for each share of compiles; both (100, n)."""
    likely = np.clip(chances, 1e-3, 1.0 - 1e-3)
    compiled = _SHARES[:, None] * by_compiles
    other = (1.0 - _SHARES[:, None]) * np.where(evidence.new, likely, 1.0 - likely)
    # One that no request began with tells that there are others, and nothing of how many have a shape by chance.
    logs = np.where(evidence.begun, np.log(compiled + other), math.log(_EMPTY))
    return logs, other / (compiled + other)
