"""What reports say of the machines, of runs that were judged as one, and of memory."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tailgate.analysis.report import html_report, markdown_report, verdict_table
from tailgate.analysis.summary.summary import analyze
from tests.analysis.report.conftest import HOSTILE
from tests.fakes.machines import FakeMachines, Trouble
from tests.fakes.runs import FakeRun, write_run

Summary = dict[str, Any]
REPORTS = (html_report, markdown_report, verdict_table)
DISTURBED = FakeMachines(
    locked=False,
    troubles=(
        Trouble(what="throttle", share=0.3, trials=(1,)),
        Trouble(what="foreign", place="cuda:0", size=2, share=0.2, trials=(2,)),
        Trouble(what="slow", size=0.88),
        Trouble(what="unreadable", place="cuda:0", column="power_w"),
    ),
)


@cache
def made(machines: FakeMachines) -> Summary:
    with TemporaryDirectory() as folder:
        run = FakeRun(machines=machines, trials=2, duration_s=120.0, rate=2.0)
        return analyze(write_run(Path(folder, "run"), run))


def test_the_machines_are_named_only_where_they_limit_the_run(demo: Summary) -> None:
    for report in (markdown_report, verdict_table):
        for summary in (made(FakeMachines()), demo):
            assert not re.search("quiet|monitored|NVIDIA", report(summary), re.IGNORECASE)
        assert "processes of others" in report(made(DISTURBED))
    for summary in (made(FakeMachines()), demo):
        assert not re.search("quiet|monitored", html_report(summary).partition('<details class="section"')[0])
    assert 'id="machines"' not in html_report(demo)


def test_disturbed_machines_name_each_trouble_and_what_it_leaves_open(read_page: Callable[[str], Any]) -> None:
    summary = made(DISTURBED)
    text = read_page(html_report(summary)).text
    assert "cuda:1 was throttled (heat, by the hardware) for 36 s of the 120 s of trial 1" in text
    summary = {**summary, "machines": {**summary["machines"], "line": HOSTILE}}
    assert HOSTILE in read_page(html_report(summary)).text, "names of machines are data and no markup"
    assert "<script>" not in markdown_report(summary)


@pytest.fixture
def joined(rollout: Summary) -> Summary:
    one = {"name": "one", "started": "2026-01-01T12:00:00+00:00", "machine": "0123456789ab", "trials": [1, 2, 4]}
    one |= {"missing": [3], "seed": 7, "git_commit": "4b1f0c6e2a7d5f8091b3c4d5e6f708192a3b4c5d", "tailgate": "0.1.0"}
    two = {"name": "two", "started": None, "machine": None, "trials": [5], "missing": [], "seed": 8}
    rollout["design"]["trials"] = 4
    rollout["joined"] = {
        "runs": [one, two],
        "machines": 2,
        "differences": ["two: gates.margin 0.2, in one 0.1"],
    }
    return rollout


def test_every_report_counts_the_runs_that_it_joins_and_the_differences_that_were_accepted(joined: Summary) -> None:
    for report in REPORTS:
        assert "2 runs (one, two), 4 trials, 2 machines, 1 accepted difference" in " ".join(report(joined).split())
    assert joined["joined"]["differences"][0] in html_report(joined)
    joined["joined"]["differences"] = []
    for report in REPORTS:
        assert "accepted" not in report(joined).lower()


def test_each_run_is_shown(joined: Summary, read_page: Callable[[str], Any]) -> None:
    text = read_page(html_report(joined)).text
    assert "1, 2, 4, missing 3 0123456789ab 7 0.1.0 4b1f0c6e2a7d two – 5 unknown 8 – –" in text
    joined["joined"]["runs"][0] |= dict.fromkeys(("name", "machine", "seed"), HOSTILE)
    joined["joined"]["differences"] = [HOSTILE]
    for report in (html_report, markdown_report):
        assert not re.search("<script>document.title|<img src=x", report(joined))
