"""The load of external arms in the reports: figures, the chart, and what stands beside a spike."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from analysis.report import server_load
from analysis.report.charts import chart_data
from analysis.report.html import html_report
from analysis.report.markdown import markdown_report
from analysis.report.reading import arm_names

Summary = dict[str, Any]


@pytest.fixture
def loaded(demo: Summary) -> Summary:
    """The golden run, one of whose arms shows its load."""
    summary = copy.deepcopy(demo)
    arm = arm_names(summary)[1]
    columns = {"running": [3.0, 8.0], "waiting": [0.0, 31.0], "cache_pct": [40.0, 99.5], "preemptions": [None, 3.0]}
    most = {"most_running": 8, "most_waiting": 31, "most_cache_pct": 99.5, "preemptions": 3}
    counts = {"answered": 299, "failed": 1, "late": 0, "why": "HTTPError: 503 <b>"}
    summary["server_load"] = {
        "bin_s": 1.0,
        "arms": [{"arm": arm, **most, **counts}],
        "rows": [{"trial": 1, "arm": arm, "replica": f"{arm}-0", "t_s": [4.0, 5.0], **columns}],
    }
    beside = {"running": 8, "waiting": 31, "cache_pct": 99.5, "preemptions": 1}
    summary["spikes"][0]["server"] = beside
    return summary


def test_figures_of_each_arm_and_of_its_pages_are_in_both_reports(loaded: Summary) -> None:
    [row] = server_load.server_load(loaded).rows
    assert row["Most waiting"] == "31"
    assert (row["Pages read"], row["Failed"], row["First failure"]) == ("299", "1", "HTTPError: 503 <b>")
    page = html_report(loaded)
    assert 'data-chart="serverLoad"' in page
    assert "503 <b>" not in page
    assert "### Load of external arms, by their own account" in markdown_report(loaded)


def test_a_full_queue_stands_beside_its_spike(loaded: Summary) -> None:
    assert server_load.beside(loaded["spikes"][0]) == "8 running, 31 waiting, cache 99.5 %, 1 preemption"
    assert server_load.beside(loaded["spikes"][1]) == "–"
    page = html_report(loaded)
    assert "Its server meanwhile" in page
    assert "31 waiting, cache 99.5" in page


def test_the_chart_has_a_line_a_page_in_the_colour_of_its_arm(loaded: Summary) -> None:
    load = chart_data(loaded)["server_load"]
    assert load["bin_s"] == 1.0
    [row] = load["rows"]
    assert (row["trial"], row["arm"], row["label"]) == (1, 1, f"{arm_names(loaded)[1]}-0")
    assert row["preemptions"] == [None, 3.0]


def test_reports_of_other_runs_do_not_speak_of_it(demo: Summary) -> None:
    page = html_report(demo)
    assert "Load of external arms" not in page
    assert "Its server meanwhile" not in page
    assert "server_load" not in json.dumps(chart_data(demo))
