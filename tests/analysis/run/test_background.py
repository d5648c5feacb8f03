"""Compiles that held nobody up are told with their share of the tail."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from analysis.records.run_records import read_run
from analysis.records.schemas import REQUESTS
from analysis.records.tables import RecordWriter, read_table
from analysis.run.background import plateau
from analysis.run.run import Run
from analysis.summary.summary import analyze
from tests.analysis.run.test_startup import add_events
from tests.fakes.runs import SECOND, FakeRun, start_of, write_run

RUN = FakeRun(duration_s=120, rate=4)
DURING = (30.0, 60.0)


def slowed(directory: Path, *, by_s: float) -> Path:
    """A run whose requests of `compiled` took longer by `by_s` while it compiled in the background."""
    write_run(directory, RUN)
    path = directory / "trial-01" / "requests-0.arrow"
    table: pa.Table = read_table(path, REQUESTS)[0]
    rows, start = table.to_pylist(), start_of(1)
    for row in rows:
        offset = (row["scheduled_ns"] - start) / SECOND
        if row["arm"] == "compiled" and DURING[0] <= offset < DURING[1] - 5:
            row["end_ns"] += int(by_s * SECOND)
    path.unlink()
    with RecordWriter(path, REQUESTS) as writer:
        for row in rows:
            writer.append(row)
    background = {"kind": "background_compile", "phase": "serving"}
    add_events(directory / "trial-01", {**background, "at_s": DURING[0], "seconds": DURING[1] - DURING[0]})
    return directory


def test_a_plateau_has_its_share_of_p99_and_of_the_slowest_requests(tmp_path: Path) -> None:
    run = Run.of(read_run(slowed(tmp_path / "run", by_s=3.0)))
    found = plateau(run, "compiled", "e2e")
    assert (found.events, found.seconds) == (1, 30.0)
    assert found.of == pytest.approx(4 * found.requests, rel=0.2)
    assert found.tail_pct == 100.0
    assert found.p99_ms > 3000 > found.p99_outside_ms
    assert found.share_pct == pytest.approx(100.0 * (1.0 - found.p99_outside_ms / found.p99_ms))
    assert not run.attribution.hit.any(), "nobody waited for it"


def test_the_summary_tells_it_and_the_gate_on_recompiles_does_not_count_it(tmp_path: Path) -> None:
    summary = analyze(slowed(tmp_path / "run", by_s=3.0))
    eager, compiled = (arm["compile"] for arm in summary["arms"])
    assert (compiled["recompiles"], compiled["background"]["events"], compiled["background"]["s"]) == (0, 1, 30.0)
    assert compiled["background"]["p99_e2e_share_pct"] > 50
    assert compiled["background"]["p99_e2e_tail_pct"] == 100.0
    assert eager["background"]["p99_e2e_share_pct"] is None
