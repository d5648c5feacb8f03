"""The quick part of the detection table: a few runs of each case. `benchmarks/judging.py` makes it with hundreds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.simulation.detection import (
    BEYOND_WORK,
    CASES,
    FALSE_CALLS,
    FLEETS,
    ONE_ADDRESS,
    called,
    detect,
    detect_in_fleet,
    own_time,
    passed,
    precision,
    real_time,
    recall,
)
from benchmarks.simulation.scenario import Scenario, run

SEEDS = 3


@pytest.mark.parametrize("name", ["compiles of 2 s", "compiles of 5 s", "mixed noise"])
def test_compiles_are_found_where_they_were(name: str) -> None:
    runs = [detect(CASES[name], np.random.default_rng(seed)) for seed in range(3 * SEEDS)]
    assert recall(runs) >= 0.75
    assert precision(runs) >= 0.98
    assert np.median([error for run in runs for error in run.errors_s]) <= 0.05


@pytest.mark.parametrize("name", list(FALSE_CALLS))
def test_nothing_else_is_called_a_compile(name: str) -> None:
    assert called([detect(CASES[name], np.random.default_rng(seed)) for seed in range(SEEDS)]) == 0.0


@pytest.mark.parametrize("name", [name for name in FLEETS if name not in BEYOND_WORK])
def test_prompts_that_take_long_are_not_called_compiles(name: str) -> None:
    assert called([detect_in_fleet(FLEETS[name], np.random.default_rng(seed)) for seed in range(SEEDS)]) == 0.0


@pytest.mark.parametrize("name", BEYOND_WORK)
def test_stalls_that_come_with_long_prompts_for_no_known_reason_are_hardly_ever_called(name: str) -> None:
    assert called([detect_in_fleet(FLEETS[name], np.random.default_rng(seed)) for seed in range(10)]) <= 0.1


@pytest.mark.parametrize("name", ["two replicas", "split", "split, the control three times as fast"])
def test_compiles_among_prompts_that_take_long_are_found_and_nothing_else(name: str) -> None:
    made = replace(FLEETS[name], new_shapes=10, compile_s=3.0)
    runs = [detect_in_fleet(made, np.random.default_rng(seed)) for seed in range(SEEDS)]
    assert recall(runs) >= 0.6
    assert precision(runs) == 1.0


@pytest.mark.parametrize("name", list(FLEETS))
def test_an_arm_that_compiles_is_not_passed_for_one_that_does_not(name: str) -> None:
    made = replace(FLEETS[name], new_shapes=6, compile_s=3.0)
    assert passed([detect_in_fleet(made, np.random.default_rng(seed)) for seed in range(SEEDS)]) == 0.0


@pytest.mark.parametrize("name", list(ONE_ADDRESS))
@pytest.mark.parametrize("tokens", [True, False])
def test_a_compile_of_one_replica_is_not_hidden_by_the_answers_of_another(name: str, tokens: bool) -> None:
    made = replace(ONE_ADDRESS[name], new_shapes=3, compile_s=3.0)
    runs = [detect_in_fleet(made, np.random.default_rng(seed), tokens=tokens) for seed in range(SEEDS)]
    assert passed(runs) == 0.0
    assert called(runs) == 0.0, "which server stalled is not known"


@pytest.mark.parametrize("name", list(FLEETS))
def test_a_server_by_itself_leaves_no_request_standing(name: str) -> None:
    made = replace(FLEETS[name], new_shapes=3, compile_s=3.0)
    assert [detect_in_fleet(made, np.random.default_rng(seed)).parts for seed in range(2)] == [0, 0]


@pytest.mark.parametrize("name", ["burst", "mixed noise", "heavy load, 2 s"])
def test_a_server_of_slots_leaves_no_request_standing(name: str) -> None:
    assert [detect(CASES[name], np.random.default_rng(seed)).parts for seed in range(2)] == [0, 0]


def test_the_servers_own_time_and_real_time_are_inverse() -> None:
    made = run(Scenario(host_stalls=3, duration_s=120.0), np.random.default_rng(4)).treatment
    assert len(made.pauses) == 3
    own = np.linspace(1.0, 90.0, 500)
    assert np.allclose(own_time(made, real_time(made, own)), own)


def test_a_detector_that_never_calls_has_neither_recall_nor_precision() -> None:
    silent = [detect(CASES["one compile of 2 s"], np.random.default_rng(0))]
    assert silent[0].called == 0
    assert recall(silent) == precision(silent) == 0.0
