"""Weights that somebody asked for on the live page: carried out while the traffic flows, and written down.

As in a ramp, a change is in weights.jsonl before the splitter is told, and again once the splitter has taken it. A run
whose weights nobody changes has no such file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from analysis.records.weight_journal import WeightChange, append, read_weights
from loadtests.experiments.model import Experiment
from loadtests.trials.live_page import LivePage
from loadtests.trials.steering import Steered
from servers.clock import now_ns
from servers.fields import ConfigError
from servers.splitter.admin import SplitterError

WHY: Final = "asked for on the live page"


def may_change_weights(experiment: Experiment) -> bool:
    """Whether the splitter chooses the arms of the experiment's requests, by weights."""
    return experiment.traffic.design == "split" and not experiment.external_arms


class AskedWeights:
    """Carries out what is asked for on `page`, over all trials of the run in `run_dir`."""

    moves_weights = False  # what others do to them is written down by whoever watches

    def __init__(self, run_dir: Path, page: LivePage, experiment: Experiment) -> None:
        self._run_dir = run_dir
        self._page = page
        self._from_start = {arm.name: arm.weight for arm in experiment.arms}
        self._begun: set[int] = set()  # trials
        self._unwritten: list[WeightChange] = []
        self._changed = False

    def poll(self, trial: Steered) -> None:
        """What was asked for until now was carried out, or refused with why."""
        number, start_ns = trial.context.number, trial.context.facts.start_ns
        if trial.splitter is None or start_ns is None:
            return
        if number not in self._begun:
            # Every trial begins with the experiment's weights, which matter only once they change.
            self._begun.add(number)
            self._unwritten.append(
                WeightChange(at_ns=start_ns, weights=self._from_start, why="as in the experiment", trial=number)
            )
        if self._changed:
            self._write()
        while (request := self._page.asked()) is not None:
            self._page.answer(request, self._answer(trial, request.weights))

    def _answer(self, trial: Steered, asked: Mapping[str, int]) -> dict[str, Any]:
        try:
            return {"weights": self._change(trial, asked)}
        except (ConfigError, SplitterError) as error:
            return {"error": str(error)}
        except OSError as error:
            return {"error": f"weights.jsonl cannot be written, and nothing was changed: {error.strerror or error}"}

    def _change(self, trial: Steered, asked: Mapping[str, int]) -> dict[str, int]:
        splitter = trial.splitter
        assert splitter is not None
        before, weights = splitter.weights(), dict(splitter.after(asked))
        change = WeightChange(at_ns=now_ns(), weights=weights, why=WHY, action="set", trial=trial.context.number)
        self._write()
        append(self._run_dir, change)
        try:
            splitter.reweight(weights)
        except SplitterError as error:
            append(self._run_dir, replace(change, at_ns=now_ns(), weights=before, why=f"it was not taken: {error}"))
            raise
        append(self._run_dir, replace(change, done_ns=now_ns()))
        told = ", ".join(f"{arm} {weight}" for arm, weight in weights.items())
        trial.context.status.note(f"weights from now on: {told}; {WHY}")
        return weights

    def _write(self) -> None:
        """The journal says how the trials until now began, unless somebody else wrote of them."""
        self._changed = True
        known = {change.trial for change in read_weights(self._run_dir)} if self._unwritten else ()
        while self._unwritten:
            if self._unwritten[0].trial not in known:
                append(self._run_dir, self._unwritten[0])
            del self._unwritten[0]
