"""What may end a trial early or move its weights, while its traffic flows."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from tailgate.analysis.interim import JOURNAL
from tailgate.loadtests.page.tails import LinesTail
from tailgate.loadtests.trials.context import TrialContext
from tailgate.loadtests.trials.processes import child_environment
from tailgate.loadtests.trials.telemetry import Collector
from tailgate.loadtests.trials.weights import UNANSWERED, Splitter, WeightController, in_words
from tailgate.servers.clock import now_ns
from tailgate.servers.processes import Child


class Steered(Protocol):
    """The trial as its steering sees it: its facts and status, what replicas reported, and what splits the requests,
    where they go through it."""

    context: TrialContext
    collector: Collector
    splitter: Splitter | None

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
            [*_COMMAND, str(run_dir.resolve())],
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


def early_end(interim: Mapping[str, Any], ended: Collection[str] = ()) -> tuple[str | None, dict[str, str]]:
    """Return why a line of interim.jsonl ends the trial, None where it goes on; and else the arms that get no more,
    each with the reason. `ended` are those that have ended already."""
    from tailgate.analysis.judging.gates import FAIL  # here: with it comes SciPy, which only a sequential run needs

    outlooks = {arm: row for arm, row in interim["arms"].items() if isinstance(row, Mapping)}
    decided = {arm: row["decision"] for arm, row in outlooks.items() if row["decision"] is not None}
    if decided and not outlooks.keys() - decided.keys() - set(ended):
        parts = "; ".join(f"{arm}: {decision}" for arm, decision in decided.items())
        return f"decided after {interim['seconds'] / 60.0:.1f} minutes ({parts})", {}
    failed = [arm for arm, decision in decided.items() if decision == FAIL and arm not in ended]
    return None, {arm: outlooks[arm]["reason"] for arm in failed}


def end_when_decided(judge: Judge, trial: Steered) -> None:
    """End the load, as a whole or for one arm, once an interim analysis decides it. trial.json states why."""
    facts, status, interim = trial.context.facts, trial.context.status, judge.last()
    if facts.ended is not None or interim is None or interim["trial"] != trial.context.number:
        return
    why, arms = early_end(interim, facts.ended_arms)
    if why is None and not arms:
        return
    at_ns = now_ns() + END_DELAY_NS
    for arm, reason in arms.items():
        facts.ended_arms[arm] = {"at_ns": at_ns, "why": reason}
        status.note(f"{arm} gets no more: {reason}")
    if why is not None:
        facts.ended = why
        status.note(why)
    trial.end_load(at_ns if why is not None else None)


def watch_weights(weights: WeightController, trial: Steered) -> None:
    """Record and note a change of the weights that the run did not make, in a trial that leaves them as configured."""
    if trial.splitter is None:
        return
    with suppress(*UNANSWERED):  # an Envoy that is gone ends the run by other ways
        if (change := weights.poll(trial.splitter)) is not None:
            trial.context.status.note(f"weights are {in_words(change)} now: {change.why}")
