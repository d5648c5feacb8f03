"""summary.json: the verdict and its exit code, arms, events, schema, machines, traffic and server load."""

import json
import re
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from jsonschema import Draft202012Validator

from benchmarks.simulation.fleet import SLOTS, TREATMENT
from tailgate.analysis.judging.judgement import judge
from tailgate.analysis.records.documents import write_document
from tailgate.analysis.records.run_records import read_run
from tailgate.analysis.records.schemas import COMPILE_EVENTS, REQUESTS
from tailgate.analysis.records.tables import RecordError, read_table
from tailgate.analysis.report.html import html_report
from tailgate.analysis.report.rendering import markdown_report
from tailgate.analysis.report.terminal import verdict_table
from tailgate.analysis.summary.model import Summary, json_schema
from tailgate.analysis.summary.summary import analyze
from tests.fakes.machines import FakeMachines, Trouble, tell
from tests.fakes.processes import refusal
from tests.fakes.runs import EAGER, Compile, FakeArm, FakeRun, run_in, write_run
from tests.fakes.simulated import write_external, write_requests
from tests.golden.recorded import RUNS, golden

SLO = {"p99_ttft_ms": 2000, "p99_e2e_ms": 9000}
NAIVE = FakeArm(name="naive", compiles=[Compile(at_s=5 + 10 * step, seconds=3 + step) for step in range(6)])
SHORT = FakeRun(duration_s=90, rate=2)


def summary_of(path, run):
    return analyze(write_run(path / "run", run))


def arms_of(summary):
    return {arm["name"]: arm for arm in summary["arms"]}


def gates_of(summary, arm="compiled"):
    return {gate["gate"]: gate for gate in summary["gates"] if gate["arm"] == arm}


def estimates_of(summary):
    found = [gate for gate in summary["gates"] if gate["kind"] in ("noninferiority", "slo")]
    assert found
    return found


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    return summary_of(tmp_path_factory.mktemp("clean"), FakeRun(slo=SLO))


def test_parquet_alone_is_judged_and_recompiles_are_unknown_without_events(tmp_path):
    trial = write_run(tmp_path / "run", FakeRun(server_columns=False)) / "trial-01"
    requests = read_table(trial / "requests-0.arrow", REQUESTS)[0]
    bare = tmp_path / "bare"
    bare.mkdir()
    times = ("scheduled_ns", "sent_ns", "first_token_ns", "end_ns")
    columns = ["arm", "trial", "pair_id", *times, "status", "output_tokens"]
    pq.write_table(requests.select(columns), bare / "requests.parquet")
    assert "open_loop" in {row["check"]: row for row in analyze(bare)["validity"]}["open loop"]["remedy"]
    said = tmp_path / "said" / "trial-01"
    said.mkdir(parents=True)
    (bare / "requests.parquet").rename(said / "requests.parquet")
    (said / "trial.json").write_text('{"trial": 1, "complete": true, "open_loop": true}')
    summary = analyze(said.parent)
    verdicts = {name: gate["verdict"] for name, gate in gates_of(summary).items()}
    assert (verdicts["recompiles"], verdicts["noninferiority p99_ttft"]) == ("INCONCLUSIVE", "PASS")
    assert summary["overall"] == "INCONCLUSIVE"
    pq.write_table(read_table(trial / "compile_events.arrow", COMPILE_EVENTS)[0], said / "compile_events.parquet")
    summary = analyze(said.parent)
    assert (summary["control"], summary["overall"]) == ("eager", "PASS")


def test_targets_of_the_command_line_replace_those_of_the_experiment(tmp_path):
    directory = write_run(tmp_path / "run", replace(SHORT, slo=SLO))
    summary = analyze(directory, slo=["p99_ttft_ms=1", "p50_itl_ms=900"])
    limits = {row["gate"]: row["limit"] for row in summary["gates"] if row["kind"] == "slo"}
    assert limits == {"slo p99_e2e_ms": 9000.0, "slo p99_ttft_ms": 1.0, "slo p50_itl_ms": 900.0}
    for target, said in (("p99_ttft_ms", "is not KEY=LIMIT"), ("p99_ttft_ms <= 500", "p99_ttft_ms <")):
        assert said in refusal(RecordError, analyze, directory, slo=[target])


def test_the_summary_is_json_and_its_series_and_distributions_count_every_request(clean):
    assert json.loads(json.dumps(clean, allow_nan=False)) == clean
    for arm in clean["arms"]:
        bins = clean["series"]["arms"][arm["name"]]
        assert sum(bins["n"]) == arm["requests"]
        places = list(zip(bins["trial"], bins["t_s"], strict=True))
        assert places == sorted(places)
        for figures in zip(bins["ttft_p50_ms"], bins["ttft_p99_ms"], strict=True):
            assert list(figures) == sorted(figures)
        for metric in ("ttft", "e2e"):
            curve = clean["distribution"][metric][arm["name"]]
            assert sum(curve["counts"]) == arm["requests"]
            assert len(curve["edges_ms"]) == len(curve["counts"]) + 1


def test_metrics_are_those_of_the_records(tmp_path):
    directory = write_run(tmp_path / "run", FakeRun(duration_s=60))
    rows = read_table(directory / "trial-01" / "requests-0.arrow", REQUESTS)[0].to_pylist()
    e2e = [(row["end_ns"] - row["scheduled_ns"]) / 1e6 for row in rows if row["arm"] == "eager"]
    eager = arms_of(analyze(directory))["eager"]
    assert eager["metrics"]["e2e"]["p99_ms"] == pytest.approx(np.quantile(e2e, 0.99), rel=1e-6)
    assert eager["metrics"]["e2e"]["n"] == eager["requests"] == len(e2e)
    assert eager["request_rate"] == pytest.approx(len(e2e) / 60)


@pytest.mark.parametrize(("compiles", "stall_s"), [((), None), ((Compile(at_s=40, seconds=5),), 5.0)])
def test_without_telemetry_only_waits_that_a_server_reported_are_known(compiles, stall_s, tmp_path):
    arms = (EAGER, FakeArm(name="compiled", compiles=compiles))
    compiled = arms_of(summary_of(tmp_path, replace(SHORT, arms=arms, telemetry=False)))["compiled"]
    assert compiled["padding"]["waste_pct"] is compiled["compile"]["serving_events"] is None
    assert bool(compiled["compile"]["requests_hit"]) == bool(compiles)
    assert compiled["compile"]["recompiles"] is None
    assert compiled["compile"]["longest_stall_s"] == (stall_s and pytest.approx(stall_s, rel=0.2))


def test_the_schema_holds_the_golden_summaries():
    schema = json.loads(json_schema())
    Draft202012Validator.check_schema(schema)
    for name in RUNS:
        assert list(Draft202012Validator(schema).iter_errors(golden(name))) == []


def test_each_part_of_the_document_is_described_and_what_no_model_declares_is_not_written():
    schema = json.loads(json_schema())
    assert [name for name, part in schema["$defs"].items() if not part.get("description")] == []
    document = golden("demo") | {"surprise": 1}
    assert "surprise" not in Summary.of(document).document()
    assert Summary.of(document).document() == golden("demo")


SLOW_BALANCED = Trouble(what="slow", size=0.85)


@pytest.mark.parametrize(
    "trouble", [Trouble(what="foreign"), Trouble(what="slow", size=0.8, trials=(1,)), SLOW_BALANCED]
)
def test_disturbed_machines_leave_a_pass_open_unless_changing_places_balances_it(tmp_path, trouble):
    faster = (EAGER, FakeArm(name="compiled", ratio=0.8))
    machines = FakeMachines(troubles=(trouble,))
    run = FakeRun(machines=machines, trials=2, duration_s=420.0, rate=2.0, seed=7, slo=SLO, arms=faster)
    summary = summary_of(tmp_path, run)
    left_open = trouble is not SLOW_BALANCED
    assert summary["machines"]["verdict"] == ("disturbed" if left_open else "quiet")
    assert summary["overall"] == ("INCONCLUSIVE" if left_open else "PASS")
    for gate in estimates_of(summary):
        blocked = bool(gate["blocked_by"])
        assert blocked is ("would be PASS" in gate["reason"])
        # What slowed an arm that met its objectives is no reason to doubt them.
        assert blocked is (left_open and gate["kind"] == "noninferiority")


PADDED = FakeArm(name="padded", ratio=0.8, error_share=0.003)
STALLED = FakeArm(name="naive", compiles=[Compile(at_s=60, seconds=2)])
EMBEDDING = FakeRun(task="embed", arms=(EAGER, PADDED, STALLED), slo={"p99_e2e_ms": 20_000})


def test_a_run_of_embeddings_is_judged_and_shown_without_tokens(tmp_path):
    summary = summary_of(tmp_path, EMBEDDING)
    padded = {name: gate["verdict"] for name, gate in gates_of(summary, "padded").items()}
    naive = {name: gate["verdict"] for name, gate in gates_of(summary, "naive").items()}
    for gate in ("noninferiority p99_e2e", "slo p99_e2e_ms", "recompiles"):
        assert padded[gate] == "PASS"
    assert naive["recompiles"] == "FAIL"
    assert not any("ttft" in gate or "itl" in gate for gate in (*padded, *naive))
    assert {row["metric"] for row in summary["comparisons"]} == {"e2e"}
    assert (summary["task"], list(summary["distribution"])) == ("embed", ["e2e"])
    for arm in summary["arms"]:
        assert [list(arm[part]) for part in ("metrics", "steady", "cold")] == [["e2e"]] * 3
        assert arm["output_token_rate"] is None
    eager, padded, _ = summary["arms"]
    assert eager["failed"] == 0, "an answer without tokens has not failed"
    assert 0 < padded["failed"] < 0.01 * padded["requests"]
    page = html_report(summary).partition("<script")[0]
    for report in (markdown_report(summary), verdict_table(summary, width=120), page):
        assert re.search(r"TTFT|TPOT|ITL|output tokens", report) is None
        assert "p99 E2E" in report


def test_vectors_are_judged_by_their_cosine(tmp_path):
    directory = write_run(tmp_path / "run", replace(EMBEDDING, duration_s=90, slo={}))
    cosines = {"eager": 1.0, "padded": 0.9995, "naive": 0.5}
    row = {"error": None, "of": 6, "min_cosine": 0.999}
    rows = [
        {**row, "arm": arm, "replica": f"{arm}-0", "cosine": cosine, "same": 6 if cosine > 0.999 else 5}
        for arm, cosine in cosines.items()
    ]
    facts = read_run(directory).trials[0]
    answers = {"dtype": "bfloat16", "replicas": rows}
    write_document(directory / "trial-01" / "trial.json", {**facts, "answers": answers})
    gates = {gate.arm: gate for gate in judge(run_in(directory)).gates if gate.gate == "parity"}
    assert {arm: (gate.verdict, gate.value, gate.limit) for arm, gate in gates.items()} == {
        "padded": ("PASS", 0.9995, 0.999),
        "naive": ("FAIL", 0.5, 0.999),
    }
    assert "0.500000" in gates["naive"].reason


def test_a_closed_loop_and_lengths_over_the_limits_are_reported(tmp_path):
    run = write_run(tmp_path / "run", FakeRun(duration_s=60, trials=2, rate=2))
    over = {"requests": 120, "input_over": 7, "output_over": 2}
    tell(run, max_concurrency=8, open_loop=False, planned={}, over_limit=over)
    summary = analyze(run)
    assert summary["traffic"] == {f"over_limit.{key}": float(value) for key, value in over.items()}
    assert summary["design"]["open_loop"] is False
    assert summary["design"]["concurrency"] == 8
    assert "prompts cut to engine.max_prompt_tokens</dt><dd>7 of 120 (5.83 %)</dd>" in html_report(summary)


def test_an_external_count_below_the_chunks_leaves_tpot_and_itl_unmeasured(tmp_path):
    made = replace(SLOTS, duration_s=120.0)
    folder = write_external(tmp_path, made, gates={"min_blocks": 2, "metrics": ["tpot"]})
    rows = read_table(folder / "requests.arrow", REQUESTS)[0].to_pylist()
    own = [row for row in rows if row["arm"] == TREATMENT and row["output_tokens"] > 1]
    for row in own[:9]:
        row["output_tokens"] = 1
    (folder / "requests.arrow").unlink()
    write_requests(folder / "requests.arrow", pa.Table.from_pylist(rows, REQUESTS))
    summary = analyze(folder)
    reasons = {check["check"]: check["reason"] for check in summary["validity"] if not check["ok"]}
    assert "9 of " in reasons["token stream"]
