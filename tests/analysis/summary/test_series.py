from analysis.records.run_records import read_run
from analysis.run.run import Run
from analysis.summary.series import latency_series
from tests.fakes.runs import FakeRun, write_run


def test_bins_hold_every_request_in_order_of_time(tmp_path):
    run = Run.of(read_run(write_run(tmp_path / "run", FakeRun(duration_s=60, rate=2, trials=2))))
    series = latency_series(run)
    assert series["bin_s"] == 1.0
    for points in series["arms"].values():
        assert sum(point["n"] for point in points) == 240
        places = [(point["trial"], point["t_s"]) for point in points]
        assert places == sorted(places)
        assert all(point["ttft_p50_ms"] <= point["ttft_p99_ms"] <= point["e2e_max_ms"] for point in points)
