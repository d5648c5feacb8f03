from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from loadtests.experiments.reading import load
from tests.faults.day import day_rates, experiment, main, misses
from tests.faults.drawing import LARGEST_REPORT

FLAT = {"first": 100.0, "last": 100.0, "growth": 0.0}


def seen(**changed: Any) -> dict[str, Any]:
    """A day on which all was well, but for what changed."""
    row = {"process": "envoy #0", "rss": FLAT, "pss": FLAT, "own": FLAT, "files": FLAT, "threads": FLAT}
    well = {
        "exit_code": 3,
        "complete": True,
        "planned": {"eager": 10, "compiled": 10},
        "requests": {"eager": 10, "compiled": 10},
        "processes": [row],
        "left": [],
        "report_bytes": 1000,
        "drawn_s": [5.0, 1.0],
    }
    return {**well, **changed}


def test_the_ends_of_the_day_have_the_same_rates_as_what_follows_the_warm_up() -> None:
    rates = [rate for _, rate in day_rates(300.0, 86_400.0)]
    assert len(rates) == 40
    assert sum(rates) / 40 == pytest.approx(300.0, rel=1e-4)
    assert rates[4:8] == pytest.approx(rates[36:][::-1], rel=1e-4)
    assert max(rates) / min(rates) > 2.0


def test_the_experiment_asks_for_the_requests_of_the_day(tmp_path: Path) -> None:
    text = experiment(requests=1_000_000, rate=500.0, workers=2)
    assert tomllib.loads(text)["traffic"]["duration_s"] == 2000.0
    (tmp_path / "day.toml").write_text(text)
    assert load(str(tmp_path / "day.toml")).traffic.block_s == 30.0


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, []),
        ({"exit_code": 1, "complete": False}, ["the run ended with 1"]),
        ({"requests": {"eager": 10, "compiled": 9}}, ["'compiled': 9"]),
        ({"left": ["locust #1"]}, ["processes are left: locust #1"]),
        ({"report_bytes": LARGEST_REPORT + 1}, ["more than 6000000"]),
        ({"drawn_s": [2.5, 2.1]}, ["drawn in 2.10 s"]),
    ],
)
def test_what_is_not_well_is_said(changed: dict[str, Any], said: list[str]) -> None:
    found = misses(seen(**changed), memory=True)
    assert len(found) == len(said)
    assert all(part in line for part, line in zip(said, found, strict=True))


def test_memory_and_files_that_grow_are_said_with_their_process() -> None:
    grown = {"first": 100.0 * 2**20, "last": 103.0 * 2**20, "growth": 0.03}
    row = {**seen()["processes"][0], "own": grown, "files": {"first": 30, "last": 31, "growth": 0.033}}
    assert misses(seen(processes=[row]), memory=True) == [
        "envoy #0: own grew by 3.0% (100.0 to 103.0 MiB)",
        "envoy #0: 30 files were open, and 31",
    ]
    assert misses(seen(processes=[row]), memory=False) == ["envoy #0: 30 files were open, and 31"]


def test_of_the_page_and_of_a_look_as_much_is_taken_as_they_say() -> None:
    page = {"first": 32.0 * 2**20, "last": 36.0 * 2**20, "growth": 0.125}
    look = {"first": 1e8, "last": 1e8 + 15_000, "growth": 0.2}
    row = seen()["processes"][0]
    assert not misses(seen(processes=[{**row, "process": "loadtests.page #0", "own": page}]), memory=True)
    assert misses(seen(processes=[{**row, "process": "locust #0", "own": page}]), memory=True)
    assert misses(seen(processes=[{**row, "process": "analysis.looks #0", "own": look}]), memory=True)
    many = {"eager": 10**6, "compiled": 10**6}
    looks = seen(processes=[{**row, "process": "analysis.looks #0", "own": look}], requests=many, planned=many)
    assert not misses(looks, memory=True)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_short_day_leaves_no_process_and_no_open_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    days = ["--requests", "2000", "--rate", "330", "--compile-s", "1", "--no-memory", "--no-drawing"]
    code = main([*days, "--out", str(tmp_path / "day")])
    shown = capsys.readouterr()
    day = json.loads(shown.out.splitlines()[-1])
    assert (code, day["misses"]) == (0, []), shown.err
    assert day["recompiles"]["eager"] == 0
    assert day["recompiles"]["compiled"] >= 1
    # Who was there all through the traffic, and was sampled.
    names = {row["process"].rpartition(" #")[0] for row in day["processes"]}
    assert names >= {"tailgate run", "envoy", "locust", "arm eager-0", "arm compiled-0", "loadtests.page"}
    assert day["page_bytes"] > 0
    assert day["metrics_bytes"] > 0
