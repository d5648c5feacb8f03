"""What may end a trial early or move its weights, while its traffic flows."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from tailgate.analysis.interim import JOURNAL
from tailgate.loadtests.page.tails import LinesTail
from tailgate.loadtests.trials.context import TrialContext
from tailgate.loadtests.trials.processes import child_environment
from tailgate.loadtests.trials.telemetry import Collector
from tailgate.loadtests.trials.weights import UNANSWERED, Splitter, WeightController, in_words
from tailgate.servers.clock import ANCHOR_NS, now_ns
from tailgate.servers.processes import Child


class Steered(Protocol):
    """The trial as its steering sees it: its facts and status, what replicas reported, and what splits the requests."""

    context: TrialContext
    collector: Collector
    splitter: Splitter

    def end_load(self, at_ns: int | None) -> None:
        """Send nothing due at the instant or later, nor to an arm of `ended_arms` from its own on.

        The facts state what was due. None: only those arms end.
        """


Steering = Callable[[Steered], None]  # does what is due now, many times a second while the traffic flows

_COMMAND = (sys.executable, "-P", "-m", "tailgate.analysis.interim")
_GRACE_S = 2.0


class Judge:
    """Has the run in `run_dir` analysed after every block until `stop`. A process that ends early leaves a note."""

    def __init__(self, run_dir: Path) -> None:
        self._rows = LinesTail(run_dir / JOURNAL)  # no line is read twice
        self._child = Child(
            "interim",
            [*_COMMAND, str(run_dir.resolve()), str(ANCHOR_NS)],
            log_path=run_dir / "interim.log",
            environment=child_environment(),
        )
        self._last: Mapping[str, Any] | None = None

    def failure(self) -> str | None:
        """Return why there are no more interim analyses; None while they go on."""
        return None if self._child.poll() is None else f"the interim analyses ended: {self._child.log_tail(2)}"

    def last(self) -> Mapping[str, Any] | None:
        """Return the last interim analysis; None before the first."""
        while rows := self._rows.new():
            self._last = rows[-1]
        return self._last

    def stop(self) -> None:
        """Stop the process."""
        self._child.stop(_GRACE_S)


END_DELAY_NS = 1_000_000_000  # so that every load process knows of it in time


def end_when_decided(judge: Judge, trial: Steered) -> None:
    """End the load once an interim analysis decides every arm, and that of an arm once it fails. trial.json states
    why."""
    from tailgate.analysis.judging.gates import FAIL  # here: with it comes SciPy, which only a sequential run needs

    facts, status, interim = trial.context.facts, trial.context.status, judge.last()
    if facts.ended is not None or interim is None or interim["trial"] != trial.context.number:
        return
    at_ns, arms = now_ns() + END_DELAY_NS, interim["arms"]
    decided = {arm: row["decision"] for arm, row in arms.items() if row["decision"] is not None}
    if decided and not arms.keys() - decided.keys() - facts.ended_arms.keys():
        parts = "; ".join(f"{arm}: {decision}" for arm, decision in decided.items())
        facts.ended = f"decided after {interim['seconds'] / 60.0:.1f} minutes ({parts})"
        status.note(facts.ended)
        trial.end_load(at_ns)
    elif failed := [arm for arm in decided if decided[arm] == FAIL and arm not in facts.ended_arms]:
        for arm in failed:
            facts.ended_arms[arm] = {"at_ns": at_ns, "why": arms[arm]["reason"]}
            status.note(f"{arm} gets no more: {arms[arm]['reason']}")
        trial.end_load(None)


def watch_weights(weights: WeightController, trial: Steered) -> None:
    """Record and note a change of the weights that the run did not make, in a trial that leaves them as configured."""
    with suppress(*UNANSWERED):  # an Envoy that is gone ends the run by other ways
        if (change := weights.poll(trial.splitter)) is not None:
            trial.context.status.note(f"weights are {in_words(change)} now: {change.why}")
