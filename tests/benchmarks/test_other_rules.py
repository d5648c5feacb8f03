from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from scipy import stats

from analysis.arrays import Floats
from benchmarks.case import OTHERS, judged_cases
from benchmarks.other_rules import (
    CANNOT_SAY,
    FAIL,
    PASS,
    RULES,
    Answers,
    kayenta,
    p99_interval,
    shift_interval,
    threshold,
)
from benchmarks.other_verdicts import markdown, other_verdicts

WINDOW_S = 600.0


def made(seed: int, *, slower: float = 1.0, trials: int = 3, count: int = 900) -> Answers:
    """Answers to requests that come evenly over each trial, lognormal with a coefficient of variation of about 0.3."""
    rng = np.random.default_rng(seed)
    return Answers(
        latency_ms=slower * rng.lognormal(5.0, 0.3, trials * count),
        trial=np.repeat(np.arange(1, trials + 1), count),
        ended_s=np.tile(np.linspace(0, WINDOW_S, count, endpoint=False), trials),
        window_s=dict.fromkeys(range(1, trials + 1), WINDOW_S),
    )


def of(latency_ms: Floats, *, window_s: float = WINDOW_S) -> Answers:
    """One trial with these latencies, which end one a second."""
    return Answers(
        latency_ms=latency_ms,
        trial=np.ones(latency_ms.size, dtype=np.int64),
        ended_s=np.arange(latency_ms.size, dtype=np.float64),
        window_s={1: window_s},
    )


@pytest.mark.parametrize("name", RULES)
def test_a_rule_calls_an_arm_that_takes_half_as_long_again_slower(name: str) -> None:
    assert RULES[name](made(1, slower=1.5), made(2)).verdict == FAIL


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("slower", [1.0, 0.5])
def test_a_rule_lets_an_arm_pass_that_is_equal_or_faster(name: str, slower: float) -> None:
    assert RULES[name](made(3, slower=slower), made(4)).verdict == PASS


def test_a_threshold_fails_an_arm_by_chance_alone() -> None:
    few = [threshold(made(seed, trials=1, count=90), made(seed + 1000, trials=1, count=90)) for seed in range(200)]
    assert sum(item.verdict == FAIL for item in few) > 20


def test_kayenta_fails_a_shift_of_any_size_that_is_known_well_and_its_allowance_lets_it_pass() -> None:
    base = np.linspace(100.0, 101.0, 2000)
    slightly = of(base + 0.5)
    assert kayenta(slightly, of(base)).verdict == FAIL
    assert kayenta(slightly, of(base), allowed_increase=1.1).verdict == PASS


def test_kayenta_calls_a_faster_arm_low() -> None:
    assert kayenta(made(5, slower=0.5), made(6)).figures["class"] == "Low"


def test_kayenta_fails_three_points_that_lie_above_three_others_whatever_its_confidence() -> None:
    """The chance of that among equals is one in twenty; the interval of 98 % ends at the least difference."""
    assert kayenta(of(np.array([210.0, 220.0, 230.0])), of(np.array([100.0, 101.0, 102.0]))).verdict == FAIL


def test_kayenta_cannot_compare_two_constants_and_passes_what_is_identical() -> None:
    assert kayenta(of(np.full(5, 2.0)), of(np.full(5, 1.0))).verdict == CANNOT_SAY
    assert kayenta(of(np.full(5, 1.0)), of(np.full(5, 1.0))).verdict == PASS


def test_a_minute_in_which_nothing_ended_is_no_point() -> None:
    """A server that stands still gives a monitor nothing to see; what ends after the window is not seen either."""
    stalled = Answers(
        latency_ms=np.array([10.0, 20.0, 100_000.0, 100_000.0]),
        trial=np.ones(4, dtype=np.int64),
        ended_s=np.array([1.0, 2.0, 181.0, 182.0]),
        window_s={1: 180.0},
    )
    assert stalled.series(60.0) == pytest.approx([19.9])
    steady = of(np.linspace(50.0, 60.0, 180), window_s=180.0)
    assert kayenta(stalled, steady, width_s=60.0).verdict == PASS
    assert threshold(stalled, steady).verdict == FAIL


def test_the_shift_is_the_median_difference_of_all_pairs() -> None:
    rng = np.random.default_rng(7)
    values, others = rng.lognormal(5.0, 0.4, 101), rng.lognormal(5.1, 0.4, 83)
    differences = np.subtract.outer(values, others)
    low, shift, high = shift_interval(values, others, confidence=0.98)
    assert shift == pytest.approx(np.median(differences), abs=0.2)
    assert low < shift < high
    assert [-one for one in shift_interval(others, values, confidence=0.98)] == pytest.approx(
        [high, shift, low], abs=0.2
    )


@pytest.mark.parametrize("step", [0.0, 20.0])
def test_the_interval_of_the_shift_holds_what_the_test_does_not_reject(step: float) -> None:
    rng = np.random.default_rng(7)
    values, others = rng.lognormal(5.0, 0.4, 60), rng.lognormal(5.1, 0.4, 50)
    if step:  # so that many are tied
        values, others = (np.round(one / step) * step for one in (values, others))

    def p(shift: float) -> float:
        return float(stats.mannwhitneyu(values - shift, others, method="asymptotic").pvalue)

    low, _, high = shift_interval(values, others, confidence=0.98)
    assert p(low - 0.01) < 0.02 < p(low + 0.01)
    assert p(high + 0.01) < 0.02 < p(high - 0.01)


def test_the_bootstrap_of_order_statistics_is_that_of_whole_resamples() -> None:
    values = np.random.default_rng(8).lognormal(5.0, 0.5, 250)
    draws = np.random.default_rng(9).choice(values, (9_999, values.size))
    expected = np.quantile(np.quantile(draws, 0.99, axis=1), (0.025, 0.975))
    assert p99_interval(values, rng=np.random.default_rng(10)) == pytest.approx(expected, rel=0.01)
    assert p99_interval(values[:1], rng=np.random.default_rng(10)) == (values[0], values[0])


KEPT: Mapping[str, Any] = json.loads(OTHERS.read_text(encoding="utf-8"))


def rows(case: str) -> list[Mapping[str, Any]]:
    return [row for row in KEPT["rows"] if row["case"] == case]


def test_what_other_rules_say_is_what_was_kept() -> None:
    document = other_verdicts(judged_cases())
    assert markdown(document) == markdown(KEPT)
    for row, kept in zip(document["rows"], KEPT["rows"], strict=True):
        for rule, said in row["rules"].items():
            figures, before = ({**one, "verdict": 0, "class": 0} for one in (said, kept["rules"][rule]))
            assert figures == pytest.approx(before, rel=2e-3, abs=1e-3)
        assert {**row, "rules": None} == {**kept, "rules": None}
    assert {**document, "rows": None} == {**KEPT, "rows": None}


def test_every_case_whose_gates_compare_latencies_is_there() -> None:
    compared = set()
    for name, (_, verdict) in judged_cases().items():
        if any(gate["gate"].startswith("noninferiority") for gate in verdict["gates"]):
            compared.add(name)
    assert {row["case"] for row in KEPT["rows"]} == compared


def test_rules_see_neither_the_requests_that_failed_nor_why() -> None:
    for row in rows("naive"):
        assert row["requests"]["naive"] == {"sent": 251, "completed": 179, "failed": 72, "without_end": 0}
        assert row["rules"]["kayenta_requests"]["points"] == 179
        assert row["rules"]["kayenta_minutes"] == {
            **row["rules"]["kayenta_minutes"],
            "verdict": "PASS",
            "points": 1,  # nothing ended in the other two minutes
            "control_points": 3,
        }
        assert row["tailgate"]["overall"] == "FAIL"


def test_beside_the_rules_stands_the_verdict_on_the_arm_and_not_on_the_run() -> None:
    verdicts = {row["arm"]: row["tailgate"]["overall"] for row in rows("planted-decode-h200")}
    assert verdicts == {"decode-plus-5": "INCONCLUSIVE", "decode-plus-10": "INCONCLUSIVE", "decode-plus-20": "FAIL"}


def test_trials_in_a_cold_start_leave_nothing_to_compare() -> None:
    for row in rows("staged-heavy-neighbour"):
        assert {said["verdict"] for said in row["rules"].values()} == {"cannot say"}
