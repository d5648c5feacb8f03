"""How long a server is silent because it works: what prompts took in the silences that their first tokens ended.

A long prompt silences a server that runs it as one step. What as long ones took on other arms tells it from a stall.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from analysis.arrays import Floats
from analysis.records.requests import Requests
from analysis.run.silences import TOGETHER_NS, Server, Silences

_BEHIND_NS = 20_000_000  # after a silence: one late packet of a batch must not hide its longest prompt
_COPY_NS = 10_000_000_000  # copies of a request are sent within this, in whatever order arms take turns
_ALIKE = 4.0 / 3.0  # tokens within this factor are about as many
_AS_LONG = 0.75  # of a stall: what took so much of it was as long
_FEWEST_AS_LONG = 3  # silences that explain another one
_SHARE_AS_LONG = 0.10  # of those with about as many tokens
_NEAREST, _LEAST_NEAREST = 30, 12
_FEWEST = 5
_HEADROOM = 1.3  # noise of steps, and batches that are padded


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptWork:
    """What so many prompt tokens take on one arm, as far as silences show; by tokens."""

    tokens: Floats
    seconds: Floats

    @classmethod
    def of(cls, own: tuple[Floats, Floats], others: Sequence[tuple[Floats, Floats]]) -> PromptWork:
        """From the tokens and seconds of the arm's own silences, and those of each other arm, which count as long as
        they would have lasted here, by how fast both are with the longer prompts."""
        tokens, seconds = [own[0]], [own[1]]
        pace = _pace_s(*own)
        for other_tokens, other_seconds in others:
            other_pace = _pace_s(other_tokens, other_seconds)
            # Where one of the two shows too little, both are taken to be equally fast.
            factor = pace / other_pace if pace > 0 and other_pace > 0 else 1.0
            tokens.append(other_tokens)
            seconds.append(other_seconds * factor)
        every = np.concatenate(tokens)
        order = np.argsort(every, kind="stable")
        return cls(tokens=every[order], seconds=np.concatenate(seconds)[order])

    def explains(self, tokens: float, seconds: float) -> bool:
        """Whether silences with about so many tokens were often about as long: a tenth of them and three at least, or
        all where there are fewer."""
        if tokens <= 0:
            return False
        low, high = np.searchsorted(self.tokens, [tokens / _ALIKE, tokens * _ALIKE])
        as_long = int((self.seconds[low:high] >= _AS_LONG * seconds).sum())
        return as_long >= max(1, min(_FEWEST_AS_LONG, int(high - low)), _SHARE_AS_LONG * int(high - low))

    def at_most_s(self, tokens: float) -> float:
        """How long so many tokens may take: 0 for no token, infinite where too little is known.

        By the nearest 30 silences within a factor of two, at least the nearest 12: fewer tokens take less time in
        proportion, more tokens up to its square, as attention does. The second longest counts, since one may be an
        accident.
        """
        if tokens <= 0:
            return 0.0
        if self.tokens.size < _FEWEST:
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


def prefills(requests: Requests, server: Server, silences: Silences) -> tuple[Floats, Floats]:
    """Of each silence the prompt tokens whose first tokens ended it, and for how many seconds it was silent since the
    first of their requests was sent."""
    begun = np.flatnonzero((server.done_ns > 0) & (requests.prompt_tokens[server.rows] > 0))
    begun = begun[np.argsort(server.done_ns[begun], kind="stable")]
    done = server.done_ns[begun]
    starts, ends = silences.start_ns, silences.end_ns
    low = np.searchsorted(done, np.maximum(starts + 1, ends - TOGETHER_NS))
    high = np.maximum(low, np.searchsorted(done, ends + _BEHIND_NS, side="right"))
    passed = np.append(0, np.cumsum(requests.prompt_tokens[server.rows[begun]], dtype=np.int64))
    sent = np.append(server.sent_ns[begun], 0)[low]
    since = np.clip(np.where(high > low, sent, 0), starts, ends)
    return (passed[high] - passed[low]).astype(np.float64), (ends - since) / 1e9


def copy_took_as_long(requests: Requests, server: Server, others: Sequence[Server], start_ns: int, end_ns: int) -> bool:
    """Whether the copies of the longest prompt that was done when the stall ended waited three quarters as long, on all
    other arms."""
    done = (server.done_ns >= end_ns - TOGETHER_NS) & (server.done_ns <= end_ns + _BEHIND_NS)
    rows = server.rows[done & (server.sent_ns < end_ns)]
    if not rows.size:
        return False
    longest = rows[np.argmax(requests.prompt_tokens[rows])]
    waits_ns: dict[int, int] = {}
    for other in others:
        near = slice(*np.searchsorted(other.sent_ns, requests.start_ns[longest] + np.array([-_COPY_NS, _COPY_NS])))
        copies = requests.pair[other.rows[near]] == requests.pair[longest]
        if requests.pair[longest] >= 0 and other.arm != server.arm and copies.any():
            waits_ns[other.arm] = int((other.done_ns[near] - other.sent_ns[near])[copies].max())
    return bool(waits_ns) and min(waits_ns.values()) >= _AS_LONG * (end_ns - start_ns)


def _pace_s(tokens: Floats, seconds: Floats) -> float:
    """Seconds a token in the longer half of the silences, by the median; 0 of too few."""
    if tokens.size < _FEWEST:
        return 0.0
    longer = tokens >= np.median(tokens)
    return float(np.median(seconds[longer] / tokens[longer]))
