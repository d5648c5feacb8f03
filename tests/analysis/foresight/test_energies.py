"""What a token takes of energy in every step of a search."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analysis.foresight.costs import break_evens
from analysis.foresight.energies import step_energies
from analysis.judging.judgement import judge
from analysis.records.run_records import read_run
from analysis.report.breakeven import payoffs
from analysis.report.charts import chart_data
from analysis.report.frontier import energetic
from analysis.run.energy import energy_of
from analysis.run.run import Run
from analysis.settings.rollout import Rollout
from analysis.summary.summary import analyze
from tests.analysis.judging.test_load_steps import SETTLE_S, STEP_S, write_search
from tests.fakes.resources import sample, tell
from tests.fakes.runs import FakeRun, write_run

KNEES = {"eager": 20.0, "new": 50.0}
RATES = [[8, 16], [16, 32]]
CARDS = {"eager": "cuda:0", "new": "cuda:1"}


def searched(folder: Path, **columns: Any) -> Path:
    directory = tell(write_search(folder / "run", KNEES, RATES), devices=CARDS)
    return sample(directory, "device", "cuda:0", {"power_w": 300.0} | columns)


def test_a_token_takes_the_power_of_the_card_over_the_tokens_of_the_step(tmp_path: Path) -> None:
    run = Run.of(read_run(searched(tmp_path)))
    steps = step_energies(run)
    assert [(step.arm, step.trial, step.rate) for step in steps] == [
        ("eager", number, rate) for number, rates in enumerate(RATES, 1) for rate in rates
    ]
    each = run.requests.output_tokens[0]
    for step in steps:
        assert step.watts == pytest.approx(300.0)
        assert step.tokens == pytest.approx(step.rate * (STEP_S - SETTLE_S) * each, rel=0.05)
        assert step.token_j == pytest.approx(300.0 / (step.rate * each), rel=0.05)


def test_steps_in_which_the_card_was_shared_or_not_watched_tell_nothing(tmp_path: Path) -> None:
    def gap(trial: int, at_s: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.where(at_s > STEP_S, np.nan, 300.0)

    def foreign(trial: int, at_s: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.full(at_s.size, 1.0 if trial == 2 else 0.0)

    directory = searched(tmp_path, power_w=gap, foreign_processes=foreign)
    steps = step_energies(Run.of(read_run(directory)))
    assert [(step.trial, step.rate) for step in steps] == [(1, 8.0)]


def test_the_report_draws_what_is_known(tmp_path: Path) -> None:
    summary = analyze(searched(tmp_path))
    assert energetic(summary)
    drawn = chart_data(summary)["knees"]["energies"]
    assert [(row["arm"], row["trial"], row["rate"]) for row in drawn] == [(0, 1, 8), (0, 1, 16), (0, 2, 16), (0, 2, 32)]
    assert not energetic(analyze(write_search(tmp_path / "plain", KNEES, RATES)))


def test_the_break_even_has_the_energy_of_what_each_arm_held(tmp_path: Path) -> None:
    directory = searched(tmp_path)
    run = Run.of(read_run(directory))
    eager, new = break_evens(run, judge(run), Rollout())
    assert eager.rps.seen == 16
    steps = step_energies(run)
    assert eager.token_j == pytest.approx(np.mean([step.token_j for step in steps if step.rate == 16]))
    assert eager.token_j < max(step.token_j for step in steps), "not the mean over all loads"
    assert new.token_j is None, "nobody watched its card"
    summary = analyze(directory)
    each = run.requests.output_tokens[0]
    energy = summary["break_even"]["arms"][0]["energy"]
    assert energy["per_request_j"] == pytest.approx(each * energy["per_token_j"])
    shown = {row.name: row.values for row in payoffs(summary).figures}
    assert shown["energy a token, J"][1] == "–"
    assert shown["energy a request, J"][0] != "–"
    plain = payoffs(analyze(write_search(tmp_path / "plain", KNEES, RATES)))
    assert not any("energy" in row.name for row in plain.figures)


def test_without_a_search_the_energy_is_that_of_the_load_that_was_offered(tmp_path: Path) -> None:
    directory = tell(write_run(tmp_path / "run", FakeRun(duration_s=120)), devices=CARDS)
    run = Run.of(read_run(sample(directory, "device", "cuda:0", {"power_w": 300.0})))
    eager, _ = break_evens(run, judge(run), Rollout(load_rps=10.0))
    energy = energy_of(run, "eager")
    assert energy is not None
    assert eager.token_j == pytest.approx(energy.trials[0].joules / energy.trials[0].tokens)
