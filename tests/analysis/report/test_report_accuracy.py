"""What the reports say of an arm whose weights are quantised."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from analysis.report import reading
from analysis.report.html import html_report
from analysis.report.markdown import markdown_report
from analysis.report.values import fine_ratio

LEAD = "An arm whose weights are quantised is judged by how well it predicts the same texts."


@pytest.fixture
def quantised(demo: dict[str, Any]) -> dict[str, Any]:
    """The demo, its last arm with quantised weights that were measured before the traffic."""
    summary = copy.deepcopy(demo)
    name = summary["arms"][-1]["name"]
    findings = [
        {"name": "perplexity", "verdict": "PASS", "value": 1.0057, "low": 1.0003, "high": 1.0112, "limit": 1.02},
        {"name": "kl", "verdict": "PASS", "value": 0.00504, "low": 0.000467, "high": 0.0055, "limit": 0.05},
    ]
    figures = {"texts": 64, "perplexity": 4.5451, "texts_needed": None, "answers": 64, "answers_same": 20}
    measured = {"name": name, "verdict": "PASS", "findings": findings, "figures": figures, "reasons": []}
    summary["parity"] = {"control": None, "arms": [{"name": name, "measured": measured, "answers": []}]}
    summary["arms"][-1]["startup"]["memory_bytes"]["quantised_weights"] = 98_240
    return summary


def test_its_loss_stands_with_its_interval_beside_the_other_arms(quantised: dict[str, Any]) -> None:
    found = {row.name: row.values[-1] for row in reading.parity(quantised) if row.group.startswith("Accuracy")}
    assert found == {
        "perplexity": "4.55",
        "perplexity, to the reference's": "×1.006 [1.000, 1.011]",
        "mean KL in nats a token": "0.00504 [4.7e-04, 0.0055]",
        "texts": "64",
    }
    assert {row.values[0] for row in reading.parity(quantised) if row.group.startswith("Accuracy")} == {"–"}
    assert LEAD in html_report(quantised)
    assert "×1.006" in markdown_report(quantised)


def test_the_texts_that_would_decide_are_said_where_it_is_open(quantised: dict[str, Any]) -> None:
    quantised["parity"]["arms"][0]["measured"]["figures"]["texts_needed"] = 253
    assert "253" in [row.values[-1] for row in reading.parity(quantised) if row.name == "texts that would decide"]


def test_bytes_that_are_quantised_stand_below_those_of_all_weights(quantised: dict[str, Any]) -> None:
    names = [row.name for row in reading.startup_costs(quantised) if row.group == "Memory"]
    assert names[names.index("weights") + 1] == "of which quantised"


def test_nothing_is_said_of_accuracy_where_nothing_is_quantised(demo: dict[str, Any]) -> None:
    assert not [row for row in reading.parity(demo) if row.group.startswith("Accuracy")]
    assert LEAD not in html_report(demo)


def test_a_ratio_near_one_keeps_three_decimals() -> None:
    assert [fine_ratio(value) for value in (1.0034, 0.9996, 12.3, None)] == ["×1.003", "×1.000", "×12.3", "–"]
