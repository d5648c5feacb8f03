import json
import math
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from analysis.records import COMPILE_EVENTS, REQUESTS, RecordError, RecordWriter, read_table
from analysis.summary import analyze, exit_code, write_summary
from tests.fakes.runs import EAGER, Compile, FakeArm, FakeRun, write_run

SLO = {"p99_ttft_ms": 2000, "p99_e2e_ms": 6000}
NAIVE = FakeArm(name="naive", compiles=[Compile(at_s=5 + 10 * step, seconds=3 + step) for step in range(6)])
SHORT = FakeRun(duration_s=90, rate=2)


def summary_of(path, run):
    return analyze(write_run(path / "run", run))


def gate(summary, name, arm="compiled"):
    return next(item for item in summary["gates"] if (item["arm"], item["gate"]) == (arm, name))


def failed_checks(summary):
    return {item["check"] for item in summary["validity"] if not item["ok"]}


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    return summary_of(tmp_path_factory.mktemp("clean"), FakeRun(slo=SLO))


class TestVerdicts:
    def test_equal_arms_pass(self, clean):
        assert clean["overall"] == "PASS"
        assert exit_code(clean) == clean["exit_code"] == 0
        assert failed_checks(clean) == set()
        assert clean["headline"].startswith("compiled may replace eager")

    def test_a_slower_arm_fails(self, tmp_path):
        summary = summary_of(tmp_path, FakeRun(arms=(EAGER, FakeArm(name="compiled", ratio=1.4))))
        assert (summary["overall"], exit_code(summary)) == ("FAIL", 99)
        assert gate(summary, "noninferiority p99_e2e")["verdict"] == "FAIL"

    def test_a_short_run_is_inconclusive_and_says_how_long_would_do(self, tmp_path):
        summary = summary_of(tmp_path, SHORT)
        assert (summary["overall"], exit_code(summary)) == ("INCONCLUSIVE", 3)
        assert "blocks" in failed_checks(summary)
        assert summary["advice"]["needed_s"] >= 600
        assert "minutes" in summary["advice"]["text"]

    def test_a_recompiling_arm_fails_in_a_short_run(self, tmp_path):
        summary = summary_of(tmp_path, replace(SHORT, arms=(EAGER, FakeArm(name="padded"), NAIVE), slo=SLO))
        assert summary["overall"] == "FAIL"
        first = gate(summary, "recompiles", "naive")
        assert first["verdict"] == "FAIL"
        assert first["reason"].startswith("6 recompiles while serving, longest 8.0 s, limit 0; ")
        assert first["reason"] in summary["headline"] + "."
        assert gate(summary, "recompiles", "padded")["verdict"] == "PASS"
        verdicts = {arm["name"]: arm["verdict"] for arm in summary["arms"]}
        assert verdicts == {"eager": None, "padded": "INCONCLUSIVE", "naive": "FAIL"}

    def test_stalls_are_kept_out_of_steady_and_explained(self, tmp_path):
        summary = summary_of(tmp_path, FakeRun(arms=(EAGER, NAIVE)))
        naive = summary["arms"][1]
        assert naive["metrics"]["e2e"]["p99_ms"] > 3000
        assert naive["steady"]["e2e"]["p99_ms"] < 2000
        assert naive["compile"]["p99_e2e_ms_without"] < 2000
        assert naive["compile"]["p99_e2e_explained_pct"] > 50
        assert gate(summary, "noninferiority p99_e2e", "naive")["verdict"] == "PASS"
        everything = [item for item in summary["comparisons"] if item["phase"] == "all" and item["metric"] == "ttft"]
        assert everything[0]["ratio"] > 10

    def test_spikes_name_the_compile_that_caused_them(self, tmp_path):
        summary = summary_of(tmp_path, replace(SHORT, arms=(EAGER, NAIVE)))
        causes = {spike["cause"] for spike in summary["spikes"] if spike["arm"] == "naive"}
        assert "recompiled" in causes
        worst = summary["spikes"][0]
        assert worst["event_ids"]
        assert worst["explained_pct"] > 90
        known = {event["event_id"] for event in summary["events"]}
        assert set(worst["event_ids"]) <= known

    def test_a_split_is_judged_without_pairs(self, tmp_path):
        arms = (FakeArm(name="eager", enabled=False, weight=1), FakeArm(name="compiled", weight=1))
        summary = summary_of(tmp_path, FakeRun(design="split", arms=arms, rate=8))
        assert summary["comparisons"][0]["method"] == "unpaired block label swap"
        assert "sample ratio" in {item["check"] for item in summary["validity"]}

    def test_arms_that_take_turns_meet_in_blocks_that_hold_a_turn_of_each(self, tmp_path):
        summary = summary_of(tmp_path, FakeRun(design="switchback", duration_s=1440, drift=0.05))
        assert summary["design"]["block_s"] == 60
        assert summary["design"]["blocks"] == 24
        assert summary["comparisons"][0]["method"] == "unpaired block label swap"
        first = summary["comparisons"][0]
        assert first["blocks"] == 23  # the cold start takes the first turn and so its block
        assert first["low"] < 1.0 < first["high"]

    def test_six_trials_are_judged_by_trial(self, tmp_path):
        summary = summary_of(tmp_path, FakeRun(trials=6, duration_s=150))
        assert {item["method"] for item in summary["comparisons"]} == {"t-test over trials"}
        assert summary["overall"] == "PASS"


class TestValidity:
    """Each spoils an otherwise passing run."""

    def spoiled(self, path, run=None, *, change=None):
        directory = write_run(path / "run", run or FakeRun())
        if change is not None:
            trial = directory / "trial-01" / "trial.json"
            info = json.loads(trial.read_text())
            change(info)
            trial.write_text(json.dumps(info))
        summary = analyze(directory)
        assert summary["overall"] == "INCONCLUSIVE"
        assert exit_code(summary) == 3
        return failed_checks(summary)

    def test_generator_lag(self, tmp_path):
        assert self.spoiled(tmp_path, FakeRun(lag_ms=500.0)) == {"generator lag"}

    def test_closed_loop(self, tmp_path):
        assert self.spoiled(tmp_path, FakeRun(open_loop=False)) == {"open loop"}

    def test_an_interrupted_trial(self, tmp_path):
        assert self.spoiled(tmp_path, FakeRun(complete=False)) == {"complete"}

    def test_arms_with_another_model(self, tmp_path):
        other = FakeArm(name="compiled", config={"model": {"id": "random:tiny", "dtype": "bfloat16"}})
        assert self.spoiled(tmp_path, FakeRun(arms=(EAGER, other))) == {"comparable"}

    def test_a_dead_control(self, tmp_path):
        def die(info):
            info["deaths"] = [{"arm": "eager", "replica": "eager-0", "at_ns": 1, "exit_code": -9}]

        assert self.spoiled(tmp_path, change=die) == {"alive"}

    def test_requests_that_were_planned_and_never_seen(self, tmp_path):
        def plan_more(info):
            info["planned"]["compiled"] += 100

        assert self.spoiled(tmp_path, change=plan_more) == {"arms"}

    def test_a_failing_control(self, tmp_path):
        broken = FakeArm(name="eager", enabled=False, error_share=0.05)
        assert "control errors" in self.spoiled(tmp_path, FakeRun(arms=(broken, FakeArm(name="compiled"))))

    def test_no_telemetry(self, tmp_path):
        assert self.spoiled(tmp_path, FakeRun(telemetry=False)) == set()

    def test_a_torn_file(self, tmp_path):
        directory = write_run(tmp_path / "run", FakeRun())
        path = directory / "trial-01" / "requests-0.arrow"
        table, _ = read_table(path, REQUESTS)
        rows = table.to_pylist()
        path.unlink()
        with RecordWriter(path, REQUESTS) as writer:
            for start in range(0, len(rows), 50):
                for row in rows[start : start + 50]:
                    writer.append(row)
                writer.flush()
        path.write_bytes(path.read_bytes()[:-100])
        summary = analyze(directory)
        assert summary["overall"] == "INCONCLUSIVE"
        assert "records" in failed_checks(summary)

    def test_a_split_that_is_not_the_split_asked_for(self, tmp_path):
        arms = (FakeArm(name="eager", enabled=False, weight=1), FakeArm(name="compiled", weight=2))

        def claim(info):
            info["weights"] = {"eager": 1, "compiled": 1}

        assert "sample ratio" in self.spoiled(tmp_path, FakeRun(design="split", arms=arms, rate=8), change=claim)

    def test_interference(self, tmp_path):
        often = FakeArm(
            name="compiled",
            compiles=[Compile(at_s=55 + 100 * step, seconds=4, kind="graph_capture") for step in range(7)],
        )
        gates = {"max_recompiles": 99, "max_stall_s": 9, "max_stall_s_per_min": 9, "max_requests_hit_pct": 50}
        found = self.spoiled(tmp_path, FakeRun(arms=(EAGER, often), gates=gates, interference=1.6))
        assert "interference" in found

    def test_a_dead_treatment_fails(self, tmp_path):
        directory = write_run(tmp_path / "run", FakeRun())
        trial = directory / "trial-01" / "trial.json"
        info = json.loads(trial.read_text())
        info["deaths"] = [{"arm": "compiled", "replica": "compiled-0", "at_ns": 1, "exit_code": -9}]
        trial.write_text(json.dumps(info))
        summary = analyze(directory)
        assert summary["overall"] == "FAIL"
        assert "died once" in summary["headline"]

    def test_a_treatment_that_fails_requests_fails(self, tmp_path):
        summary = summary_of(tmp_path, FakeRun(arms=(EAGER, FakeArm(name="compiled", error_share=0.05))))
        assert gate(summary, "errors")["verdict"] == "FAIL"
        assert summary["overall"] == "FAIL"


def rewrite(directory, edit):
    """The run's requests after `edit`, which takes and gives a list of rows."""
    path = directory / "trial-01" / "requests-0.arrow"
    rows = edit(read_table(path, REQUESTS)[0].to_pylist())
    path.unlink()
    with RecordWriter(path, REQUESTS) as writer:
        for row in rows:
            writer.append(row)
    return directory


def all_fail(rows):
    return [row | {"status": "UNAVAILABLE", "first_token_ns": None} for row in rows]


def all_tied(rows):
    return [
        row
        | {
            "first_token_ns": row["scheduled_ns"] + 10**8,
            "end_ns": row["scheduled_ns"] + 10**9,
            "sent_ns": row["scheduled_ns"],
        }
        for row in rows
    ]


def clock_back(rows):
    return [row | ({"end_ns": row["scheduled_ns"] - 10**9} if place % 5 == 0 else {}) for place, row in enumerate(rows)]


def treatment_fails(rows):
    return [row | ({"status": "UNAVAILABLE"} if row["arm"] == "compiled" else {}) for row in rows]


DEGENERATE = {
    "no requests": lambda rows: [],
    "one request": lambda rows: rows[:1],
    "one request an arm": lambda rows: [rows[0], next(row for row in rows if row["arm"] == "compiled")],
    "all ties": all_tied,
    "all failed": all_fail,
    "no treatment": lambda rows: [row for row in rows if row["arm"] == "eager"],
    "no control": lambda rows: [row for row in rows if row["arm"] == "compiled"],
    "clock goes back": clock_back,
    "only broken times": lambda rows: [row | {"end_ns": 1} for row in rows],
    "no times at all": lambda rows: [row | {"scheduled_ns": None, "sent_ns": None, "end_ns": None} for row in rows],
    "one block": lambda rows: [row for row in rows if row["scheduled_ns"] - rows[0]["scheduled_ns"] < 29 * 10**9],
    "no pairs": lambda rows: [row | {"pair_id": None} for row in rows][: len(rows) // 2],
    "all ramp-up": lambda rows: [row | {"phase": "rampup"} for row in rows],
    "zero latency": lambda rows: [
        row | {"first_token_ns": row["scheduled_ns"], "end_ns": row["scheduled_ns"]} for row in rows
    ],
}


@pytest.mark.parametrize("name", DEGENERATE)
def test_data_that_cannot_carry_a_verdict_never_pass(name, tmp_path):
    directory = rewrite(write_run(tmp_path / "run", FakeRun(slo=SLO)), DEGENERATE[name])
    summary = analyze(directory)
    assert summary["overall"] == "INCONCLUSIVE"
    assert not any(arm["verdict"] == "PASS" for arm in summary["arms"])
    assert all(item["reason"] for item in summary["gates"])
    write_summary(summary, tmp_path / "summary.json")


def test_a_treatment_that_only_fails_does_not_pass(tmp_path):
    summary = analyze(rewrite(write_run(tmp_path / "run", FakeRun()), treatment_fails))
    assert summary["overall"] == "FAIL"
    assert "100 %" in gate(summary, "errors")["reason"]


def test_a_run_with_one_arm_has_nothing_to_judge(tmp_path):
    summary = summary_of(tmp_path, FakeRun(arms=(EAGER,), duration_s=60))
    assert summary["overall"] == "INCONCLUSIVE"
    assert summary["headline"] == "There is no arm to judge against eager."


@pytest.mark.parametrize("size", [0, 1, 300, 5000])
def test_a_kill_in_mid_write_never_passes(size, tmp_path):
    directory = write_run(tmp_path / "run", FakeRun(duration_s=60))
    path = directory / "trial-01" / "requests-0.arrow"
    path.write_bytes(path.read_bytes()[:size])
    assert analyze(directory)["overall"] == "INCONCLUSIVE"


class TestOtherSources:
    def bare(self, path, run=None):
        directory = write_run(path / "run", run or FakeRun(server_columns=False))
        requests = read_table(directory / "trial-01" / "requests-0.arrow", REQUESTS)[0]
        events = read_table(directory / "trial-01" / "compile_events.arrow", COMPILE_EVENTS)[0]
        target = path / "bare"
        target.mkdir()
        return requests, events, target

    def test_parquet_alone_is_judged(self, tmp_path):
        requests, events, target = self.bare(tmp_path)
        keep = [
            "arm",
            "trial",
            "pair_id",
            "scheduled_ns",
            "sent_ns",
            "first_token_ns",
            "end_ns",
            "status",
            "output_tokens",
        ]
        pq.write_table(requests.select(keep), target / "requests.parquet")
        pq.write_table(events, target / "compile_events.parquet")
        summary = analyze(target)
        assert summary["control"] == "eager"
        assert summary["overall"] == "PASS"

    def test_json_lines_give_the_same_comparisons(self, tmp_path):
        requests, _, target = self.bare(tmp_path, FakeRun(duration_s=120))
        pq.write_table(requests, target / "requests.parquet")
        first = analyze(target)
        (target / "requests.parquet").unlink()
        lines = "".join(json.dumps(row) + "\n" for row in requests.to_pylist())
        (target / "requests.jsonl").write_text(lines)
        assert analyze(target) == first

    def test_without_events_recompiles_are_unknown(self, tmp_path):
        requests, _, target = self.bare(tmp_path)
        pq.write_table(requests, target / "requests.parquet")
        summary = analyze(target)
        assert gate(summary, "recompiles")["verdict"] == "INCONCLUSIVE"
        assert gate(summary, "noninferiority p99_ttft")["verdict"] == "PASS"
        assert summary["overall"] == "INCONCLUSIVE"

    def test_an_unnamed_control_is_asked_for(self, tmp_path):
        pq.write_table(pa.table({"arm": ["a"], "end_ns": [5], "status": ["OK"]}), tmp_path / "requests.parquet")
        with pytest.raises(RecordError, match="is the control") as error:
            analyze(tmp_path)
        assert "\n" not in str(error.value)

    def test_overlap_attributes_without_server_columns(self, tmp_path):
        summary = summary_of(tmp_path, replace(SHORT, arms=(EAGER, NAIVE), server_columns=False))
        naive = summary["arms"][1]["compile"]
        assert naive["requests_hit"] > 20
        assert naive["longest_stall_s"] > 5
        assert naive["p99_e2e_explained_pct"] > 50


def test_events_that_were_sent_twice_count_once(tmp_path):
    directory = write_run(tmp_path / "run", replace(SHORT, arms=(EAGER, NAIVE)))
    path = directory / "trial-01" / "compile_events.arrow"
    rows = read_table(path, COMPILE_EVENTS)[0].to_pylist()
    with RecordWriter(path, COMPILE_EVENTS) as writer:
        for row in rows:
            writer.append(row)
    assert gate(analyze(directory), "recompiles", "naive")["value"] == 6


class TestDocument:
    def test_same_records_and_seed_give_the_same_bytes(self, tmp_path):
        directory = write_run(tmp_path / "run", replace(SHORT, arms=(EAGER, NAIVE)))
        for name in ("a.json", "b.json"):
            write_summary(analyze(directory, seed=3), tmp_path / name)
        assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()

    def test_another_seed_changes_draws_and_not_the_facts(self, tmp_path):
        directory = write_run(tmp_path / "run", FakeRun())
        first, second = analyze(directory, seed=1), analyze(directory, seed=2)
        assert first["comparisons"][0]["p_noninferior"] != second["comparisons"][0]["p_noninferior"]
        assert first["arms"] == second["arms"]

    def test_numbers_are_json_and_finite(self, clean):
        text = json.dumps(clean, allow_nan=False)
        assert json.loads(text) == clean

    def test_metrics_are_those_of_the_records(self, tmp_path):
        directory = write_run(tmp_path / "run", FakeRun(duration_s=60))
        rows = read_table(directory / "trial-01" / "requests-0.arrow", REQUESTS)[0].to_pylist()
        e2e = [(row["end_ns"] - row["scheduled_ns"]) / 1e6 for row in rows if row["arm"] == "eager"]
        eager = analyze(directory)["arms"][0]
        assert eager["metrics"]["e2e"]["p99_ms"] == pytest.approx(np.quantile(e2e, 0.99), rel=1e-6)
        assert eager["metrics"]["e2e"]["n"] == eager["requests"] == eager["ok"] == len(e2e)
        assert eager["request_rate"] == pytest.approx(len(e2e) / 60)

    def test_series_and_distribution_count_every_request(self, clean):
        for arm in clean["arms"]:
            points = clean["series"]["arms"][arm["name"]]
            assert sum(point["n"] for point in points) == arm["requests"]
            for metric in ("ttft", "e2e"):
                curve = clean["distribution"]["metrics"][metric][arm["name"]]
                assert sum(curve["counts"]) == arm["requests"]
                assert len(curve["edges_ms"]) == len(curve["counts"]) + 1
                for _, value, low, high in curve["ecdf"]:
                    assert low is None or low <= value
                    assert high is None or value <= high

    def test_padding_and_startup_are_reported(self, clean):
        compiled = clean["arms"][1]
        assert compiled["padding"]["waste_pct"] == pytest.approx(25.0)
        assert compiled["padding"]["tokens"] == 600
        assert compiled["startup"]["load_s"] == 1.0
        assert compiled["startup"]["warmup_s"] == 2.0
        assert compiled["compile"]["warmup_events"] == 1
        assert compiled["compile"]["warmup_s"] == 5.0

    def test_cold_and_steady_share_no_request(self, clean):
        for arm in clean["arms"]:
            cold, steady = arm["cold"]["e2e"]["n"], arm["steady"]["e2e"]["n"]
            assert cold > 0
            assert cold + steady == arm["metrics"]["e2e"]["n"]

    def test_keys_are_those_the_report_reads(self, clean):
        assert set(clean) >= {
            "schema", "name", "run_id", "created", "overall", "exit_code", "headline", "control", "arms", "comparisons",
            "gates", "validity", "spikes", "events", "series", "distribution", "design", "advice", "environment",
        }  # fmt: skip
        assert clean["created"] == "2023-11-16T02:00:00+00:00"
        assert clean["design"]["blocks"] == 26
        assert math.isclose(clean["arms"][0]["metrics"]["itl"]["p50_ms"], 10, rel_tol=0.5)

    def test_events_list_those_that_hit_requests(self, tmp_path):
        summary = summary_of(tmp_path, replace(SHORT, arms=(EAGER, NAIVE)))
        seconds = [event["seconds"] for event in summary["events"]]
        assert seconds == sorted(seconds, reverse=True)
        assert len(seconds) == 6
        assert all(event["requests_hit"] > 0 and event["phase"] == "serving" for event in summary["events"])
        assert summary["events"][0]["offset_s"] == pytest.approx(55)
