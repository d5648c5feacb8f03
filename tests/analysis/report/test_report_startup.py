"""What the reports say of the start, and of what the compiler could not do."""

from __future__ import annotations

from typing import Any

import pytest

from analysis.report import reading
from analysis.report.html import html_report
from analysis.report.markdown import markdown_report


def figures(summary: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    return {f"{row.group}: {row.name}": row.values for row in reading.startup_costs(summary)}


def test_every_part_of_the_start_has_a_row(demo: dict[str, Any]) -> None:
    found = figures(demo)
    assert found["Time: to serving"] == ("5.23 s", "19.8 s", "16.5 s")
    assert found["Time: of which decode shapes"][1] == "6.11 s"
    assert found["Compiling in the warm-up: compile time"][1:] == ("14.8 s", "11.4 s")
    assert found["Compiling in the warm-up: disk cache"] == ("–", "cold", "cold")
    assert found["Slowest shapes to warm: 1"][1] == "prefill 1x192: 8.64 s"
    assert found["Memory: host process, peak"][0] == "576 MiB"


def test_a_part_that_no_arm_has_takes_no_room(demo: dict[str, Any]) -> None:
    names = {name.partition(": ")[2] for name in figures(demo)}
    assert not names & {"of which later chunks of prompts", "of which CUDA-graph capture", "of which tuning kernels"}
    demo["arms"][1]["startup"]["capture_s"] = 0.4
    assert figures(demo)["Time: of which CUDA-graph capture"] == ("–", "400 ms", "–")


def test_an_artifact_is_named_beside_what_its_unpacking_took(demo: dict[str, Any]) -> None:
    assert "Compiling in the warm-up: artifact" not in figures(demo)
    demo["arms"][1]["startup"] |= {"artifact": "118b37521756ef99", "artifact_s": 0.03}
    found = figures(demo)
    assert found["Compiling in the warm-up: artifact"] == ("–", "118b37521756ef99", "–")
    assert found["Time: unpacking compiled code"] == ("–", "30 ms", "–")
    assert "118b37521756ef99" in markdown_report(demo)


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ({"hit": 0, "miss": 3, "bypass": 0}, "cold"),
        ({"hit": 3, "miss": 0, "bypass": 0}, "warm"),
        ({"hit": 3, "miss": 2, "bypass": 1}, "3 of 6 found"),
        ({"hit": 0, "miss": 0, "bypass": 2}, "bypassed"),
        ({"hit": 0, "miss": 0, "bypass": 0}, "–"),
        ({"hit": "three"}, "–"),
        (None, "–"),
    ],
)
def test_the_cache_is_cold_warm_or_in_between(demo: dict[str, Any], counts: object, expected: str) -> None:
    demo["arms"][1]["startup"]["cache"] = counts
    found = figures(demo).get("Compiling in the warm-up: disk cache", ("–",) * 3)
    assert found[1] == expected


def test_shapes_read_as_inspect_writes_them() -> None:
    for item, brief in (
        ("decode batch 4 × length 1, context 256", "decode 4@256"),
        ("prefill batch 2 × length 32, context 32", "prefill 2x32"),
        ("extend batch 1 × length 64, context 512", "extend 1x64@512"),
        ("capture decode batch 4 × length 1, context 256", "capture decode 4@256"),
        ("warmup 1x16", "warmup 1x16"),
        (None, "–"),
    ):
        assert reading.brief_shape(item) == brief


def test_a_summary_without_a_start_is_read_without_one(demo: dict[str, Any]) -> None:
    for arm in demo["arms"]:
        del arm["startup"]
    assert all(set(values) == {"–"} for values in figures(demo).values())
    assert "### Start-up cost" not in markdown_report(demo)
    assert "Start-up cost" in html_report(demo)


def test_what_the_compiler_could_not_do_is_named_with_its_place(demo: dict[str, Any], read_page: Any) -> None:
    assert [(row["Arm"], row["What"], row["Times"]) for row in reading.shortfalls(demo).rows] == [
        ("compiled-padded", "no CUDA graph", "2"),
        ("compiled-naive", "graph break", "9"),
        ("compiled-naive", "graph break", "2"),
    ]
    page = read_page(html_report(demo))
    assert "What the compiler could not do" in page.text
    assert "modeling_house.py:212 in forward" in page.text
    assert "modeling_house.py:212 in forward" in markdown_report(demo)


@pytest.mark.parametrize("counts", [{}, None, {"a": None}, ["a"]])
def test_nothing_is_said_of_a_compiler_that_could_do_everything(demo: dict[str, Any], counts: object) -> None:
    for arm in demo["arms"]:
        arm["compile"]["graph_breaks"] = arm["compile"]["cudagraph_skips"] = counts
    assert reading.shortfalls(demo).rows == []
    assert "could not do" not in markdown_report(demo)
    assert "could not do" not in html_report(demo)
