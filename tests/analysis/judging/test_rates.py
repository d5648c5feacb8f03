import math

import numpy as np
import pytest

from analysis.judging.rates import compare_rates, log_ratio
from analysis.records.run_records import read_run
from analysis.records.schemas import REQUESTS
from analysis.records.tables import RecordWriter, read_table
from analysis.run.run import Run
from tests.fakes.runs import EAGER, Compile, FakeArm, FakeRun, write_run

SLO = {"p99_ttft_ms": 2000}
STALLS = FakeArm(name="naive", compiles=[Compile(at_s=100 + 100 * step, seconds=20) for step in range(4)])


def rates_of(path, run, edit=None):
    directory = write_run(path / "run", run)
    if edit is not None:
        file = directory / "trial-01" / "requests-0.arrow"
        rows = edit(read_table(file, REQUESTS)[0].to_pylist())
        file.unlink()
        with RecordWriter(file, REQUESTS) as writer:
            for row in rows:
                writer.append(row)
    return {(item.arm, item.rate): item for item in compare_rates(Run.of(read_run(directory)))}


def test_equal_arms_make_the_same_of_the_same_load(tmp_path):
    found = rates_of(tmp_path, FakeRun(duration_s=480, rate=2, slo=SLO))
    assert {rate for _, rate in found} == {"goodput", "requests", "output tokens"}
    for rate in ("goodput", "requests"):
        assert found["compiled", rate].low < 1.0 < found["compiled", rate].high
    # The same tokens in every block: equal, and no interval of no width.
    tokens = found["compiled", "output tokens"]
    assert (tokens.ratio, tokens.low, tokens.high) == (1.0, None, None)
    assert tokens.obstacle == "no stretch of time differs from the others"


def test_stalls_cost_goodput_and_not_throughput(tmp_path):
    found = rates_of(tmp_path, FakeRun(arms=(EAGER, STALLS), duration_s=480, rate=2, slo=SLO))
    goodput, requests = found["naive", "goodput"], found["naive", "requests"]
    assert goodput.share_pct == pytest.approx(100.0 * goodput.value / 2.0, rel=0.01)
    assert goodput.ratio < 0.9
    assert goodput.high < 1.0
    assert goodput.control_share_pct == 100.0
    assert requests.ratio == pytest.approx(1.0, abs=0.01)


def test_failed_requests_are_no_throughput(tmp_path):
    broken = FakeArm(name="compiled", error_share=0.3)
    found = rates_of(tmp_path, FakeRun(arms=(EAGER, broken), duration_s=300, rate=2, slo=SLO))
    assert found["compiled", "requests"].ratio == pytest.approx(0.7, abs=0.06)
    assert found["compiled", "goodput"].high < 0.9


def test_a_split_of_nine_to_one_is_no_difference(tmp_path):
    arms = (FakeArm(name="eager", enabled=False, weight=9), FakeArm(name="compiled", weight=1))
    found = rates_of(tmp_path, FakeRun(design="split", arms=arms, duration_s=480, rate=8, slo=SLO))
    requests = found["compiled", "requests"]
    assert requests.value < requests.control_value / 5
    assert requests.low < 1.0 < requests.high
    assert requests.ratio == pytest.approx(1.0, abs=0.03)


def test_six_trials_are_the_unit(tmp_path):
    found = rates_of(tmp_path, FakeRun(trials=6, duration_s=60, rate=2, slo=SLO))
    assert {(item.method, item.groups) for item in found.values()} == {("t over trials", 6)}


def test_without_limits_nobody_knows_what_a_good_request_is(tmp_path):
    assert ("compiled", "goodput") not in rates_of(tmp_path, FakeRun(duration_s=60, rate=2))
    asked = rates_of(tmp_path / "asked", FakeRun(duration_s=60, rate=2, gates={"min_goodput_ratio": 0.9}))
    assert asked["compiled", "goodput"].ratio is None
    assert "what a good request is" in asked["compiled", "goodput"].obstacle


def test_one_block_has_a_ratio_and_no_limits(tmp_path):
    for item in rates_of(tmp_path, FakeRun(duration_s=30, rate=4, slo=SLO)).values():
        assert item.ratio is not None
        assert (item.low, item.high) == (None, None)


def test_an_arm_without_requests_has_no_rate(tmp_path):
    found = rates_of(
        tmp_path,
        FakeRun(duration_s=60, rate=2, slo=SLO),
        lambda rows: [row for row in rows if row["arm"] == "eager"],
    )
    assert all((item.ratio, item.low, item.high) == (None, None, None) for item in found.values())
    assert all(item.obstacle for item in found.values())


class TestLogRatio:
    def test_no_miss_in_any_group_is_no_certainty(self):
        sent = np.full(10, 50.0)
        ratio, spread, _ = log_ratio(sent, sent, sent, sent, share=True)
        assert ratio == 1.0
        assert spread == pytest.approx(math.sqrt(2 / 501 / 500), rel=0.05)

    def test_by_hand(self):
        made, other, sent = np.array([8.0, 12.0]), np.array([10.0, 10.0]), np.array([20.0, 20.0])
        ratio, spread, _ = log_ratio(made, sent, other, sent, share=False)
        assert (ratio, spread) == (1.0, pytest.approx(math.sqrt(2 * (0.1**2 + 0.1**2))))

    @pytest.mark.parametrize(
        ("made", "sent", "control", "ratio", "why"),
        [
            ([0.0, 0.0], [5.0, 5.0], [5.0, 5.0], 0.0, "the arm made nothing"),
            ([5.0, 5.0], [5.0, 5.0], [0.0, 0.0], None, "the control made nothing"),
            ([0.0, 0.0], [0.0, 0.0], [5.0, 5.0], None, "one of the arms was sent nothing"),
            ([5.0], [5.0], [5.0], 1.0, "one stretch of time cannot show how much stretches differ"),
            ([], [], [], None, "one of the arms was sent nothing"),
        ],
    )
    def test_nothing_has_no_error(self, made, sent, control, ratio, why):
        columns = [np.array(column) for column in (made, sent, control)]
        assert log_ratio(*columns, np.full(len(made), 5.0), share=True) == (ratio, None, why)

    def test_limits_hold_the_truth_as_often_as_they_say(self):
        """Two-sided 90 %: 300 seeded pairs with bunched misses; at least 84 % must hold the true ratio."""
        from scipy import stats

        held = 0
        reach = stats.t.ppf(0.95, 9)
        for seed in range(300):
            rng = np.random.default_rng(seed)
            sent = rng.poisson(200, size=10).astype(float)
            good = [rng.binomial(sent.astype(int), rng.beta(95, 5, size=10)).astype(float) for _ in range(2)]
            ratio, spread, _ = log_ratio(good[0], sent, good[1], sent, share=True)
            held += abs(math.log(ratio)) <= reach * spread
        assert held >= 0.84 * 300
