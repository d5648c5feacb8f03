"""External arms, and production traffic that a ramp or another controller moves, with real servers and Envoy."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from benchmarks.simulation.greedy import Server
from tailgate.analysis.records.schemas import COMPILE_EVENTS
from tailgate.analysis.records.tables import read_table
from tailgate.analysis.records.weight_journal import BY_OTHERS, read_journal
from tests.external.server_process import answers, running
from tests.fakes.http_servers import CompilingServer, serving
from tests.fakes.hub_model import make
from tests.fakes.kubernetes import asked
from tests.fakes.processes import free_port, wait_for
from tests.fakes.production import Production
from tests.fakes.simulated import GreedyServer
from tests.fakes.whole_run import command, ended, last_line, requests, summary_of, with_fake_arms

needs_server = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("fastapi", "uvicorn", "openai")),
    reason="transformers serve: pip install fastapi uvicorn openai",
)
EXPERIMENT = """
name = "external"
seed = 5
compare_models = true
[engine]
max_prompt_tokens = 64
max_new_tokens = {tokens}
{arms}
[traffic]
duration_s = {duration_s}
rate = {rate}
length_scale = 0.08
block_s = 1
timeout_s = 20
"""
EAGER = '[[arms]]\nname = "eager"\npreset = "eager"\ncontrol = true\n'


def external(name: str, address: str, more: str = "", model: str = "llama") -> str:
    return f'[[arms]]\nname = "{name}"\nkind = "openai"\naddress = "{address}"\nmodel_name = "{model}"\n{more}\n'


def judged_run(folder: Path, *arms: str, tokens: int = 8, duration_s: int = 3, rate: int = 3) -> tuple[Path, str, str]:
    """Run the arms; return the run directory, the verdict and what the command printed."""
    text = EXPERIMENT.format(arms="".join(arms), tokens=tokens, duration_s=duration_s, rate=rate)
    (folder / "external.toml").write_text(text)
    done = with_fake_arms(["run", "external.toml", "--out", "out"], folder)
    line = last_line(done)
    assert line["complete"], done.stderr
    return folder / line["run_dir"], line["verdict"], done.stdout + done.stderr


@pytest.fixture
def transformers(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    model = make(tmp_path / "tiny")
    port = free_port()
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", str(model), "--device", "cpu"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    health = f"http://127.0.0.1:{port}/health"
    log = model / "serve.log"
    offline = {"HF_HUB_OFFLINE": "1"}
    with running(command, log=log, ready=lambda: answers(health), timeout_s=60, environment=offline):
        yield f"http://127.0.0.1:{port}/v1", model


@needs_server
def test_a_run_judges_the_server_of_transformers(transformers: tuple[str, Path], tmp_path: Path) -> None:
    address, model = transformers
    completions = external("completions", address, f'[arms.openai]\ntokenizer = "{model}"', f"{model}")
    chat = external("chat", address, f'[arms.openai]\nendpoint = "chat"\ntokenizer = "{model}"', f"{model}")
    run_dir, verdict, output = judged_run(tmp_path, EAGER, completions, chat)
    assert verdict == "INCONCLUSIVE", output
    rows = requests(run_dir)
    assert {row["status"] for row in rows} == {"OK"}
    by_pair: dict[str, dict[str, Any]] = {}
    for row in rows:
        by_pair.setdefault(row["pair_id"], {})[row["arm"]] = row
    for pair in by_pair.values():
        assert set(pair) == {"eager", "completions", "chat"}
        # as the server counts: the template of a chat adds three tokens
        planned = pair["eager"]["prompt_tokens"]
        assert [pair[arm]["prompt_tokens"] - planned for arm in ("completions", "chat")] == [0, 3]
        assert {row["output_tokens"] for row in pair.values()} == {pair["eager"]["max_tokens"]}
        assert len(pair["chat"]["token_ns"]) == pair["chat"]["output_tokens"]

    summary = summary_of(run_dir)
    arms = {arm["name"]: arm for arm in summary["arms"]}
    assert arms["eager"]["external"] is None
    for name in ("completions", "chat"):
        assert arms[name]["metrics"]["ttft"]["p99_ms"] > 0
        assert arms[name]["compile"]["recompiles"] is None
    unknown = {gate["verdict"] for gate in summary["gates"] if gate["kind"] == "recompile"}
    assert unknown == {"INCONCLUSIVE"}
    work = [check for check in summary["validity"] if check["check"] in ("equal work", "comparable")]
    assert [check["arm"] for check in work if not check["ok"]] == ["chat"], "three tokens of 42 are other work"


def test_equal_weights_pass_parity_and_other_weights_fail_it(tmp_path: Path) -> None:
    control = GreedyServer(Server())
    same = GreedyServer(Server(name="compiled"))
    other = GreedyServer(Server(weights="two"))
    with serving(control) as first, serving(same) as second, serving(other) as third:
        arms = [external("eager", first, "control = true")]
        arms += [external("compiled", second), external("other", third)]
        run_dir, verdict, output = judged_run(tmp_path, *arms, tokens=16, rate=4)
    assert verdict == "FAIL", output
    summary = summary_of(run_dir)
    gates = {gate["arm"]: gate for gate in summary["gates"] if gate["gate"] == "parity"}
    assert {arm: gate["verdict"] for arm, gate in gates.items()} == {"compiled": "PASS", "other": "FAIL"}, gates


def test_compiles_in_the_log_of_an_external_arm_are_joined_to_the_requests_they_delayed(tmp_path: Path) -> None:
    loud = CompilingServer(tmp_path / "vllm.log", compiles_at=9, compile_s=1.5)
    quiet = CompilingServer(tmp_path / "quiet.log", compiles_at=-1, compile_s=0)
    follow = f"import time; print(open({str(tmp_path / 'quiet.log')!r}).read(), end='', flush=True); time.sleep(600)"
    with serving(loud) as address, serving(quiet) as other:
        file = 'telemetry = { log = "vllm.log" }'
        command = json.dumps([sys.executable, "-c", follow])
        command = f"telemetry = {{ log_command = {command} }}"
        arms = (EAGER, external("file", f"{address}/v1", file), external("command", f"{other}/v1", command))
        run_dir, verdict, output = judged_run(tmp_path, *arms, duration_s=6, rate=6)
    assert verdict == "FAIL", output
    events = read_table(run_dir / "trial-01" / "compile_events.arrow", COMPILE_EVENTS)[0].to_pylist()
    [event] = [event for event in events if event["arm"] == "file"]
    assert (event["replica"], event["kind"], event["shape"]) == ("file-0", "compile", "(1, 8192)")
    assert event["end_ns"] - event["start_ns"] == 1_500_000_000
    assert not any(event["arm"] == "command" for event in events)

    summary = summary_of(run_dir)
    gates = {(gate["arm"], gate["gate"]): gate for gate in summary["gates"]}
    failed = gates["file", "recompiles"]
    assert (failed["verdict"], failed["value"]) == ("FAIL", 1)
    assert gates["file", "longest compile stall"]["verdict"] == "FAIL"
    assert gates["command", "recompiles"]["verdict"] != "FAIL"
    [joined] = summary["events"]
    assert (joined["arm"], joined["event_id"]) == ("file", event["event_id"])
    assert joined["requests_hit"] >= 3
    arms = {arm["name"]: arm for arm in summary["arms"]}
    assert (arms["file"]["compile"]["recompiles"], arms["command"]["compile"]["recompiles"]) == (1, 0)


STEPS = ["--set", "ramp.steps=[50,100]", "--set", "ramp.step_s=3", "--set", "ramp.most_step_s=240"]
LOOSE = ["--set", "ramp.step_margin=1.0", "--set", "gates.margin=1.0", "--set", "gates.cold_s=1"]
LOOSE += ["--set", "slo={p50_ttft_ms=2000,p50_e2e_ms=6000}"]


def start_ramp(production: Production, *more: str) -> subprocess.Popen[str]:
    admin = f"127.0.0.1:{production.ports['admin']}"
    candidate = ["--set", f"ramp.candidate={production.arms[1]}", "--set", "traffic.block_s=1"]
    return production.ramp("demo", "--admin", admin, "--out", "out", "--page", "off", *candidate, *STEPS, *LOOSE, *more)


def end_of(ramp: subprocess.Popen[str]) -> tuple[int, dict[str, Any]]:
    out, _ = ramp.communicate(timeout=280)
    return ramp.returncode, json.loads(out.splitlines()[-1])


def run_dir(production: Production) -> Path:
    (path,) = (production.folder / "out").glob("*-demo")
    return path


def journal(production: Production) -> list[dict[str, Any]]:
    """Return the decisions, each once."""
    path = run_dir(production) / "weights.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return list({row["at_ns"]: row for row in rows}.values())


def nothing_is_lost(production: Production) -> None:
    """Check that every request between the first record and the last is a record, once, of the arm that answered."""
    rows = requests(run_dir(production))
    arms = {row["session_id"]: row["arm"] for row in rows}
    assert len({row["request_id"] for row in rows}) == len(arms) == len(rows)
    first_s, last_s = min(row["sent_ns"] for row in rows) / 1e9, max(row["sent_ns"] for row in rows) / 1e9
    answers = [
        item for item in production.answers if first_s < item.sent_s and item.at_s < last_s and item.status == "OK"
    ]
    assert len(answers) > 100
    assert [item for item in answers if item.session not in arms] == []
    assert [item for item in answers if arms.get(item.session, item.arm) != item.arm] == []


def test_a_candidate_that_compiles_long_is_rolled_back_and_delayed_requests_are_counted(tmp_path: Path) -> None:
    compiles_long = {"compiled-naive": ("--stall-s", "10")}
    with Production(tmp_path, arms=("eager", "compiled-naive"), flags=compiles_long) as production:
        code, line = end_of(start_ramp(production, "--set", "ramp.stall_limit_s=1"))
        assert (code, line["verdict"]) == (99, "FAIL")
        assert production.weights() == {"eager": 10_000, "compiled-naive": 0}
        summary = summary_of(run_dir(production))
        assert summary["ramp"]["outcome"] == "rollback"
        assert 0 < summary["ramp"]["hurt"] <= summary["ramp"]["exposed"]
        (account,) = [json.loads(path.read_text()) for path in run_dir(production).glob("trial-01/generator-0.json")]
        assert account["complete"]
        assert account["started"] == account["finished"]
        back, worst = summary["weights"][-1], max(summary["events"], key=lambda event: event["seconds"])
        assert back["offset_s"] < worst["offset_s"] + worst["seconds"], "before the end of the compile"
        # Users time out by themselves; no stream was cut.
        assert {answer.status for answer in production.answers} <= {"OK", "DEADLINE_EXCEEDED"}


def test_a_killed_controller_leaves_the_weights_and_the_next_ramp_begins_anew(tmp_path: Path) -> None:
    with Production(tmp_path) as production:
        ramp = start_ramp(production)
        wait_for(lambda: list(tmp_path.glob("out/*-demo/weights.jsonl")))
        wait_for(lambda: any(row["done_ns"] is not None for row in journal(production)))
        ramp.send_signal(signal.SIGKILL)
        ramp.wait()
        left, answered = production.weights(), len(production.answers)
        wait_for(lambda: len(production.answers) >= answered + 40)
        assert production.weights() == left
        (production.folder / "out").rename(production.folder / "killed")
        code, line = end_of(start_ramp(production))
        assert code in (0, 3), line
    first, *_, last = journal(production)
    assert (first["action"], first["weights"], last["action"]) == ("start", left, "promoted")
    assert {answer.status for answer in production.answers} == {"OK"}
    nothing_is_lost(production)
    ramp_found = summary_of(run_dir(production))["ramp"]
    assert (ramp_found["outcome"], ramp_found["hurt"]) == ("promoted", 0)


def test_a_candidate_that_dies_under_another_controller_fails_and_its_weights_stay(tmp_path: Path) -> None:
    port = free_port()
    settings = ["--provider", f"127.0.0.1:{port}", "--set", "ramp.candidate=compiled-padded"]
    settings += ["--set", "traffic.block_s=1", "--at-most", "5m", *LOOSE]

    def answer(goal: str) -> dict[str, Any]:
        status, body = asked(port, "GET", f"/v1/judgement?for={goal}")
        assert status == 200, body
        return json.loads(body)

    with Production(tmp_path) as production:
        admin = f"127.0.0.1:{production.ports['admin']}"
        run = production.ramp("demo", "--admin", admin, "--out", "out", *settings)
        with ended(run):
            wait_for(lambda: list(tmp_path.glob("out/*-demo/weights.jsonl")))
            assert answer("step")["verdict"] == "INCONCLUSIVE", "the candidate has no traffic yet"
            weights = ["split", "--admin", admin, "--weight", "eager=70,compiled-padded=30"]
            done = command([sys.executable, "-m", "tailgate.loadtests.commands.main", *weights], tmp_path)
            assert done.returncode == 0, done.stderr
            wait_for(lambda: read_journal(run_dir(production))[0][-1].weights["compiled-padded"] == 30)
            wait_for(lambda: answer("step")["interim"], every_s=0.1)
            production.kill("compiled-padded")
            wait_for(lambda: "compiled-padded-0 died" in answer("promotion")["reasons"], every_s=0.1)
            assert answer("promotion")["verdict"] == "FAIL"
            assert production.weights() == {"eager": 70, "compiled-padded": 30}, "the run moves nothing"
            run.send_signal(signal.SIGINT)
            end_of(run)
        changes = read_journal(run_dir(production))[0]
        assert [change.weights["compiled-padded"] for change in changes] == [0, 30]
        assert {change.action for change in changes} == {BY_OTHERS}
        assert (run_dir(production) / "report.html").exists()
