"""`tailgate export` on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis.records.run_records import read_run
from analysis.summary.summary import analyze
from loadtests.commands.main import main
from tests.fakes.resources import GIB, sample
from tests.fakes.runs import FakeRun, write_run


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_by_default_all_that_a_run_is_judged_by_is_exported(tmp_path: Path, form: str) -> None:
    """The samples of the machines were left out."""
    run = write_run(tmp_path / "run", FakeRun(duration_s=60, rate=1, gates={"max_memory_ratio": 2.0, "draws": 99}))
    for arm in ("eager", "compiled"):
        sample(run, "allocator", f"{arm}-0", {"memory_bytes": GIB}, arm=arm)
    assert main(["export", str(run), "--format", form, "--out", str(tmp_path / "out")]) == 0
    bed = read_run(tmp_path / "out").bed
    assert bed is not None
    assert bed.equals(read_run(run).bed)
    judged = [{key: analyze(place)[key] for key in ("arms", "gates")} for place in (run, tmp_path / "out")]
    assert judged[0] == judged[1]
