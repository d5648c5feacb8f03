import json
from dataclasses import replace

import pyarrow.parquet as pq
import pytest

from analysis.records import scratch
from analysis.records.schemas import COMPILE_EVENTS, REQUESTS
from analysis.records.tables import RecordError, read_table
from analysis.statistics import quantiles
from analysis.summary.summary import analyze, exit_code, write_summary
from tests.fakes.runs import EAGER, Compile, FakeArm, FakeRun, write_run

SLO = {"p99_ttft_ms": 2000, "p99_e2e_ms": 6000}
NAIVE = FakeArm(name="naive", compiles=[Compile(at_s=5 + 10 * step, seconds=3 + step) for step in range(6)])
SHORT = FakeRun(duration_s=90, rate=2)


def summary_of(path, run):
    return analyze(write_run(path / "run", run))


def gate(summary, name, arm="compiled"):
    return next(item for item in summary["gates"] if (item["arm"], item["gate"]) == (arm, name))


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    return summary_of(tmp_path_factory.mktemp("clean"), FakeRun(slo=SLO))


@pytest.mark.parametrize(
    ("run", "overall", "code"),
    [
        (FakeRun(), "PASS", 0),
        (FakeRun(arms=(EAGER, FakeArm(name="compiled", ratio=1.4))), "FAIL", 99),
        (SHORT, "INCONCLUSIVE", 3),
    ],
    ids=["equal arms", "a slower arm", "a short run"],
)
def test_the_exit_code_is_that_of_the_verdict(run, overall, code, tmp_path):
    summary = summary_of(tmp_path, run)
    assert (summary["overall"], summary["exit_code"], exit_code(summary)) == (overall, code, code)


FAULTY = FakeArm(name="compiled", error_share=0.03, compiles=[Compile(at_s=20, seconds=4), Compile(at_s=50, seconds=2)])


def test_a_run_too_large_for_memory_has_the_same_summary(tmp_path, monkeypatch):
    run = FakeRun(duration_s=60, rate=2, trials=2, arms=(EAGER, FAULTY), slo=SLO)
    directory = write_run(tmp_path / "run", run)
    small = analyze(directory)
    # Columns in files, and everything in many parts.
    monkeypatch.setattr(scratch, "LARGEST_IN_MEMORY", 64)
    monkeypatch.setattr(scratch, "AT_ONCE", 97)
    monkeypatch.setattr(quantiles, "_MANY", 50)
    assert json.dumps(analyze(directory)) == json.dumps(small)


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
        times = ("scheduled_ns", "sent_ns", "first_token_ns", "end_ns")
        keep = ["arm", "trial", "pair_id", *times, "status", "output_tokens"]
        pq.write_table(requests.select(keep), target / "requests.parquet")
        pq.write_table(events, target / "compile_events.parquet")
        summary = analyze(target)
        assert summary["control"] == "eager"
        assert summary["overall"] == "PASS"

    def test_without_events_recompiles_are_unknown(self, tmp_path):
        requests, _, target = self.bare(tmp_path)
        pq.write_table(requests, target / "requests.parquet")
        summary = analyze(target)
        assert gate(summary, "recompiles")["verdict"] == "INCONCLUSIVE"
        assert gate(summary, "noninferiority p99_ttft")["verdict"] == "PASS"
        assert summary["overall"] == "INCONCLUSIVE"


class TestDocument:
    def test_same_records_and_seed_give_the_same_bytes(self, tmp_path):
        directory = write_run(tmp_path / "run", replace(SHORT, arms=(EAGER, NAIVE)))
        for name in ("a.json", "b.json"):
            write_summary(analyze(directory, seed=3), tmp_path / name)
        assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()

    def test_numbers_are_json_and_finite(self, clean):
        text = json.dumps(clean, allow_nan=False)
        assert json.loads(text) == clean

    def test_series_and_distribution_count_every_request(self, clean):
        for arm in clean["arms"]:
            points = clean["series"]["arms"][arm["name"]]
            assert sum(point["n"] for point in points) == arm["requests"]
            places = [(point["trial"], point["t_s"]) for point in points]
            assert places == sorted(places)
            assert all(point["ttft_p50_ms"] <= point["ttft_p99_ms"] <= point["e2e_max_ms"] for point in points)
            for metric in ("ttft", "e2e"):
                curve = clean["distribution"]["metrics"][metric][arm["name"]]
                assert sum(curve["counts"]) == arm["requests"]
                assert len(curve["edges_ms"]) == len(curve["counts"]) + 1
                for _, value, low, high in curve["ecdf"]:
                    assert low is None or low <= value
                    assert high is None or value <= high

    def test_events_and_spikes_name_the_compiles_that_hit_requests(self, tmp_path):
        summary = summary_of(tmp_path, replace(SHORT, arms=(EAGER, NAIVE)))
        events = summary["events"]
        assert [event["seconds"] for event in events] == [8, 7, 6, 5, 4, 3]
        assert all(event["requests_hit"] > 0 and event["phase"] == "serving" for event in events)
        assert events[0]["offset_s"] == pytest.approx(55)
        assert "recompiled" in {spike["cause"] for spike in summary["spikes"] if spike["arm"] == "naive"}
        worst = summary["spikes"][0]
        assert worst["explained_pct"] > 90
        assert set() < set(worst["event_ids"]) <= {event["event_id"] for event in events}

    def test_a_comparison_that_a_check_forbids_is_open(self, tmp_path):
        rows = summary_of(tmp_path, FakeRun(lag_ms=500.0))["comparisons"]
        assert {(row["phase"], row["test_verdict"], row["verdict"]) for row in rows if row["gate"]} == {
            ("steady", "PASS", "INCONCLUSIVE")
        }

    def test_targets_of_the_command_line_take_the_place_of_the_experiments(self, tmp_path):
        directory = write_run(tmp_path / "run", replace(SHORT, slo=SLO))
        summary = analyze(directory, slo=["p99_ttft_ms <= 1", "p50_itl_ms < 900"])
        limits = {row["gate"]: row["limit"] for row in summary["gates"] if row["kind"] == "slo"}
        assert limits == {"slo p99_e2e_ms": 6000.0, "slo p99_ttft_ms": 1.0, "slo p50_itl_ms": 900.0}
        with pytest.raises(RecordError, match="the operator is missing"):
            analyze(directory, slo=["p99_ttft_ms 1"])
