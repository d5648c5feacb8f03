"""The quick part of `benchmarks/judging.py`: few runs, so goals allow for chance (binomial, one in 1,000)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from scipy import stats

from benchmarks.simulation import separate
from benchmarks.simulation.detection import (
    CASES,
    FLEETS,
    ONE_ADDRESS,
    QUIET,
    detect,
    opened,
    passed,
    share_seen,
)
from benchmarks.simulation.fleet import Fleet
from benchmarks.simulation.kinds import KINDS, Kind, trial
from benchmarks.simulation.planning import replanned
from benchmarks.simulation.promises import ALPHA, AT_MARGIN, METRICS, POWER, any_of_three, coverage, outcome
from benchmarks.simulation.promises import MARGIN as MARGIN_PROMISES
from benchmarks.simulation.table import Table
from tailgate.analysis.arrays import Floats

RUNS = 30


def most(share: float, runs: int = RUNS) -> float:
    """The largest share that chance gives of `runs` when the truth is `share`, but for one time in 1,000."""
    return float(stats.binom.ppf(0.999, runs, share)) / runs


def least(share: float, runs: int = RUNS) -> float:
    return float(stats.binom.ppf(0.001, runs, share)) / runs


REQUEST_QUANTILES = (0.5, 0.95, 0.99)
_REQUEST_DRAWS = 200


def request_tests(kind: Kind, seed: int) -> Floats:
    """Return 1 for each common test that calls equal arms different.

    They are Mann and Whitney's test over requests, then a plain bootstrap of requests at each of REQUEST_QUANTILES.
    """
    one, other = (served.e2e_ms for served in trial(kind, np.random.default_rng(seed), (1.0, 1.0)))
    wrong = [stats.mannwhitneyu(one, other).pvalue <= ALPHA]
    rng = np.random.default_rng([seed, 2])
    drawn = [
        np.quantile(values[rng.integers(0, len(values), (_REQUEST_DRAWS, len(values)))], REQUEST_QUANTILES, axis=1)
        for values in (one, other)
    ]
    low, high = np.quantile(np.log(drawn[0]) - np.log(drawn[1]), (ALPHA / 2, 1 - ALPHA / 2), axis=1)
    return np.array([*wrong, *((low > 0) | (high < 0))], dtype=np.float64)


def test_tests_over_requests_call_equal_arms_different_under_load() -> None:
    wrong = Table(RUNS).means(partial(request_tests, KINDS["heavy"]))
    assert wrong.min() > 0.15


def test_three_arms_fail_falsely_no_more_often_than_one() -> None:
    wrong = Table(RUNS).means(partial(any_of_three, KINDS["calm"]))
    assert wrong[0] <= most(0.07)
    assert wrong[0] <= wrong[1]


FEW = 20


@pytest.mark.parametrize("name", ["drift", "restarts", "jams", "heavy"])
def test_intervals_hold_the_truth_on_every_kind_of_servers(name: str) -> None:
    assert Table(FEW).means(partial(coverage, KINDS[name])).min() >= least(0.92, FEW)


@pytest.mark.parametrize("name", ["drift", "jams"])
def test_arms_at_the_margin_seldom_pass(name: str) -> None:
    assert Table(FEW).means(partial(outcome, KINDS[name], ratio=1.0 + MARGIN_PROMISES))[:2].max() <= most(0.08, FEW)


@pytest.mark.parametrize(("name", "metric"), [("jams", "ttft"), ("static", "e2e"), ("heavy", "e2e")])
def test_slower_steps_that_put_the_tail_at_the_margin_seldom_pass(name: str, metric: str) -> None:
    shares = Table(FEW).means(partial(outcome, KINDS[name], slower=AT_MARGIN[name, metric]))
    assert shares[METRICS.index(metric)] <= most(0.08, FEW)


@pytest.mark.parametrize("name", ["calm", "drift"])
def test_equal_arms_pass_the_default_gates_in_twenty_minutes(name: str) -> None:
    shares = Table(FEW).means(partial(outcome, KINDS[name]))
    assert shares[4] >= least(POWER[name] - 0.08, FEW)
    assert shares[5] <= most(0.05, FEW)


def test_an_arm_that_is_half_as_slow_again_fails_under_jams() -> None:
    shares = Table(10).means(partial(outcome, KINDS["jams"], ratio=1.5))
    assert shares[5] >= 0.7
    assert shares[4] == 0.0


def test_planned_runs_are_longer_than_those_that_left_a_gate_open_and_decide_it() -> None:
    kind = KINDS["jams"]
    planned = [row for row in (replanned(kind, seed) for seed in range(30)) if row[0]]
    assert len(planned) >= 4
    assert all(row[2] > kind.duration_s for row in planned)
    assert np.mean([decided for _, decided, _ in planned]) >= least(0.8, len(planned))


def test_intervals_of_separate_runs_hold_the_truth() -> None:
    assert Table(FEW).means(partial(separate.coverage, separate.SEPARATE["drift"])).min() >= least(0.92, FEW)


def test_separate_runs_at_the_margin_are_seldom_decided() -> None:
    shares = Table(FEW).means(partial(separate.verdicts, separate.SEPARATE["calm"], ratio=1.0 + MARGIN_PROMISES))
    assert shares.max() <= most(0.08, FEW)


SEEDS = 3


@pytest.mark.parametrize("name", ["compiles of 2 s", "compiles of 5 s", "mixed noise"])
def test_compiles_show_as_stalls_where_they_were(name: str) -> None:
    runs = [detect(CASES[name], seed) for seed in range(3 * SEEDS)]
    assert share_seen(runs) >= 0.95
    assert np.median([error for run in runs for error in run.errors_s]) <= 0.05


@pytest.mark.parametrize("name", [*QUIET, "two replicas", "two replicas, chunked prefill", "two fast replicas"])
def test_stalls_of_the_arm_alone_open_the_gates_on_compiles(name: str) -> None:
    """Garbage collections, bursts, stalls of the host and prompts that take as long on the control do not."""
    made = CASES.get(name) or FLEETS[name]
    assert opened([detect(made, seed) for seed in range(SEEDS)]) == float("arm stalls" in name)


@pytest.mark.parametrize("name", list(FLEETS))
def test_an_arm_that_compiles_is_not_passed_for_one_that_does_not(name: str) -> None:
    made = replace(FLEETS[name], new_shapes=6, compile_s=3.0)
    assert passed([detect(made, seed) for seed in range(SEEDS)]) == 0.0


@pytest.mark.parametrize("name", list(ONE_ADDRESS))
@pytest.mark.parametrize("tokens", [True, False])
def test_a_compile_of_one_replica_is_not_hidden_by_the_answers_of_another(name: str, tokens: bool) -> None:
    made = replace(ONE_ADDRESS[name], new_shapes=3, compile_s=3.0)
    runs = [detect(made, seed, tokens=tokens) for seed in range(SEEDS)]
    assert passed(runs) == 0.0


@pytest.mark.parametrize(
    "made",
    [
        *(replace(made, new_shapes=3, compile_s=3.0) for made in FLEETS.values()),
        *(CASES[name] for name in ("burst", "mixed noise", "heavy load, 2 s")),
    ],
)
def test_a_server_by_itself_has_no_partial_stall(made: Fleet) -> None:
    assert [detect(made, seed).parts for seed in range(2)] == [0, 0]
