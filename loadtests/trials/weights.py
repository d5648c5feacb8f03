"""The weights of a trial's splitter: what splits the requests, and the one controller that sets and records them.

`tailgate split --admin` talks to Envoy past the run. The judge must know the weights at each moment, or their change
looks like a fault of the split.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Protocol

from tailgate.analysis.records.weight_journal import BY_HAND, BY_OTHERS, WeightChange, append
from tailgate.loadtests.experiments.users import UsersConfig
from tailgate.servers.clock import now_ns
from tailgate.servers.complaint import ConfigError
from tailgate.servers.splitter.admin import Admin, Shares, SplitterError, live_shares, reweight
from tailgate.servers.splitter.kubernetes import Gateway

# No alarm is seen while a route is waited for, and a rollback is to take 2 s at most.
_IN_FORCE_S, _ASK_S = 1.0, 0.2
_READ_NS = 1_000_000_000  # between two readings of the weights in force
# What a splitter raises that does not answer, or a route that others change and that splits nothing for a while.
UNANSWERED: Final = (SplitterError, ConfigError)


class Splitter(Protocol):
    """Weights that can be read and set. Each method raises one of UNANSWERED."""

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


@dataclass(frozen=True, slots=True)
class RouteSplitter:
    """The GRPCRoute or HTTPRoute of a gateway, which may be a moment behind it."""

    gateway: Gateway

    def shares(self) -> Shares:
        return Shares(weights=self.gateway.state().weights, shadows={})

    def reweight(self, weights: Mapping[str, int]) -> None:
        """Return once the gateway says that it follows, or after 1 s: not every gateway says so."""
        state = self.gateway.reweight(weights)
        deadline = time.monotonic() + _IN_FORCE_S
        while not state.in_force and time.monotonic() < deadline:
            time.sleep(_ASK_S)
            state = self.gateway.state()


def splitter_of(users: UsersConfig, arms: Collection[str]) -> Splitter:
    """Return the splitter of production traffic to the arms.

    Raises ConfigError outside of a cluster whose route is named.
    """
    if users.route:
        namespace, _, route = users.route.partition("/")
        return RouteSplitter(
            Gateway(namespace=namespace, route=route, arms=arms, kind=users.route_kind, proxy=users.api)
        )
    return EnvoySplitter(Admin(users.admin))


class WeightController:
    """Keeps the weights of `arms` in a splitter and in the journal in `run_dir` the same.

    A change is in the journal before the splitter receives it, so that no arm has more than the last line allows, and
    again once the splitter has taken it. What others do to the weights is recorded and stays.

    `configured` are the weights that the trial starts with, which are recorded once they change. `passive`: a ramp all
    of whose weights others set.
    """

    def __init__(
        self,
        run_dir: Path,
        arms: Collection[str],
        *,
        trial: int = 1,
        configured: Mapping[str, int] | None = None,
        passive: bool = False,
    ) -> None:
        self._run_dir, self._arms, self._trial, self._passive = run_dir, tuple(arms), trial, passive
        self.last: WeightChange | None = None  # as recorded
        self.due: WeightChange | None = None  # recorded, and not taken by the splitter yet
        self.held = False  # whether the splitter had the last weights when it was last read
        self._known: WeightChange | None = None  # what the splitter is known to have had
        self._read_ns = 0
        self._unwritten: WeightChange | None = None
        if configured is not None:
            self._read_ns, self.held = now_ns(), True
            start = WeightChange(at_ns=self._read_ns, weights=configured, why="as configured", trial=trial)
            self.last = self._known = self._unwritten = start

    def set(
        self, weights: Mapping[str, int], *, action: str, why: str, step: int | None, cause_ns: int | None = None
    ) -> None:
        """Record what the arms are to have; the splitter receives it at the next `poll`."""
        trial = self._trial
        self.due = WeightChange(
            at_ns=now_ns(), weights=weights, why=why, action=action, step=step, trial=trial, cause_ns=cause_ns
        )
        self._record(self.due)

    def decide(self, *, action: str, why: str) -> None:
        """Record a decision that leaves the weights as they are."""
        assert self.last is not None
        self._record(replace(self.last, at_ns=now_ns(), action=action, why=why, cause_ns=None, done_ns=None))

    def poll(self, splitter: Splitter) -> WeightChange | None:
        """Have the splitter take what is due, or read its weights once a second; return what has changed in it.

        Weights that others have set stay: they are recorded and returned, and nothing is due any more. So do those of
        the configuration of a splitter that was restarted. Raises one of UNANSWERED.
        """
        due, known = self.due, self._known
        if due is None and now_ns() - self._read_ns < _READ_NS:
            return None
        if due is None or known is not None:
            self.held = False
            own = [change for change in (known, due) if change is not None]
            found = self._foreign_change(splitter, own)
            self.held = True
            if found is not None:
                self.due, self._known = None, found
                self._record(found)
                return found
        if due is None:
            return None
        splitter.reweight(due.weights)
        self._read_ns = now_ns()
        self.due, self.held = None, True
        self._known = taken = replace(due, done_ns=self._read_ns)
        self._record(taken)
        return taken

    def _foreign_change(self, splitter: Splitter, own: Sequence[WeightChange]) -> WeightChange | None:
        """Read the weights, and return what others made of them; None where they are those of one of `own`."""
        before_ns, self._read_ns = self._read_ns, now_ns()
        found, last = splitter.shares(), self.last
        weights = {arm: found.weights.get(arm, 0) for arm in self._arms}
        shadows = {arm: percent for arm, percent in found.shadows.items() if arm in self._arms}
        if any((weights, shadows) == (dict(change.weights), dict(change.shadows)) for change in own):
            return None
        return WeightChange(
            # No earlier than the change before it, which was made at its own instant.
            at_ns=self._read_ns if last is None else max(before_ns, (last.done_ns or last.at_ns) + 1),
            weights=weights,
            shadows=shadows,
            why=f"another program changed {in_words(own[0])}, or the splitter was restarted" if own else "as found",
            action=BY_OTHERS if self._passive else BY_HAND,
            step=last.step if last is not None else 0 if self._passive else None,
            trial=self._trial,
            done_ns=now_ns(),
        )

    def _record(self, change: WeightChange) -> None:
        for line in (self._unwritten, change):
            if line is not None:
                append(self._run_dir, line)
        self.last, self._unwritten = change, None


def in_words(change: WeightChange) -> str:
    """Return the shares of a change: "eager=90, compiled=10"."""
    copies = [f"copies of {percent:g} % to {arm}" for arm, percent in change.shadows.items()]
    return ", ".join([*(f"{arm}={weight}" for arm, weight in change.weights.items()), *copies])
