"""Sessions of several turns: how many, when each starts, and how the context grows.

The first sessions stay the same when more are drawn.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from loadtests.traffic.lengths import BoolArray, IntArray, Lengths


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turns:
    """The turns of all sessions, session by session and turn by turn. Shape (n,), n >= number of sessions."""

    session: IntArray  # 0, 0, 0, 1, 2, 2, ...
    turn: IntArray  # 0, 1, 2, 0, 0, 1, ...
    offset_ns: IntArray

    def rows(self, chosen: slice | BoolArray | IntArray) -> Turns:
        """The chosen rows."""
        return Turns(session=self.session[chosen], turn=self.turn[chosen], offset_ns=self.offset_ns[chosen])


def session_turns(starts_ns: IntArray, counts: IntArray, *, think_time_s: float, rng: np.random.Generator) -> Turns:
    """The turns of sessions of `counts` turns, each at least 1, with exponential think times between them.

    The schedule is open loop: a turn starts one think time after the *scheduled start* of the turn before, however
    long the answer takes. Shape (sessions,) both.
    """
    sessions = len(starts_ns)
    session = np.repeat(np.arange(sessions), counts)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    turn = np.arange(len(session)) - first
    gaps_ns = np.rint(rng.standard_exponential(len(session)) * think_time_s * 1e9).astype(np.int64)
    gaps_ns[turn == 0] = 0
    return Turns(session=session, turn=turn, offset_ns=starts_ns[session] + sum_within(gaps_ns, turn))


def growing_context(lengths: Lengths, turns: Turns, *, max_new_tokens: int) -> IntArray:
    """The tokens of each turn's whole context: inputs and answers of the turns before it, and its own input.

    Answers count at most `max_new_tokens`: more is never generated. Shape (n,).
    """
    answers = np.minimum(lengths.output_tokens, max_new_tokens)
    return sum_within(lengths.input_tokens + answers, turns.turn) - answers


def sum_within(values: IntArray, turn: IntArray) -> IntArray:
    """Running sums that start anew at every turn 0. Shape (n,)."""
    running = np.cumsum(values)
    starts = np.flatnonzero(turn == 0)
    before = running[starts] - values[starts]
    return running - np.repeat(before, np.diff(np.append(starts, len(values))))
