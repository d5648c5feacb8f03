"""What may happen to a trial while its traffic flows, by somebody who looks at it."""

from __future__ import annotations

from typing import Protocol

from loadtests.trials.context import TrialContext
from loadtests.trials.splitters import Splitter
from loadtests.trials.telemetry import Collector


class Steered(Protocol):
    """The trial, as whoever steers it sees it."""

    @property
    def context(self) -> TrialContext:
        """Its facts and its status."""

    @property
    def collector(self) -> Collector:
        """What replicas told."""

    @property
    def splitter(self) -> Splitter | None:
        """What splits the requests, where they go through it."""

    def end_load(self, at_ns: int | None) -> None:
        """Nothing due at the instant or later is sent, nor to an arm of `ended_arms` from its own on; the facts say
        what was due. None: only those arms end."""


class Steering(Protocol):
    """Is asked many times a second while the traffic flows. One that `moves_weights` also writes down what others do to
    them."""

    moves_weights: bool

    def poll(self, trial: Steered) -> None:
        """What is to be done now was done."""
