import pytest

from analysis.judging.checks.statistics import (
    check_autocorrelation,
    check_blocks,
    check_cold_starts,
    check_cross,
    check_length,
    check_tail,
)
from analysis.settings.gate_limits import GateLimits
from analysis.statistics.compare import Comparison


def item(correlation=None, **more):
    known = {"quantile": 0.99, "margin": 0.1, "alpha": 0.05, "method": "made up", "blocks": 48, "groups": 12}
    return Comparison(autocorrelation=correlation, trials=1, requests=100, **(known | more))


def test_stretches_that_look_alike_are_refused():
    assert check_autocorrelation("a", [item(0.2), item(None)]).ok
    assert not check_autocorrelation("a", [item(0.2), item(0.8)]).ok
    assert check_autocorrelation("a", [item(None)]).ok


def test_lengths_that_change_while_it_runs_may_be_what_lasts():
    failed = check_autocorrelation("a", [item(0.8)], lengths_change=True)
    assert failed.reason.endswith("longer than a stretch, perhaps the lengths that change (traffic.length_scales).")


def test_eighteen_blocks_are_needed():
    assert check_blocks("a", 18, GateLimits(), 30.0).ok
    short = check_blocks("a", 17, GateLimits(), 30.0)
    assert (short.ok, short.affects) == (False, ("noninferiority",))
    assert short.reason == "a can be compared over 17 steady blocks of 30 s; 18 are needed."
    assert not check_length(1, GateLimits(), 30.0).ok


@pytest.mark.parametrize(("requests", "quantile", "ok"), [(500, 0.99, True), (499, 0.99, False), (0, 0.5, False)])
def test_a_tail_needs_five_requests(requests, quantile, ok):
    assert check_tail("a", requests, quantile).ok is ok


def test_one_cold_start_cannot_say_how_they_differ():
    assert check_cold_starts(3).ok
    one = check_cold_starts(1)
    assert (one.ok, one.affects) == (False, ("cold",))
    assert one.reason == "The run has 1 cold start; 3 are needed to say how they differ."


def test_a_second_test_that_contradicts_is_heard():
    assert check_cross("a", [item(verdict="PASS", cross_p_noninferior=0.2)]).ok
    assert not check_cross("a", [item(verdict="PASS", cross_p_noninferior=0.3)]).ok
    assert not check_cross("a", [item(verdict="FAIL", cross_p_inferior=0.3)]).ok
    assert check_cross("a", [item(verdict="INCONCLUSIVE", cross_p_noninferior=0.9)]).ok
