from dataclasses import replace

import numpy as np
import pytest

from analysis.judging.judgement import judge
from analysis.records.run_records import read_run
from analysis.records.schemas import COMPILE_EVENTS, REQUESTS
from analysis.records.tables import RecordWriter, read_table
from analysis.run.run import Run
from analysis.run.time_parts import time_parts
from analysis.summary.arms import arm_row
from tests.analysis.judging.test_load_steps import write_search
from tests.fakes.runs import EAGER, Compile, FakeArm, FakeRun, write_run

NAIVE = FakeArm(name="naive", compiles=[Compile(at_s=5 + 10 * step, seconds=3 + step) for step in range(6)])
SHORT = FakeRun(duration_s=90, rate=2)
SLO = {"p99_ttft_ms": 2000, "p99_e2e_ms": 6000}


def rows_of(directory):
    run = Run.of(read_run(directory))
    judgement = judge(run)
    return {arm: arm_row(run, arm, judgement, time_parts(run, arm)) for arm in run.arms}


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    return rows_of(write_run(tmp_path_factory.mktemp("clean") / "run", FakeRun(slo=SLO)))


def test_metrics_are_those_of_the_records(tmp_path):
    directory = write_run(tmp_path / "run", FakeRun(duration_s=60))
    rows = read_table(directory / "trial-01" / "requests-0.arrow", REQUESTS)[0].to_pylist()
    e2e = [(row["end_ns"] - row["scheduled_ns"]) / 1e6 for row in rows if row["arm"] == "eager"]
    eager = rows_of(directory)["eager"]
    assert eager["metrics"]["e2e"]["p99_ms"] == pytest.approx(np.quantile(e2e, 0.99), rel=1e-6)
    assert eager["metrics"]["e2e"]["n"] == eager["requests"] == eager["ok"] == len(e2e)
    assert eager["request_rate"] == pytest.approx(len(e2e) / 60)


def test_cold_and_steady_share_no_request(clean):
    for row in clean.values():
        cold, steady = row["cold"]["e2e"]["n"], row["steady"]["e2e"]["n"]
        assert cold > 0
        assert cold + steady == row["metrics"]["e2e"]["n"]


def test_padding_and_startup_are_reported(clean):
    compiled = clean["compiled"]
    assert compiled["padding"]["waste_pct"] == pytest.approx(25.0)
    assert compiled["padding"]["tokens"] == 600
    assert compiled["startup"]["load_s"] == 1.0
    assert compiled["startup"]["warmup_s"] == 2.0
    assert compiled["compile"]["warmup_events"] == 1
    assert compiled["compile"]["warmup_s"] == 5.0


def test_the_control_has_slo_rows_and_no_verdict(clean):
    assert [row["verdict"] for row in clean["eager"]["slo"]] == ["PASS", "PASS"]
    assert (clean["eager"]["verdict"], clean["compiled"]["verdict"]) == (None, "PASS")


def test_stalls_are_kept_out_of_steady_and_explained(tmp_path):
    naive = rows_of(write_run(tmp_path / "run", FakeRun(arms=(EAGER, NAIVE))))["naive"]
    assert naive["metrics"]["e2e"]["p99_ms"] > 3000
    assert naive["steady"]["e2e"]["p99_ms"] < 2000
    assert naive["compile"]["p99_e2e_ms_without"] < 2000
    assert naive["compile"]["p99_e2e_explained_pct"] > 50


def test_figures_without_telemetry_are_unknown(tmp_path):
    compiled = rows_of(write_run(tmp_path / "run", replace(SHORT, telemetry=False)))["compiled"]
    for figure in ("recompiles", "serving_events", "longest_stall_s", "requests_hit", "requests_hit_pct"):
        assert compiled["compile"][figure] is None
    assert compiled["padding"]["waste_pct"] is None


def test_a_wait_that_a_server_reported_is_known_without_events(tmp_path):
    held = FakeArm(name="compiled", compiles=[Compile(at_s=40, seconds=5)])
    told = write_run(tmp_path / "run", replace(SHORT, arms=(EAGER, held), telemetry=False))
    compiled = rows_of(told)["compiled"]["compile"]
    assert compiled["serving_events"] is None
    assert compiled["requests_hit"] > 0
    assert compiled["longest_stall_s"] == pytest.approx(5.0, rel=0.2)


def test_an_arm_that_a_search_never_started_has_no_figures(tmp_path):
    directory = write_search(tmp_path / "run", {"eager": 9, "new": 17}, [[8, 16]])
    with RecordWriter(directory / "trial-01" / "compile_events.arrow", COMPILE_EVENTS):
        pass
    with (directory / "experiment.toml").open("a") as file:
        file.write('[[arms]]\nname = "late"\ncontrol = false\n')
    rows = rows_of(directory)
    new, late = rows["new"], rows["late"]
    assert (new["startup"]["compile_s"], late["startup"]["compile_s"]) == (0.0, None)
    assert new["request_rate"] > 0
    assert late["request_rate"] is late["output_token_rate"] is late["goodput_rps"] is None
    run = Run.of(read_run(directory))
    assert [gate.arm for gate in judge(run).gates if gate.gate == "deaths"] == ["new"], "it did not stay up either"
