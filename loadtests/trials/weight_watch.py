"""Weights and shadows of a run's splitter that somebody changes while it goes on, written down as they are seen.

`tailgate split --set-weights` and `--set-shadow` talk to Envoy past the run. The judge must know the weights at each
moment, or their change looks like a fault of the split.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from analysis.records.weight_journal import BY_HAND, WeightChange, append, read_weights
from servers.clock import now_ns
from servers.splitter.admin import Admin, SplitterError
from servers.splitter.live import Shares, live_shares

_EVERY_NS = 1_000_000_000


class WeightWatch:
    """Asks the splitter of one trial once a second, and writes changes to the journal in `run_dir`.

    What the journal says already is the run's own: whoever changes weights for the run writes that down first.
    """

    def __init__(self, run_dir: Path, *, trial: int, configured: Shares) -> None:
        self._run_dir = run_dir
        self._trial = trial
        self._configured = configured
        self._seen = configured
        self._seen_ns = now_ns()  # when they were surely in force
        self._start_ns = self._seen_ns
        self._next_ns = 0

    def poll(self, admin: Admin) -> WeightChange | None:
        """The change that was just written down; None where there was none, or where nobody answered."""
        at_ns = now_ns()
        if at_ns < self._next_ns:
            return None
        self._next_ns = at_ns + _EVERY_NS
        try:
            seen = live_shares(admin, self._configured)
        except (SplitterError, ValueError):
            return None  # an Envoy that is gone ends the run by other ways
        before, since_ns = self._seen, self._seen_ns
        self._seen, self._seen_ns = seen, at_ns
        if seen == before:
            return None
        journal = [change for change in read_weights(self._run_dir) if change.trial == self._trial]
        own = journal[-1] if journal else None
        if own is not None and dict(own.weights) == seen.weights and seen.shadows == before.shadows:
            return None
        if own is None:
            start = WeightChange(
                at_ns=self._start_ns,
                weights=self._configured.weights,
                why="as configured",
                trial=self._trial,
                shadows=self._configured.shadows,
            )
            append(self._run_dir, start)
            own = start
        change = WeightChange(
            # No earlier than the change before it, which was made at its own instant.
            at_ns=max(since_ns, (own.done_ns or own.at_ns) + 1),
            weights=seen.weights,
            why=f"it was {_words(own.weights, before.shadows)}",
            action=BY_HAND,
            trial=self._trial,
            done_ns=now_ns(),
            shadows=seen.shadows,
        )
        append(self._run_dir, change)
        return change


def in_words(change: WeightChange) -> str:
    """The shares of a change: "eager=90, compiled=10"."""
    return _words(change.weights, change.shadows)


def _words(weights: Mapping[str, int], shadows: Mapping[str, float]) -> str:
    copies = [f"copies of {percent:g} % to {arm}" for arm, percent in shadows.items()]
    return ", ".join([*(f"{arm}={weight}" for arm, weight in weights.items()), *copies])
