import copy

import pytest

from analysis.report import comparing
from analysis.report.html import html_report
from analysis.report.markdown import markdown_report
from analysis.report.values import DASH


class TestGrids:
    def test_a_grid_for_each_arm_and_phase_a_cell_for_each_quantile(self, demo):
        found = comparing.grids(demo)
        assert [(grid.arm, grid.phase) for grid in found] == [
            (arm, phase) for arm in ("compiled-padded", "compiled-naive") for phase in ("steady", "cold", "all")
        ]
        assert {grid.heads for grid in found} == {("p50", "p90", "p95", "p99", "p99.9")}
        assert [name for name, _ in found[0].lines] == ["TTFT", "E2E", "TPOT", "ITL", "max ITL"]

    def test_only_what_gates_has_a_verdict(self, demo):
        cells = [cell for grid in comparing.grids(demo) for _, line in grid.lines for cell in line]
        assert {cell.verdict for cell in cells if not cell.gate} == {DASH}
        assert sum(cell.gate for cell in cells) == 4

    def test_a_cell_says_slower_only_where_its_whole_interval_does(self, demo):
        row = next(row for row in demo["comparisons"] if row["gate"])
        for low, high, tone in ((1.01, 1.2, "slower"), (0.8, 0.99, "faster"), (0.9, 1.1, ""), (None, None, "")):
            row |= {"low": low, "high": high}
            (cell,) = (cell for cell in comparing.grids(demo)[0].lines[0][1] if cell.gate)
            assert cell.tone == tone

    def test_a_phase_without_a_ratio_is_left_out(self, demo):
        demo["comparisons"] = [row for row in demo["comparisons"] if row["phase"] != "cold"]
        assert {grid.phase for grid in comparing.grids(demo)} == {"steady", "all"}

    def test_numbers_that_are_missing_are_no_cells(self, nulls):
        assert comparing.grids(nulls) == []
        assert comparing.grids({}) == []


def test_the_chart_shows_what_gates_and_the_same_over_all_traffic(demo):
    shown = comparing.shown_comparisons(demo)
    assert [(row["metric"], row["phase"]) for row in shown if row["arm"] == "compiled-naive"] == [
        ("ttft", "steady"),
        ("e2e", "steady"),
        ("ttft", "all"),
        ("e2e", "all"),
    ]


def test_beside_a_quantile_stands_its_own_ratio_over_all_traffic(demo):
    rows = {(row["metric"], row["phase"], row["quantile"]): row["ratio"] for row in demo["comparisons"]}
    assert comparing.ratio_of(demo, "compiled-naive", "ttft") == rows["ttft", "all", 0.99]
    assert comparing.ratio_of(demo, "nobody", "ttft") is None


class TestRates:
    def test_goodput_and_throughput_stand_in_both_reports(self, demo):
        goodput = comparing.rates(demo).rows[0]
        assert (goodput["Rate"], goodput["At least"]) == ("goodput", DASH)
        for report in (html_report(demo), markdown_report(demo)):
            assert "requests completed" in report
            assert goodput["Interval"] in report

    def test_without_them_there_is_no_section(self, demo):
        del demo["rates"]
        assert comparing.rates(demo).rows == []
        assert "At the same load" not in markdown_report(demo)
        assert "same load" not in html_report(demo)

    def test_numbers_that_are_missing_are_dashes(self, nulls):
        assert {row["Interval"] for row in comparing.rates(nulls).rows} == {DASH}


def test_the_ratio_of_loads_stands_beside_the_knee(demo):
    assert comparing.load_ratios(demo) == {}
    demo["saturation"] = {
        "brackets": [{"arm": "eager", "passed_rps": 8.0}, {"arm": "compiled-padded", "passed_rps": 10.0}],
        "ratios": [{"arm": "compiled-padded", "ratio": 1.25, "low": 1.1, "high": None}],
    }
    assert comparing.load_ratios(demo) == {"compiled-padded": f"×1.25 [1.1, {DASH}]"}
    assert "×1.25 [1.1, –]" in markdown_report(demo)
    assert "×1.25 [1.1, –]" in html_report(demo)


@pytest.mark.parametrize("verdict", ["PASS", "FAIL", "INCONCLUSIVE", None])
def test_a_gate_is_framed_in_the_colour_of_its_verdict(verdict, rollout):
    summary = copy.deepcopy(rollout)
    for row in summary["comparisons"]:
        if row["gate"]:
            row["verdict"] = verdict
    page = html_report(summary)
    named = "–" if verdict is None else verdict.lower()
    assert f'class="num gate gate-{named}"' in page


def test_ratios_that_are_means_over_trials_say_so_beside_the_figures(demo):
    assert "by\u00a0trial" not in html_report(demo)
    for row in demo["comparisons"]:
        row["method"] = "t-test over trials"
    assert "by\u00a0trial" in html_report(demo)
