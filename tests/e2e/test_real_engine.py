"""The real engine and the real compiler under real Envoy and Locust, by the command line."""

import json
from pathlib import Path

import pytest

from analysis.records.schemas import COMPILE_EVENTS, STEPS
from analysis.records.tables import read_table
from tests.fakes.whole_run import console_script, last_line, requests, summary_of

pytestmark = pytest.mark.timeout(900)

TINY = """
name = "tiny"
seed = 11
[model]
id = "random:tiny"
device = "cpu"
dtype = "float32"
[engine]
threads = 1
max_prompt_tokens = 96
max_new_tokens = 24
[[arms]]
preset = "eager"
control = true
[[arms]]
preset = "{preset}"
{policy}
[traffic]
duration_s = {duration_s}
rate = {rate}
length_scale = 0.05
block_s = 5
"""


def test_padded_prefills_answer_every_request_and_few_data_stay_undecided(tmp_path: Path) -> None:
    text = TINY.format(preset="eager-padded", policy="", duration_s=10, rate=4)
    (tmp_path / "padding.toml").write_text(text)
    done = console_script(["run", "padding.toml"], tmp_path)
    line = last_line(done)
    assert (done.returncode, line["verdict"]) == (3, "INCONCLUSIVE"), done.stderr + done.stdout
    assert line["needed_s"] > 10
    run_dir = tmp_path / line["run_dir"]
    rows = requests(run_dir)
    assert len(rows) > 40
    for row in rows:
        assert (row["status"], row["output_tokens"], len(row["token_ns"])) == (
            "OK",
            row["max_tokens"],
            row["max_tokens"],
        )
        assert row["sent_ns"] <= row["server_recv_ns"] <= row["first_token_ns"] <= row["end_ns"]
        assert row["compile_stall_ns"] == 0
    steps = read_table(run_dir / "trial-01" / "steps.arrow", STEPS)[0].to_pylist()
    assert {step["arm"] for step in steps} == {"eager", "eager-padded"}
    padded = [step for step in steps if step["arm"] == "eager-padded" and step["kind"] == "prefill"]
    assert {step["padded_tokens"] for step in padded} == {96}
    assert not any(step["compiled"] for step in steps)
    facts = json.loads((run_dir / "trial-01" / "trial.json").read_text())
    before, after = facts["references"]
    assert (before["when"], after["when"]) == ("before", "after")
    assert before["at_ns"] < min(facts["ready"].values()) < max(row["end_ns"] for row in rows) < after["at_ns"]
    for row in (before, after):
        assert (row["host"], row["device"], row["threads"], row["error"]) == ("run", "cpu", 1, None)
        assert min(row[key] for key in ("matmul_tflops", "read_gb_per_s", "launch_us", "python_ms")) > 0


def test_a_really_recompiling_arm_fails_by_its_recompiles_and_the_records_say_who_waited(tmp_path: Path) -> None:
    """The tiny model under the real compiler; a light backend keeps the stalls short without changing the guards."""
    policy = '[arms.compile]\nbackend = "aot_eager"'
    text = TINY.format(preset="compiled-naive", policy=policy, duration_s=10, rate=4)
    (tmp_path / "naive.toml").write_text(text)
    done = console_script(["run", "naive.toml", "--set", "bed.reference_s=0"], tmp_path)
    line = last_line(done)
    assert (done.returncode, line["verdict"]) == (99, "FAIL"), done.stderr + done.stdout
    run_dir = tmp_path / line["run_dir"]
    events = read_table(run_dir / "trial-01" / "compile_events.arrow", COMPILE_EVENTS)[0].to_pylist()
    serving = [event for event in events if event["kind"] == "recompile" and event["phase"] == "serving"]
    assert len(serving) >= 2
    assert {event["arm"] for event in serving} == {"compiled-naive"}
    by_id = {row["request_id"]: row for row in requests(run_dir)}
    for event in serving:
        assert "batch" in event["shape"]
        assert event["reason"]
        assert event["request_ids"]
        for request_id in event["request_ids"]:
            row = by_id[request_id]
            assert row["arm"] == "compiled-naive"
            assert row["sent_ns"] < event["end_ns"]
            assert row["end_ns"] > event["start_ns"]
            assert row["compile_stall_ns"] > 0
    summary = summary_of(run_dir)
    (naive,) = [arm for arm in summary["arms"] if arm["name"] == "compiled-naive"]
    assert naive["compile"]["recompiles"] == len(serving)
    assert "recompiles" in {gate["gate"] for gate in summary["gates"] if gate["verdict"] == "FAIL"}
