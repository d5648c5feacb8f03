"""What reports say of runs that were judged as one."""

import copy
from typing import Any

import pytest

from analysis.report import html_report, markdown_report, verdict_table
from analysis.report.joined import head, ratios, runs
from analysis.report.reading import device
from tests.analysis.report.conftest import HOSTILE

JOINED = {
    "runs": [
        {
            "name": "one",
            "started": "2026-01-01T12:00:00+00:00",
            "machine": "0123456789ab",
            "trials": [1, 2, 4],
            "missing": [3],
            "seed": 7,
            "git_commit": "4b1f0c6e2a7d5f8091b3c4d5e6f708192a3b4c5d",
            "tailgate": "0.1.0",
        },
        {"name": "two", "started": None, "machine": None, "trials": [5], "missing": [], "seed": 8},
    ],
    "machines": [{"machine": "0123456789ab", "trials": [1, 2, 4]}, {"machine": "the machine of two", "trials": [5]}],
    "differences": ["two: gates.margin 0.2, in one 0.1"],
    "ratios": [
        {
            **{"arm": "compiled-bucketed", "metric": "e2e", "quantile": 0.99, "trials": 4, "machine_spread": 0.021},
            **{"ratio": 0.8, "low": 0.7, "high": 0.9, "machine": None},
        },
        {
            **{"arm": "compiled-bucketed", "metric": "e2e", "quantile": 0.99, "trials": 1, "machine_spread": None},
            **{"ratio": None, "low": None, "high": None, "machine": "the machine of two"},
        },
    ],
}


@pytest.fixture
def summary(rollout: dict[str, Any]) -> dict[str, Any]:
    rollout["design"]["trials"] = 4
    return rollout | {"joined": copy.deepcopy(JOINED)}


def test_every_report_says_how_many_runs_trials_and_machines_and_that_a_difference_was_accepted(
    summary: dict[str, Any],
) -> None:
    assert head(summary) == "2 runs, 4 trials, 2 machines"
    for report in (html_report(summary), markdown_report(summary), verdict_table(summary)):
        assert "2 runs, 4 trials, 2 machines" in report
        assert "1 difference accepted" in report
    summary["joined"]["differences"] = []
    for report in (html_report(summary), markdown_report(summary), verdict_table(summary)):
        assert "accepted" not in report.lower()


def test_a_run_by_itself_is_not_said_to_be_joined(rollout: dict[str, Any]) -> None:
    assert head(rollout) == ""
    assert runs(rollout).rows == []
    assert 'id="joined"' not in html_report(rollout)
    assert "The runs" not in markdown_report(rollout)


def test_one_run_that_is_judged_in_another_folder_is_shown_and_not_said_to_be_joined(summary: dict[str, Any]) -> None:
    summary["joined"]["runs"] = summary["joined"]["runs"][:1]
    assert head(summary) == ""
    assert "judged together" not in verdict_table(summary)
    for report in (html_report(summary), markdown_report(summary)):
        assert "0123456789ab" in report
        assert "The runs" not in report
        assert "judged as one" not in report
        assert "1 run" not in report


def test_each_run_is_shown_with_its_trials_machine_and_commit(summary: dict[str, Any]) -> None:
    first, second = runs(summary).rows
    assert first["Trials"] == "1–2, 4, missing 3"
    assert first["Machine"] == "0123456789ab"
    assert first["Commit"] == "4b1f0c6e2a7d"
    assert (second["Machine"], second["Started"], second["Commit"]) == ("unknown", "–", "–")


def test_the_ratio_of_each_machine_stands_below_that_of_all(summary: dict[str, Any]) -> None:
    whole, own = ratios(summary).rows
    assert (whole["Machine"], whole["Ratio to the control"], whole["Machines add"]) == ("all", "×0.80", "± 2.1 %")
    assert (own["Machine"], own["Ratio to the control"], own["Machines add"]) == ("the machine of two", "–", "–")
    assert "Machine by machine" in markdown_report(summary)
    assert "Machine by machine" in html_report(summary)


def test_what_was_accepted_is_said(summary: dict[str, Any]) -> None:
    assert "Accepted: two: gates.margin 0.2, in one 0.1" in markdown_report(summary)
    assert "two: gates.margin 0.2, in one 0.1" in html_report(summary)


def test_names_of_runs_are_shown_and_never_run(summary: dict[str, Any]) -> None:
    summary["joined"]["runs"][0] |= {"name": HOSTILE, "machine": HOSTILE, "trials": HOSTILE, "seed": HOSTILE}
    summary["joined"]["differences"] = [HOSTILE]
    page = html_report(summary)
    assert "<script>document.title" not in page
    assert "<img src=x" not in page
    assert "<img" not in markdown_report(summary)


def test_the_machine_is_told_with_the_cards_of_the_arms(summary: dict[str, Any]) -> None:
    card = "NVIDIA H100 80GB HBM3"
    summary["environment"]["gpus"] = [f"{card}, 580.159.04"] * 4
    assert device(summary) == f"4 × {card}, 580.159.04", "where nobody watched cards, those of the machine"
    summary["bed"] = {
        "machines": [{"trial": trial, "host": "run", "machine": "one" if trial < 3 else "two"} for trial in (1, 2, 3)],
        "devices": [
            {"trial": trial, "host": host, "identity": identity, "model": card, "arms": arms}
            for trial, host, identity, arms in (
                (1, "run", "GPU-a", ["eager"]),
                (1, "run", "GPU-b", ["compiled-bucketed"]),
                (2, "run", "GPU-b", ["eager"]),
                (2, "run", "GPU-a", ["compiled-bucketed"]),
                (2, "run", "GPU-c", []),
                (3, "run", "GPU-d", ["eager", "compiled-bucketed"]),
                (3, "worker", "GPU-e", ["eager"]),
            )
        ],
    }
    assert device(summary) == f"2 × {card}, 580.159.04"
    assert f"2 × {card}, 580.159.04" in html_report(summary)
    summary["bed"]["devices"] = summary["bed"]["devices"][-2:]
    assert device(summary) == f"{card}, 580.159.04"
