import pytest

from analysis.records.requests import requests_of
from analysis.records.run_records import clock_offset_ns, read_run
from analysis.records.schemas import COMPILE_EVENTS
from analysis.records.tables import RecordError, RecordWriter
from tests.fakes.request_rows import T0, S, row, write_rows
from tests.fakes.runs import FakeRun, write_run


def test_files_of_all_workers_and_trials_are_joined(tmp_path):
    run = write_run(tmp_path / "run", FakeRun(trials=2, duration_s=30, rate=1))
    extra = run / "trial-02" / "requests-1.arrow"
    write_rows(extra, [row(500, trial=None)])
    records = read_run(run)
    assert records.requests.num_rows == 2 * 2 * 30 + 1
    assert sorted(set(records.requests.column("trial").to_pylist())) == [1, 2]
    assert len(records.trials) == 2
    assert len(records.generators) == 2


@pytest.mark.parametrize("phase", [None, "warmup", "serving"])
def test_what_requests_waited_for_on_the_server_is_read_where_an_event_may_have_served(tmp_path, phase):
    write_rows(tmp_path / "requests.arrow", [row(queue_ns=7_000_000, server_recv_ns=T0, server_end_ns=T0 + S // 2)])
    if phase is not None:
        event = {"arm": "eager", "kind": "recompile", "phase": phase, "start_ns": T0, "end_ns": T0 + S}
        with RecordWriter(tmp_path / "compile_events.arrow", COMPILE_EVENTS) as writer:
            writer.append(event)
    requests = requests_of(read_run(tmp_path).requests)
    served = phase == "serving"
    assert requests.server_timed.tolist() == [served]
    assert requests.queue_us.tolist() == [7000 if served else 0]


def test_the_parts_of_a_requests_time_are_read_whatever_was_compiled(tmp_path):
    parts = [(7_000_000, 90_000_000, 4_000_000_000_000), (0, 100, None), (None, None, None)]
    names = ("queue_ns", "prefill_ns", "decode_ns")
    rows = [row(number, **dict(zip(names, times, strict=True))) for number, times in enumerate(parts)]
    write_rows(tmp_path / "requests.arrow", rows)
    requests = requests_of(read_run(tmp_path).requests)
    assert requests.queued_us.tolist() == [7000, 0, -1]
    assert requests.prefill_us.tolist() == [90_000, 0, -1]
    assert requests.decode_us.tolist() == [2**31 - 1, -1, -1]


@pytest.mark.parametrize(("folder", "said"), [(".", "holds no requests"), ("nowhere", "not a directory")])
def test_a_folder_that_is_no_run_is_refused(tmp_path, folder, said):
    with pytest.raises(RecordError, match=said):
        read_run(tmp_path / folder)


def test_a_trial_cut_off_while_written_is_incomplete(tmp_path):
    run = write_run(tmp_path / "run", FakeRun(duration_s=30, rate=1))
    (run / "trial-01" / "trial.json").write_text('{"trial": 1, "comp')
    records = read_run(run)
    assert records.trials == ({"trial": 1},)
    assert records.problems == ("trial-01/trial.json is not readable JSON",)


def test_a_broken_experiment_is_one_line(tmp_path):
    run = write_run(tmp_path / "run", FakeRun(duration_s=30, rate=1))
    (run / "experiment.toml").write_text("[gates\nmargin = ")
    with pytest.raises(RecordError, match=r"experiment\.toml") as error:
        read_run(run)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("offset", "applied_ns"), [(5e9, 5 * S), (5 * S, 5 * S), (True, 0), (float("nan"), 0), ("5", 0), (None, 0)]
)
def test_the_offset_of_another_hosts_clock_may_be_any_number(offset, applied_ns):
    assert clock_offset_ns({"clock": {"offset_ns": offset, "applied": False}}) == applied_ns
    assert clock_offset_ns({"clock": {"offset_ns": offset, "applied": True}}) == 0


def test_a_damaged_decision_about_weights_is_reported(tmp_path):
    directory = write_run(tmp_path / "run", FakeRun())
    (directory / "weights.jsonl").write_bytes(b"\xff\n")
    assert "weights.jsonl has a line that is no decision" in read_run(directory).problems
