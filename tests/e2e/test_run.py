"""The main job from the outside: real Envoy, real Locust, real analysis; arms are paced fakes, or the real engine."""

import json
import tomllib
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from analysis.records.schemas import COMPILE_EVENTS, STEPS
from analysis.records.tables import read_table
from tests.fakes.whole_run import LOOSE, console_script, last_line, ramp_with, requests, with_fake_arms


def test_run_ends_with_a_verdict_a_report_and_a_complete_run_directory(tmp_path: Path) -> None:
    settings = ["--set", "traffic.duration_s=8", "--set", "traffic.block_s=2", "--set", "trials.starting_at_once=3"]
    settings += ["--set", "bed.reference_s=0.4"]
    done = with_fake_arms(["run", "demo", *settings, "--seed", "7", "--out", "out"], tmp_path)
    line = last_line(done)
    assert (done.returncode, line["exit_code"], line["verdict"]) == (99, 99, "FAIL"), done.stderr
    assert line["complete"] is True
    assert line["arms"] == {"compiled-padded": "INCONCLUSIVE", "compiled-naive": "FAIL"}
    assert line["needed_s"] > 8

    run_dir = tmp_path / line["run_dir"]
    assert run_dir.parent == tmp_path / "out"
    assert tmp_path / line["report"] == run_dir / "report.html"
    resolved = tomllib.loads((run_dir / "experiment.toml").read_text())
    assert (resolved["seed"], resolved["traffic"]["duration_s"]) == (7, 8.0)
    assert json.loads((run_dir / "environment.json").read_text())["versions"]["locust"]
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["overall"] == "FAIL"
    assert [arm["name"] for arm in summary["arms"]] == ["eager", "compiled-padded", "compiled-naive"]
    naive = summary["arms"][2]["compile"]
    assert naive["recompiles"] > 0
    assert naive["longest_stall_s"] == pytest.approx(0.4, abs=0.3)
    assert {event["arm"] for event in summary["events"]} == {"compiled-naive"}
    assert all("size mismatch" in event["reason"] for event in summary["events"])
    ET.parse(run_dir / "junit.xml")
    assert "compiled-naive" in (run_dir / "report.md").read_text()
    assert "<html" in (run_dir / "report.html").read_text()
    logs = {path.name for path in (run_dir / "trial-01" / "logs").iterdir()}
    assert {"eager-0.log", "compiled-padded-0.log", "compiled-naive-0.log", "envoy.log", "locust.log"} <= logs

    rows = requests(run_dir)
    assert {row["status"] for row in rows} == {"OK"}
    facts = json.loads((run_dir / "trial-01" / "trial.json").read_text())
    assert len(rows) == sum(facts["planned"].values())
    # the machine was measured while no arm was there
    before, after = facts["references"]
    assert (before["when"], after["when"]) == ("before", "after")
    assert before["at_ns"] < min(facts["ready"].values()) < max(row["end_ns"] for row in rows) < after["at_ns"]
    for row in (before, after):
        assert (row["host"], row["device"], row["threads"], row["error"]) == ("run", "cpu", 1, None)
        assert min(row[key] for key in ("matmul_tflops", "read_gb_per_s", "launch_us", "python_ms")) > 0
    # people see where it stands, on stderr; stdout is the verdict, the report and the line for programs
    for expected in ("measuring the machines", "starting arms", "requests", "ttft p50", "judging"):
        assert expected in done.stderr
    assert "compiled-naive" in done.stdout
    assert f"report: {line['report']}" in done.stdout

    again = console_script(["analyze", str(run_dir), "--json"], tmp_path)
    assert again.returncode == 99
    assert last_line(again) == summary


def test_a_trace_is_replayed_row_by_row(tmp_path: Path) -> None:
    rows = "".join(f"2023-11-16 18:15:4{second}.5000000,{300 + second},44\n" for second in range(6))
    (tmp_path / "azure.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    settings = ["--set", "traffic.duration_s=4", "--set", "traffic.block_s=1", "--set", "trials.starting_at_once=3"]
    settings += ["--set", "traffic.length_scale=0.1"]
    done = with_fake_arms(["run", "demo", "--trace", "azure.csv", *settings], tmp_path)
    run_dir = tmp_path / last_line(done)["run_dir"]
    sent = [row for row in requests(run_dir) if row["arm"] == "eager"]
    assert len(sent) == 4, done.stderr
    assert {row["prompt_tokens"] for row in sent} <= {30, 31}  # 300 tokens and more, at length_scale 0.1
    gaps = sorted(row["scheduled_ns"] for row in sent)
    assert [round((later - gaps[0]) / 1e9) for later in gaps] == [0, 1, 2, 3]


def test_a_run_under_pressure_says_so_and_leaves_nothing_behind(tmp_path: Path) -> None:
    pressure = "[{end_s = 2, memory_share = 0.01, tenant_rps = 20}, {start_s = 2, compute_share = 0.2}]"
    settings = ["--set", "traffic.duration_s=6", "--set", "traffic.block_s=1", "--set", "trials.starting_at_once=3"]
    settings += ["--set", f"pressure.schedule={pressure}"]
    done = with_fake_arms(["run", "demo", *settings], tmp_path)
    line = last_line(done)
    run_dir = tmp_path / line["run_dir"]
    assert line["complete"] is True, done.stderr
    facts = json.loads((run_dir / "trial-01" / "trial.json").read_text())
    memory, tenant, compute = facts["pressure"]
    assert [row["kind"] for row in (memory, tenant, compute)] == ["memory", "tenant", "compute"]
    assert {(row["device"], row["error"]) for row in facts["pressure"]} == {("cpu", None)}
    # on before the first request, and the second phase from two seconds on to the end
    assert memory["start_ns"] < facts["start_ns"] < memory["end_ns"] <= compute["start_ns"] < compute["end_ns"]
    assert 1.5e9 < compute["start_ns"] - facts["start_ns"] < 6e9
    assert tenant["answered"] > 0
    assert compute["had_share"] > 0
    # what the tenant was asked is nobody's record
    assert len(requests(run_dir)) == sum(facts["planned"].values())
    sentence = "Under pressure: from 0 to 2 s a neighbour on each device held 1 % of the memory, and a second server"
    for name in ("report.md", "report.html"):
        assert sentence in (run_dir / name).read_text()


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


def test_the_real_engine_answers_every_request_and_short_data_stay_undecided(tmp_path: Path) -> None:
    text = TINY.format(preset="eager-padded", policy="", duration_s=20, rate=2)
    (tmp_path / "padding.toml").write_text(text)
    done = console_script(["run", "padding.toml"], tmp_path)
    line = last_line(done)
    assert (done.returncode, line["verdict"]) == (3, "INCONCLUSIVE"), done.stderr + done.stdout
    assert line["needed_s"] > 20
    run_dir = tmp_path / line["run_dir"]
    rows = requests(run_dir)
    assert len(rows) > 40
    for row in rows:
        assert (row["status"], row["output_tokens"], len(row["token_ns"])) == (
            "OK",
            row["max_tokens"],
            row["max_tokens"],
        )
        # the server's clock is the client's
        assert row["sent_ns"] <= row["server_recv_ns"] <= row["first_token_ns"] <= row["end_ns"]
        assert row["compile_stall_ns"] == 0
    steps = read_table(run_dir / "trial-01" / "steps.arrow", STEPS)[0].to_pylist()
    assert {step["arm"] for step in steps} == {"eager", "eager-padded"}
    padded = [step for step in steps if step["arm"] == "eager-padded" and step["kind"] == "prefill"]
    assert {step["padded_tokens"] for step in padded} == {96}
    assert not any(step["compiled"] for step in steps)


def test_a_really_recompiling_arm_fails_by_its_recompiles_and_the_records_say_who_waited(tmp_path: Path) -> None:
    """The tiny model under the real compiler; a light backend keeps the stalls short without changing the guards."""
    policy = '[arms.compile]\nbackend = "aot_eager"'
    text = TINY.format(preset="compiled-naive", policy=policy, duration_s=15, rate=4)
    (tmp_path / "naive.toml").write_text(text)
    done = console_script(["run", "naive.toml"], tmp_path)
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
    summary = json.loads((run_dir / "summary.json").read_text())
    (naive,) = [arm for arm in summary["arms"] if arm["name"] == "compiled-naive"]
    assert naive["compile"]["recompiles"] == len(serving)
    failed = {gate["gate"] for gate in summary["gates"] if gate["verdict"] == "FAIL"}
    assert "recompiles" in failed


def test_a_run_that_may_be_looked_at_ends_when_it_is_decided(tmp_path: Path) -> None:
    settings = ["--until-decided", "--at-most", "440s", "--seed", "3", "--out", "out"]
    settings += ["--set", "traffic.block_s=1", "--set", "traffic.rate=30", "--set", "gates.cold_s=2"]
    settings += ["--set", "trials.starting_at_once=3", "--set", "trials.count=2", *LOOSE]
    # So short that too few of the control's requests fall into compiles to see them slow it down, which a machine that
    # is busy as the load starts may be taken for.
    done = with_fake_arms(["run", "demo", *settings], tmp_path, "--stall-s", "0.01")
    line = last_line(done)
    assert line["verdict"] == "FAIL", done.stderr
    run_dir = tmp_path / line["run_dir"]
    trial = json.loads((run_dir / "trial-01" / "trial.json").read_text())
    assert list(trial["ended_arms"]) == ["compiled-naive"]
    assert "recompile" in trial["ended_arms"]["compiled-naive"]["why"]
    assert trial["ended"].startswith("decided after")
    assert trial["duration_s"] < 210, "the decision, which takes 25 s on a quiet machine, ends a trial of 220 s"
    assert not (run_dir / "trial-02").exists()
    planned = trial["planned"]
    assert planned["compiled-naive"] < planned["eager"] == planned["compiled-padded"]
    assert len(requests(run_dir)) == sum(planned.values()), "all that was due was sent and has ended"
    summary = json.loads((run_dir / "summary.json").read_text())
    blocking = {check["check"] for check in summary["validity"] if not check["ok"]}
    assert not blocking & {"complete", "arms", "load processes", "cut requests", "pairs", "blocks", "run length"}
    looks = [json.loads(text) for text in (run_dir / "looks.jsonl").read_text().splitlines()]
    assert looks[-1]["decided"]
    assert "SIGKILL" not in (run_dir / "looks.log").read_text()


def test_a_ramp_takes_a_candidate_back_while_it_compiles(tmp_path: Path) -> None:
    ramp = ("--set", "ramp.steps=[4,50,100]", "--set", "ramp.stall_limit_s=1", "--at-most", "60s")
    line, run_dir, changes = ramp_with(tmp_path, "compiled-naive", *ramp, flags=("--stall-s", "20"))
    assert (line["verdict"], line["exit_code"]) == ("FAIL", 99)
    back = changes[-1]
    assert (back["action"], back["weights"]) == ("rollback", {"eager": 10_000, "compiled-naive": 0})
    assert "compiled-naive has been compiling for 1." in back["why"]
    assert back["done_ns"] - back["cause_ns"] < 2e9
    events = read_table(run_dir / "trial-01" / "compile_events.arrow", COMPILE_EVENTS)[0].to_pylist()
    first = next(event for event in events if event["phase"] == "serving")
    assert back["cause_ns"] - first["start_ns"] == 1e9
    assert first["end_ns"] - first["start_ns"] >= 20e9, "the record is the compile as it was"
