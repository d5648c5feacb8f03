from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fakes.whole_run import ramp_with, requests


@pytest.mark.process
def test_a_ramp_takes_a_naive_candidate_back_in_its_first_step(tmp_path: Path) -> None:
    line, run_dir, changes = ramp_with(
        tmp_path, "compiled-naive", "--set", "ramp.steps=[10,50,100]", "--at-most", "60s"
    )
    assert (line["verdict"], line["exit_code"]) == ("FAIL", 99)
    assert [row["action"] for row in changes] == ["start", "start", "rollback", "rollback"]
    assert [row["weights"]["compiled-naive"] for row in changes] == [1000, 1000, 0, 0]
    ramp = json.loads((run_dir / "summary.json").read_text())["ramp"]
    assert (ramp["outcome"], ramp["candidate"]) == ("rollback", "compiled-naive")
    assert 0 < ramp["hurt"] <= ramp["exposed"]
    back_ns = changes[-1]["done_ns"]
    late = [row for row in requests(run_dir) if row["sent_ns"] > back_ns and row["arm"] == "compiled-naive"]
    assert late == [], "no request goes to a candidate that was taken back"
    after = [row for row in requests(run_dir) if row["sent_ns"] > back_ns]
    assert {row["status"] for row in after} == {"OK"}, "and the control serves on"
