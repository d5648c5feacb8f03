"""The load of an external arm in the summary: over time, in figures, and beside a spike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from analysis.records.schemas import REQUESTS, SERVER_LOAD
from analysis.records.tables import RecordWriter, read_table
from analysis.summary.summary import analyze
from benchmarks.simulation.detection import CONTROL, TREATMENT
from benchmarks.simulation.scenario import Scenario, run
from tests.fakes.external_runs import write_external

SECOND = 10**9
STALLING = Scenario(step=64, duration_s=300.0, private_stalls=3)


def written(folder: Path) -> tuple[Path, int]:
    """A run whose server said nothing yet, and its begin."""
    rng = np.random.default_rng(1)
    folder = write_external(folder, run(STALLING, rng), rng, gates={"draws": 99, "min_blocks": 2})
    return folder, min(read_table(folder / "requests.arrow", REQUESTS)[0]["sent_ns"].to_pylist())


def say(folder: Path, rows: list[dict[str, Any]]) -> None:
    with RecordWriter(folder / "server_load.arrow", SERVER_LOAD) as writer:
        for row in rows:
            writer.append({"trial": 1, "arm": TREATMENT, "replica": None, **row})


def test_the_load_is_in_bins_and_in_figures(tmp_path: Path) -> None:
    folder, start_ns = written(tmp_path)
    rows = [
        {
            "at_ns": start_ns + second * SECOND,
            "running": float(second % 7),
            "waiting": 2.0,
            "preemptions": second // 100,
        }
        for second in range(1, 290)
    ]
    rows[150]["preemptions"] = 0  # it started again
    say(folder, rows)
    pages = [{"replica": None, "answered": 289, "failed": 11, "late": 2, "why": "HTTPError: 503"}]
    arms = [{"name": CONTROL}, {"name": TREATMENT, "kind": "openai", "told": {"metrics": pages}}]
    (folder / "trial.json").write_text(json.dumps({"trial": 1, "complete": True, "arms": arms}))
    summary = analyze(folder)
    load = summary["server_load"]
    [arm] = load["arms"]
    assert arm == {
        **{"arm": TREATMENT, "most_running": 6, "most_waiting": 2, "most_cache_pct": None, "preemptions": 3},
        **{"answered": 289, "failed": 11, "late": 2, "why": "HTTPError: 503"},
    }
    [row] = load["rows"]
    assert (row["trial"], row["arm"], row["replica"]) == (1, TREATMENT, None)
    assert len(row["t_s"]) == len(row["running"]) == len(row["preemptions"]) > 100
    assert max(row["running"]) == 6
    assert set(row["cache_pct"]) == {None}
    assert sum(row["preemptions"]) == 3
    notes = next(row for row in summary["arms"] if row["name"] == TREATMENT)["external"]["notes"]
    assert "Its page of metrics failed 11 of 300 times (HTTPError: 503)." in notes
