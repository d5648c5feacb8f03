"""Memory, energy and cost as reports show them."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis.report.html import html_report
from analysis.report.markdown import markdown_report
from analysis.report.reading import side_by_side
from analysis.report.resources import memory_events
from analysis.summary.summary import analyze
from tests.fakes.resources import GIB, sample, tell
from tests.fakes.runs import FakeRun, write_run

CARDS = {"eager": "cuda:0", "compiled": "cuda:1"}


@pytest.fixture(scope="module")
def summary(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    directory = write_run(tmp_path_factory.mktemp("run") / "run", FakeRun(duration_s=120, rate=2, trials=2))
    tell(directory, devices=CARDS)
    with (directory / "experiment.toml").open("a") as file:
        file.write('[rollout]\ngpu_hour_price = 3.6\ncurrency = "EUR"\n')
    for arm, card in CARDS.items():
        rate = 200.0 if arm == "eager" else 100.0
        sample(directory, "device", card, {"energy_j": lambda trial, at_s, rate=rate: 1e6 + rate * at_s})
        levels = {"reserved_bytes": 2 * GIB, "allocated_bytes": GIB, "peak_bytes": 1.5 * GIB}
        counts = {"allocator_retries": lambda trial, at_s: (at_s >= 60) * 1.0}
        sample(directory, "allocator", f"{arm}-0", levels | (counts if arm == "eager" else {}), arm=arm)
    return analyze(directory)


def test_figures_that_are_known_stand_beside_throughput(summary: dict[str, object]) -> None:
    figures = {row.name: row.values for row in side_by_side(summary)}
    assert figures["peak, kept by the allocator"] == ("2 GiB", "2 GiB")
    assert figures["peak, in tensors"] == ("1.5 GiB", "1.5 GiB")
    assert figures["growth an hour, in tensors"] == ("0 % [0, 0]", "0 % [0, 0]")
    assert figures["GPUs used"] == ("1", "1")
    assert figures["cost of 1,000 requests"] == ("0.5 EUR", "0.5 EUR")
    assert [value.split(" W")[0] for value in figures["power of its card"]] == ["200", "100"]
    assert all(" J ± " in value for value in figures["energy a token"])
    assert "peak, process on the host" not in figures


def test_the_summary_has_what_the_tables_show(summary: dict[str, object]) -> None:
    eager, compiled = summary["arms"]  # type: ignore[misc]
    assert eager["energy"]["per_token_j"]["mean"] == pytest.approx(
        2 * compiled["energy"]["per_token_j"]["mean"], rel=0.02
    )
    assert eager["energy"]["per_request_j"]["trials"] == 2
    assert eager["energy"]["above_idle_joules"] is None
    assert eager["cost"]["per_1000_requests"] == pytest.approx(1000 * 240 / 3600 * 3.6 / 480)
    assert eager["memory"]["reserved"]["peaks"]["trials"] == 2
    (first, second) = summary["memory"]["events"]  # type: ignore[index]
    assert (first["arm"], first["replica"], first["kind"], first["count"]) == ("eager", "eager-0", "allocator retry", 1)
    assert first["offset_s"] == second["offset_s"] == 60.0


def test_allocations_in_need_are_listed_in_every_report(summary: dict[str, object]) -> None:
    assert [row["At"] for row in memory_events(summary).rows] == ["60 s", "60 s"]
    report = markdown_report(summary)
    assert "### Allocations in need" in report
    assert "allocator retry" in report
    assert "Allocations in need" in html_report(summary)


def test_an_arm_that_shared_its_card_is_said_to_have(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", FakeRun(duration_s=60, rate=1))
    tell(directory, devices={"eager": "cuda:0", "compiled": "cuda:0"})
    sample(directory, "device", "cuda:0", {"energy_j": lambda trial, at_s: 1e6 + at_s})
    figures = {row.name: row.values for row in side_by_side(analyze(directory))}
    assert figures["energy a token"] == ("its card was shared: not attributable",) * 2
    assert "energy a token, above idle" not in figures
