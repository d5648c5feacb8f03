"""A server of somebody else that tells of itself: its load and its compiles are recorded, judged and shown."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from analysis.records.schemas import COMPILE_EVENTS, SERVER_LOAD
from analysis.records.tables import read_table
from tests.e2e.test_run import last_line, with_fake_arms
from tests.fakes.openai_server import CompilingServer, serving

EXPERIMENT = """
name = "others"
seed = 5
compare_models = true
[engine]
max_prompt_tokens = 64
max_new_tokens = 8
[[arms]]
name = "eager"
preset = "eager"
control = true
[[arms]]
name = "file"
kind = "openai"
address = "{address}/v1"
model_name = "llama"
telemetry = {{ metrics = "{address}/metrics", log = "vllm.log" }}
[[arms]]
name = "command"
kind = "openai"
address = "{quiet}/v1"
model_name = "llama"
telemetry = {{ metrics = "{quiet}/none", log_command = {command}, log_format = "vllm" }}
[traffic]
duration_s = 6
rate = 6
length_scale = 0.08
block_s = 1
timeout_s = 20
"""


def test_compiles_of_others_are_joined_to_what_they_held_up_and_their_load_is_shown(tmp_path: Path) -> None:
    loud = CompilingServer(tmp_path / "vllm.log", compiles_at=9, compile_s=1.5)
    quiet = CompilingServer(tmp_path / "quiet.log", compiles_at=-1, compile_s=0)
    follow = f"import time; print(open({str(tmp_path / 'quiet.log')!r}).read(), end='', flush=True); time.sleep(600)"
    with serving(loud) as address, serving(quiet) as other:
        command = json.dumps([sys.executable, "-c", follow])
        (tmp_path / "others.toml").write_text(EXPERIMENT.format(address=address, quiet=other, command=command))
        done = with_fake_arms(["run", "others.toml", "--out", "out"], tmp_path)
    line = last_line(done)
    assert (done.returncode, line["verdict"], line["complete"]) == (99, "FAIL", True), done.stderr
    run_dir = tmp_path / line["run_dir"]

    events = read_table(run_dir / "trial-01" / "compile_events.arrow", COMPILE_EVENTS)[0].to_pylist()
    [event] = [event for event in events if event["arm"] == "file"]
    assert (event["replica"], event["kind"], event["shape"]) == ("file-0", "compile", "(1, 8192)")
    assert event["end_ns"] - event["start_ns"] == 1_500_000_000
    assert not any(event["arm"] == "command" for event in events)
    load = read_table(run_dir / "trial-01" / "server_load.arrow", SERVER_LOAD)[0].to_pylist()
    assert {(row["arm"], row["replica"], row["cache_pct"]) for row in load} == {("file", "file-0", 25)}
    assert len(load) >= 5

    summary = json.loads((run_dir / "summary.json").read_text())
    gates = {(gate["arm"], gate["gate"]): gate for gate in summary["gates"]}
    failed = gates["file", "recompiles"]
    assert (failed["verdict"], failed["value"]) == ("FAIL", 1)
    assert failed["reason"].startswith("By its log: 1 recompile while serving")
    assert gates["file", "longest stall"]["verdict"] == "FAIL"
    # Nothing compiled there as far as anybody knows, and its log would not have told of everything.
    open_ = gates["command", "recompiles"]
    assert open_["verdict"] != "FAIL"
    assert "vLLM warns once for each kernel unless it is started with --jit-monitor-verbose" in open_["reason"]
    [joined] = summary["events"]
    assert (joined["arm"], joined["event_id"]) == ("file", event["event_id"])
    assert joined["requests_hit"] >= 3
    arms = {arm["name"]: arm for arm in summary["arms"]}
    assert (arms["file"]["compile"]["recompiles"], arms["command"]["compile"]["recompiles"]) == (1, 0)
    told = {row["arm"]: row for row in summary["server_load"]["arms"]}
    assert (told["file"]["failed"], told["command"]["answered"]) == (0, 0)
    assert told["command"]["failed"] >= 5
    assert "Load of external arms" in (run_dir / "report.html").read_text()
    assert "### Load of external arms, by their own account" in (run_dir / "report.md").read_text()
