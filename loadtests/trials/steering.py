"""What steers a trial while its traffic flows, and what it sees of the trial."""

from __future__ import annotations

from typing import Protocol

from loadtests.trials.context import TrialContext
from loadtests.trials.telemetry import Collector
from loadtests.trials.weights import Splitter


class Steered(Protocol):
    """The trial as its steering sees it."""

    @property
    def context(self) -> TrialContext:
        """Its facts and its status."""

    @property
    def collector(self) -> Collector:
        """What replicas reported."""

    @property
    def splitter(self) -> Splitter | None:
        """What splits the requests, where they go through it."""

    def end_load(self, at_ns: int | None) -> None:
        """Send nothing due at the instant or later, nor to an arm of `ended_arms` from its own on.

        The facts state what was due. None: only those arms end.
        """


class Steering(Protocol):
    """Is asked many times a second while the traffic flows. One that `moves_weights` also records what others do to
    them."""

    moves_weights: bool

    def poll(self, trial: Steered) -> None:
        """Do what is due now."""
