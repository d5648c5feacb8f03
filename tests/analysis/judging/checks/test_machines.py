"""The check "machines": no machine contradicts what all of them together decide."""

import math
from dataclasses import replace

import pytest

from analysis.judging.checks.machines import check_machines
from analysis.judging.gates import FAIL, INCONCLUSIVE, PASS, Gate
from analysis.judging.validity import apply_checks
from analysis.statistics.compare import Comparison

ALL = Comparison(
    arm="compiled",
    control="eager",
    metric="e2e",
    quantile=0.99,
    margin=0.1,
    alpha=0.05,
    ratio=1.0,
    verdict=PASS,
    method="t-test over trials",
    blocks=60,
    groups=6,
    trials=6,
    requests=1000,
)


def machine(name, ratio, spread, **more):
    own = replace(ALL, machine=name, ratio=ratio, spread=spread, trials=2, verdict=INCONCLUSIVE)
    return replace(own, **{"p_inferior": 0.5, "p_noninferior": 0.5, **more})


def found(item, *apart, shares=()):
    return check_machines("compiled", [item], apart, shares)


def test_machines_that_agree_contradict_nothing():
    check = found(ALL, machine("a", 0.98, 0.02), machine("b", 1.03, 0.02))
    assert check.ok
    assert check.value is not None
    assert check.reason == "No one of 2 machines contradicts what all of them say of compiled."


def test_a_pass_is_opened_where_machines_differ_and_one_was_seen_beyond_the_margin():
    check = found(ALL, machine("a", 0.9, 0.03), machine("b", 1.15, 0.03))
    assert not check.ok
    assert check.reason.startswith("The machines disagree: p99 E2E is 1.00 times that of eager over all, and 1.15 on b")
    assert "0.90 on a; one ratio for all has p = " in check.reason


def test_a_machine_beyond_the_margin_within_chance_opens_nothing():
    assert found(ALL, machine("a", 0.9, 0.2), machine("b", 1.15, 0.2)).ok


def test_machines_that_differ_on_one_side_of_the_margin_decide_alike():
    assert found(ALL, machine("a", 0.7, 0.01), machine("b", 1.0, 0.01)).ok


def test_a_machine_that_is_surely_beyond_the_margin_opens_a_pass_whatever_the_others_know():
    others = [machine(name, 1.0, 0.5) for name in "acd"]
    assert not found(ALL, *others, machine("b", 1.2, 0.3, p_inferior=0.04)).ok


def test_a_fail_is_opened_by_a_machine_that_is_surely_within_the_margin():
    fail = replace(ALL, ratio=1.3, verdict=FAIL)
    assert not found(fail, machine("a", 1.6, 0.02), machine("b", 1.0, 0.02)).ok
    assert found(fail, machine("a", 1.35, 0.02), machine("b", 1.25, 0.02)).ok


def test_a_machine_without_a_ratio_says_nothing():
    assert found(ALL, machine("a", None, None), machine("b", 1.0, 0.02)).value is None


def test_the_luck_of_starts_is_no_disagreement():
    apart = [machine("a", 0.9, 0.02), machine("b", 1.12, 0.02)]
    assert not found(ALL, *apart).ok
    assert found(ALL, *(replace(item, restart_spread=0.2 * math.sqrt(2.0)) for item in apart)).ok


@pytest.mark.parametrize("verdict", [PASS, FAIL])
def test_only_the_gate_that_is_contradicted_is_opened(verdict):
    def gate(name, kind, own):
        return Gate(arm="compiled", gate=name, kind=kind, value=1.0, limit=1.0, unit="ms", verdict=own, reason="Seen.")

    gates = [
        gate("slo p99_ttft_ms", "slo", PASS),
        gate("slo p99_e2e_ms", "slo", verdict),
        gate("noninferiority p99_e2e", "noninferiority", verdict),
        gate("recompiles", "recompile", PASS),
    ]
    missed = ("slo p99_ttft_ms", "slo", "p99_ttft_ms is missed on b alone")
    check = found(ALL, machine("a", 1.0, 0.1), machine("b", 1.0, 0.1), shares=[missed])
    after = apply_checks(gates, [check])
    assert [item.verdict for item in after] == [INCONCLUSIVE, verdict, verdict, PASS]
    assert after[0].blocked_by == ("machines",)
