"""How long a server stands still because it works: what prompts took in the silences that their first tokens ended.

A long prompt holds up a server that runs it as one step, and long prompts are also the ones whose lengths are
first-seen. So nothing is a compile that may have been the prompt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from analysis.arrays import Bools, Floats

_ALIKE = 4.0 / 3.0  # tokens within this factor are about as many
_AS_LONG = 0.75  # of a stall: what took so much of it was as long
_FEWEST_AS_LONG = 3  # silences that explain another one
_SHARE_AS_LONG = 0.10  # of those with about as many tokens
_NEAREST, _LEAST_NEAREST = 30, 12
_FEWEST = 5
_HEADROOM = 1.3  # noise of steps, and batches that are padded


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prefills:
    """The silences of one server that ended with first tokens: how many prompt tokens had been run by then (k,), how
    long it was silent for them (k,), and whether a first-seen shape was among them (k,)."""

    tokens: Floats
    seconds: Floats
    new: Bools

    @classmethod
    def joined(cls, parts: Sequence[Prefills]) -> Prefills:
        """All of them as one."""
        return cls(
            tokens=np.concatenate([part.tokens for part in parts]) if parts else np.zeros(0),
            seconds=np.concatenate([part.seconds for part in parts]) if parts else np.zeros(0),
            new=np.concatenate([part.new for part in parts]) if parts else np.zeros(0, dtype=np.bool_),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Work:
    """What so many prompt tokens take on one arm, as far as silences without a first-seen shape show; by tokens."""

    tokens: Floats
    seconds: Floats

    @classmethod
    def of(cls, own: Prefills, others: Sequence[Prefills]) -> Work:
        """From the arm's own silences, but for those that a compile may have made, and from those of each other arm,
        which count as long as they would have lasted here, by how fast both are with the longer prompts."""
        mine = ~own.new
        tokens, seconds = [own.tokens[mine]], [own.seconds[mine]]
        pace = _pace_s(own.tokens[mine], own.seconds[mine])
        for other in others:
            other_pace = _pace_s(other.tokens, other.seconds)
            # Where one of the two shows too little, both are taken to be equally fast.
            factor = pace / other_pace if pace > 0 and other_pace > 0 else 1.0
            tokens.append(other.tokens)
            seconds.append(other.seconds * factor)
        every = np.concatenate(tokens)
        order = np.argsort(every, kind="stable")
        return cls(tokens=every[order], seconds=np.concatenate(seconds)[order])

    def explains(self, tokens: float, seconds: float) -> bool:
        """Whether silences with about so many tokens were often about as long."""
        if tokens <= 0:
            return False
        low, high = np.searchsorted(self.tokens, [tokens / _ALIKE, tokens * _ALIKE])
        as_long = int((self.seconds[low:high] >= _AS_LONG * seconds).sum())
        return as_long >= max(_FEWEST_AS_LONG, _SHARE_AS_LONG * int(high - low))

    def at_most_s(self, tokens: float) -> float:
        """How long so many tokens may take; infinite where too little is known.

        By the nearest 30 silences within a factor of two, at least the nearest 12: fewer tokens take less time in
        proportion, more tokens up to its square, as attention does. The second longest counts, since one may be an
        accident.
        """
        if tokens <= 0 or self.tokens.size < _FEWEST:
            return math.inf
        place = int(np.searchsorted(self.tokens, tokens))
        near = slice(max(0, place - _NEAREST), place + _NEAREST)
        ratio = tokens / self.tokens[near]
        distance = np.abs(np.log2(ratio))
        nearest = np.argsort(distance, kind="stable")[:_NEAREST]
        nearest = nearest[(distance[nearest] <= 1.0) | (np.arange(nearest.size) < _LEAST_NEAREST)]
        ratio = ratio[nearest]
        took = self.seconds[near][nearest] * np.where(ratio > 1.0, ratio**2, ratio)
        return _HEADROOM * float(np.sort(took)[-2])


def _pace_s(tokens: Floats, seconds: Floats) -> float:
    """Seconds a token in the longer half of the silences, by the median; 0 of too few."""
    if tokens.size < _FEWEST:
        return 0.0
    longer = tokens >= np.median(tokens)
    return float(np.median(seconds[longer] / tokens[longer]))
