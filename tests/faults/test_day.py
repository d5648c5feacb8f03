from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.faults.day import main, misses

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


def test_memory_and_files_that_grow_are_said_with_their_process() -> None:
    grown = {"first": 100.0 * 2**20, "last": 103.0 * 2**20, "growth": 0.03}
    row = {**seen()["processes"][0], "own": grown, "files": {"first": 30, "last": 31, "growth": 0.033}}
    assert misses(seen(processes=[row]), memory=True) == [
        "envoy #0: own grew by 3.0% (100.0 to 103.0 MiB)",
        "envoy #0: 30 files were open, and 31",
    ]
    assert misses(seen(processes=[row]), memory=False) == ["envoy #0: 30 files were open, and 31"]


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
