"""A shadow run from the outside: real Envoy, real Locust, real analysis; arms are paced fakes."""

from __future__ import annotations

import json
from pathlib import Path

from tests.e2e.test_run import last_line, requests, with_fake_arms

SHORT = ["--set", "traffic.design=shadow", "--set", "traffic.duration_s=8", "--set", "gates.block_s=2"]


def test_users_get_the_control_alone_and_every_copy_is_judged_beside_its_request(tmp_path: Path) -> None:
    done = with_fake_arms(["run", "demo", *SHORT, "--set", "trials.starting_at_once=3", "--seed", "7"], tmp_path)
    line = last_line(done)
    # The naive arm recompiles in the shadow as it does before users, who do not notice.
    assert (line["verdict"], line["arms"]["compiled-naive"]) == ("FAIL", "FAIL"), done.stderr
    run_dir = tmp_path / line["run_dir"]
    rows = requests(run_dir)
    pairs = {arm: {row["pair_id"]: row for row in rows if row["arm"] == arm} for arm in ("eager", *line["arms"])}
    facts = json.loads((run_dir / "trial-01" / "trial.json").read_text())
    assert {arm: len(own) for arm, own in pairs.items()} == facts["planned"]
    assert {row["status"] for row in rows} == {"OK"}
    for arm, own in pairs.items():
        assert own.keys() == pairs["eager"].keys()
        for row in own.values():
            assert row["replica"] == f"{arm}-0"
            assert row["scheduled_ns"] <= row["sent_ns"] <= row["server_recv_ns"]
            assert row["sent_ns"] < row["first_token_ns"] <= row["end_ns"]
            assert row["output_tokens"] == row["max_tokens"]
            # A stall is the shadow's own.
            assert (row["end_ns"] - row["sent_ns"]) / 1e9 >= (row["compile_stall_ns"] or 0) / 1e9
    assert any(row["compile_stall_ns"] > 3e8 for row in pairs["compiled-naive"].values())
    assert not any(row["compile_stall_ns"] for row in pairs["eager"].values())
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["design"]["design"] == "shadow"
    checks = {(check["check"], check["arm"]): check["ok"] for check in summary["validity"]}
    assert checks["pairs", "compiled-padded"]
    assert checks["arms", None]
    gates = {gate["gate"]: gate for gate in summary["gates"] if gate["arm"] == "compiled-naive"}
    assert gates["recompiles"]["verdict"] == "FAIL"
    assert gates["requests hit"]["value"] > 0


def test_an_arm_that_has_failed_gets_no_more_copies(tmp_path: Path) -> None:
    flags = ["--set", "traffic.duration_s=14", "--set", "trials.starting_at_once=3", "--until-decided", "--seed", "7"]
    done = with_fake_arms(["run", "demo", *SHORT[:2], *SHORT[4:], *flags], tmp_path)
    run_dir = tmp_path / last_line(done)["run_dir"]
    rows = requests(run_dir)
    facts = json.loads((run_dir / "trial-01" / "trial.json").read_text())
    assert list(facts["ended_arms"]) == ["compiled-naive"]
    count = {arm: sum(row["arm"] == arm for row in rows) for arm in facts["planned"]}
    assert count == facts["planned"]
    assert count["compiled-naive"] < count["compiled-padded"] == count["eager"]
    assert {row["status"] for row in rows} == {"OK"}
