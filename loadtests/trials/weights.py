"""The weights of a trial's splitter: what splits the requests, and the one controller that sets and records them.

`tailgate split --admin` talks to Envoy past the run. The judge must know the weights at each moment, or their change
looks like a fault of the split.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Protocol

from tailgate.analysis.records.weight_journal import BY_HAND, BY_OTHERS, WeightChange, append
from tailgate.loadtests.experiments.users import UsersConfig
from tailgate.servers.clock import now_ns
from tailgate.servers.complaint import ConfigError
from tailgate.servers.splitter.admin import Admin, Shares, SplitterError, live_shares, reweight
from tailgate.servers.splitter.kubernetes import Gateway

_READ_NS = 1_000_000_000  # between two readings of the weights in force
# What a splitter raises that does not answer, or a route that others change and that splits nothing for a while.
UNANSWERED: Final = (SplitterError, ConfigError)


class Splitter(Protocol):
    """Weights that can be read and set: of an Envoy, or of the route of a Gateway. Each method raises one of
    UNANSWERED."""

    def shares(self) -> Shares:
        """Return the shares in force."""

    def reweight(self, weights: Mapping[str, int]) -> None:
        """Have new requests follow the weights; those under way are not touched."""


@dataclass(frozen=True, slots=True)
class EnvoySplitter:
    """The split behind an admin interface."""

    admin: Admin

    def shares(self) -> Shares:
        return live_shares(self.admin)

    def reweight(self, weights: Mapping[str, int]) -> None:
        reweight(self.admin, weights)


def splitter_of(users: UsersConfig, arms: Collection[str]) -> Splitter:
    """Return the splitter of production traffic to the arms.

    Raises ConfigError outside of a cluster whose route is named.
    """
    if not users.route:
        return EnvoySplitter(Admin(users.admin))
    namespace, _, route = users.route.partition("/")
    return Gateway(namespace=namespace, route=route, arms=arms, kind=users.route_kind, proxy=users.api)


class WeightController:
    """Keeps the weights of `arms` in a splitter and in the journal in `run_dir` the same.

    A change is in the journal before the splitter receives it, so that no arm has more than the last line allows, and
    again once the splitter has taken it. What others do to the weights is recorded and stays.

    `configured` are the weights that the trial starts with, which are recorded once they change.
    """

    def __init__(
        self, run_dir: Path, arms: Collection[str], *, trial: int = 1, configured: Mapping[str, int] | None = None
    ) -> None:
        self._run_dir, self._arms, self._trial = run_dir, tuple(arms), trial
        self.last: WeightChange | None = None  # as recorded
        self.since_ns = 0  # when the splitter took the weights that it is known to have
        self.held = False  # whether it had them when it was last read
        # Any of these weights the splitter may have: it may take a change whose answer is lost.
        self._own: list[WeightChange] = []
        self._read_ns = 0
        self._unwritten: WeightChange | None = None
        if configured is not None:
            at_ns = self._read_ns = now_ns()
            start = WeightChange(at_ns=at_ns, weights=configured, why="as configured", trial=trial, done_ns=at_ns)
            self.last = self._unwritten = start
            self._own = [start]

    @property
    def due(self) -> WeightChange | None:
        """Return the recorded change that the splitter is not known to have taken."""
        return self.last if self.last is not None and self.last.done_ns is None else None

    def record(
        self, weights: Mapping[str, int], *, action: str, why: str, step: int, cause_ns: int | None = None
    ) -> None:
        """Record what the arms are to have. The splitter receives it at the next `poll`, unless it has it already."""
        at_ns = now_ns()
        stays = self.last is not None and self.due is None and self.last.weights == weights
        change = WeightChange(
            at_ns=at_ns,
            weights=weights,
            why=why,
            action=action,
            step=step,
            trial=self._trial,
            cause_ns=cause_ns,
            done_ns=at_ns if stays else None,
        )
        if not stays:
            self._own.append(change)
        self._write(change)

    def poll(self, splitter: Splitter) -> WeightChange | None:
        """Have the splitter take what is due, or read its weights once a second; return what has changed in it.

        Weights that others have set stay: they are recorded and returned, and nothing is due any more. So do those of
        the configuration of a splitter that was restarted. Raises one of UNANSWERED.
        """
        due = self.due
        if due is None and now_ns() - self._read_ns < _READ_NS:
            return None
        if due is None or self.since_ns:
            self.held = False
            found = self._foreign_change(splitter)
            self.held = True
            if found is not None:
                self._take(found)
                return found
        if due is None:
            return None
        splitter.reweight(due.weights)
        self.held, self._read_ns = True, now_ns()
        taken = replace(due, done_ns=self._read_ns)
        self._take(taken)
        return taken

    def _foreign_change(self, splitter: Splitter) -> WeightChange | None:
        """Read the weights, and return what others made of them; None where they may be the controller's own."""
        before_ns, self._read_ns = self._read_ns, now_ns()
        found, last = splitter.shares(), self.last
        weights = {arm: found.weights.get(arm, 0) for arm in self._arms}
        shadows = {arm: percent for arm, percent in found.shadows.items() if arm in self._arms}
        if any((weights, shadows) == (dict(change.weights), dict(change.shadows)) for change in self._own):
            return None
        others = last is None or last.action == BY_OTHERS  # this controller has set nothing
        known = in_words(self._own[0]) if self._own else ""
        return WeightChange(
            # No earlier than the change before it, which was made at its own instant.
            at_ns=self._read_ns if last is None else max(before_ns, (last.done_ns or last.at_ns) + 1),
            weights=weights,
            shadows=shadows,
            why=f"another program changed {known}, or the splitter was restarted" if known else "as found",
            action=BY_OTHERS if others else BY_HAND,
            step=0 if last is None else last.step,
            trial=self._trial,
            done_ns=now_ns(),
        )

    def _take(self, change: WeightChange) -> None:
        """Record what the splitter has now."""
        self._own, self.since_ns = [change], change.done_ns or change.at_ns
        self._write(change)

    def _write(self, change: WeightChange) -> None:
        for line in (self._unwritten, change):
            if line is not None:
                append(self._run_dir, line)
        self.last, self._unwritten = change, None


def in_words(change: WeightChange) -> str:
    """Return the shares of a change: "eager=90, compiled=10"."""
    copies = [f"copies of {percent:g} % to {arm}" for arm, percent in change.shadows.items()]
    return ", ".join([*(f"{arm}={weight}" for arm, weight in change.weights.items()), *copies])
