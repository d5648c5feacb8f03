"""A run as it is judged: its arms, trials and blocks, devices, machines, and stretches of equal weights."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tailgate.analysis.checks.traffic import weight_stretches
from tailgate.analysis.judging.judgement import judge
from tailgate.analysis.records.documents import EDITED
from tailgate.analysis.records.joining import listed_runs, write_run_list
from tailgate.analysis.records.run_records import read_run
from tailgate.analysis.records.tables import RecordError
from tailgate.analysis.records.weight_journal import BY_HAND, WeightChange, append
from tailgate.analysis.run.compile_events import stall_windows
from tailgate.analysis.run.trials import Machines
from tailgate.analysis.summary.summary import analyze
from tests.fakes.runs import EAGER, SECOND, SEPARATE_DAYS, Compile, FakeArm, FakeRun, run_in, start_of, write_run

NAIVE = FakeArm(name="naive", compiles=[Compile(at_s=40, seconds=3), Compile(at_s=60, seconds=5)])
SHORT = FakeRun(duration_s=90, rate=2)


def load(path, run=SHORT, *, change=lambda info: None):
    """The run, each of whose trial.json is changed."""
    directory = write_run(path / "run", run)
    for file in directory.glob("trial-*/trial.json"):
        info = json.loads(file.read_text())
        change(info)
        file.write_text(json.dumps(info))
    return run_in(directory)


def test_a_run_that_does_not_name_its_control_is_refused(tmp_path):
    pq.write_table(pa.table({"arm": ["a"], "end_ns": [5], "status": ["OK"]}), tmp_path / "requests.parquet")
    with pytest.raises(RecordError, match=r"lacks the file experiment\.toml: put it back"):
        run_in(tmp_path)
    (tmp_path / "experiment.toml").write_text('[[arms]]\nname = "a"\ncontrol = true\n# edited\n')
    assert run_in(tmp_path).control == "a"


def test_the_account_of_an_arm_has_the_replicas_without_final_counters(tmp_path):
    def change(info):
        info["final"] = {"eager-0": {"counters": {}}}

    run = load(tmp_path, change=change)
    assert (run.account("eager").silent, run.account("compiled").silent) == ([], ["compiled-0"])
    assert load(tmp_path).account("compiled").silent == []


def test_requests_and_blocks_are_counted_through_all_trials(tmp_path):
    run = load(tmp_path, replace(SHORT, trials=3))
    assert run.planned == {"eager": 540, "compiled": 540}
    assert ([trial.first_block for trial in run.trials], run.blocks) == ([0, 3, 6], 9)
    assert np.unique(run.block_of(np.arange(len(run.requests)))).tolist() == list(range(9))


@pytest.mark.parametrize(
    ("design", "duration_s", "blocks"),
    [("mirrored", 104, 3), ("mirrored", 106, 4), ("switchback", 240, 4)],
    ids=["a short last block joins the one before", "a longer one does not", "turns make blocks longer"],
)
def test_blocks_of_a_trial(design, duration_s, blocks, tmp_path):
    assert load(tmp_path, replace(SHORT, design=design, duration_s=duration_s)).blocks == blocks


def test_a_trial_that_was_stopped_lasted_as_long_as_it_was_seen(tmp_path):
    run = load(tmp_path, change=lambda info: info.update(complete=False, duration_s=600))
    assert 80 < run.seconds < 90


def test_no_steady_request_is_cold_or_met_a_compile(tmp_path):
    run = load(tmp_path, replace(SHORT, arms=(EAGER, NAIVE)))
    assert (run.control, run.treatments) == ("eager", ("naive",))
    rows = np.flatnonzero(run.steady(np.ones(len(run.requests), dtype=bool), run.arms))
    windows = stall_windows(run.events, arm="naive", trial=1)
    assert 0 < len(rows) < np.count_nonzero(~run.cold)
    assert not run.cold[rows].any()
    assert not windows.touch(run.requests.start_ns[rows], run.requests.end_ns[rows]).any()
    own = run.of_arm("eager")
    assert run.steady(own, ("eager",)).tolist() == (own & ~run.cold).tolist()


def test_the_seed_is_that_of_the_experiment_and_places_draw_by_themselves(tmp_path):
    run = run_in(write_run(tmp_path / "run", replace(SHORT, seed=5)))
    assert run.seed == 5
    assert run.rng(0, 1).random() == run.rng(0, 1).random() != run.rng(0, 2).random()


@pytest.mark.parametrize(
    ("text", "words"), [("[gates]\nmargin = -1\n", r"gates\.margin is -1"), ('gates = "wide"\n', "gates is 'wide'")]
)
def test_bad_limits_are_refused_by_name(text, words, tmp_path):
    directory = write_run(tmp_path / "run", SHORT)
    (directory / "experiment.toml").write_text(text + EDITED)
    with pytest.raises(RecordError, match=words):
        run_in(directory)


@pytest.mark.parametrize(
    ("ran_on", "names", "codes"),
    [
        (("b", "a", "b"), ("b", "a"), [0, 1, 0]),
        ((None, "a", None), ("the machine of run-0", "a", "the machine of run-2"), [0, 1, 2]),
    ],
)
def test_machines_stand_in_order_of_their_first_trial(ran_on, names, codes, tmp_path):
    directories = []
    for day, machine in enumerate(ran_on):
        environment = {"machine": machine} if machine else {}
        run = FakeRun(duration_s=10, rate=1, seed=day, day=day * SEPARATE_DAYS, environment=environment)
        directories.append(write_run(tmp_path / f"run-{day}", run))
    write_run_list(tmp_path / "joined", listed_runs(directories))
    machines = Machines.of(read_run(tmp_path / "joined").runs)
    assert machines.names == names
    assert machines.codes(np.array([1, 2, 3])).tolist() == codes
    assert machines.codes(np.array([-1, 0, 9])).tolist() == [0, 0, 0], "trials that no run has"


@pytest.mark.parametrize(("eager", "compiled", "ok"), [(2, 2, True), (9, 1, False)])
def test_each_stretch_of_requests_is_held_to_its_weights(eager, compiled, ok, tmp_path):
    directory = write_run(tmp_path, FakeRun(design="split", duration_s=600, rate=4, trials=2))
    at_ns, half, later = start_of(2) + 300 * SECOND, {"eager": 1, "compiled": 1}, {"eager": eager, "compiled": compiled}
    append(directory, WeightChange(at_ns=start_of(2) - SECOND, weights=half, why="as configured", trial=2))
    change = WeightChange(at_ns=at_ns, done_ns=at_ns + SECOND, weights=later, why="other", action=BY_HAND, trial=2)
    append(directory, change)
    run = run_in(directory)
    first, before, after = weight_stretches(run)
    assert (first[0], before[0], after[0]) == (half, half, later)
    sent, trial = run.requests.sent_ns, run.requests.trial
    assert set(trial[first[1]]) == {1}
    assert sent[before[1]].max() < at_ns - SECOND / 4
    assert sent[after[1]].min() >= at_ns + SECOND, "requests around the change are of neither stretch"
    assert 0 < len(run.requests) - sum(int(rows.sum()) for _, rows in (first, before, after)) < 30
    (check,) = [item for item in judge(run).checks if item.check == "sample ratio"]
    assert check.ok is ok
    assert ("stretch 3" in check.reason) is not ok
    changes = analyze(directory)["weights"]
    assert [(row["action"], row["offset_s"]) for row in changes] == [("start", -1), ("set by hand", 300)]
