import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from analysis.records.run_records import read_run
from analysis.records.tables import RecordError
from analysis.run.run import Run
from analysis.run.spikes import stall_windows
from tests.fakes.runs import EAGER, Compile, FakeArm, FakeRun, write_run

NAIVE = FakeArm(name="naive", compiles=[Compile(at_s=40, seconds=3), Compile(at_s=60, seconds=5)])
SHORT = FakeRun(duration_s=90, rate=2)


def load(path, run=SHORT, *, seed=None, change=None):
    directory = write_run(path / "run", run)
    for folder in sorted(directory.glob("trial-*")):
        info = json.loads((folder / "trial.json").read_text())
        if change is not None:
            change(info)
        (folder / "trial.json").write_text(json.dumps(info))
    return Run.of(read_run(directory), seed)


class TestArms:
    def test_the_control_comes_first(self, tmp_path):
        run = load(tmp_path, replace(SHORT, arms=(EAGER, NAIVE, FakeArm(name="padded"))))
        assert (run.control, run.treatments) == ("eager", ("naive", "padded"))

    def test_an_unnamed_control_is_asked_for(self, tmp_path):
        pq.write_table(pa.table({"arm": ["a"], "end_ns": [5], "status": ["OK"]}), tmp_path / "requests.parquet")
        with pytest.raises(RecordError, match="is the control") as error:
            Run.of(read_run(tmp_path))
        assert "\n" not in str(error.value)

    def test_settings_that_differ_from_the_control_are_named(self, tmp_path):
        def configure(info):
            for arm, dtype in zip(info["arms"], ("float32", "bfloat16"), strict=True):
                arm["config"] = {"model": {"id": "random:tiny", "dtype": dtype}, "engine": {"slots": 8}}

        run = load(tmp_path, change=configure)
        assert run.differences("compiled") == ["model.dtype"]
        assert run.differences("eager") == []

    def test_planned_requests_add_up_over_trials(self, tmp_path):
        run = load(tmp_path, replace(SHORT, trials=2))
        assert run.planned == {"eager": 360, "compiled": 360}

    def test_the_ladder_is_what_the_trial_says_and_not_what_its_configuration_would_mean(self, tmp_path):
        def pads(info):
            info["arms"][1]["config"]["shapes"] = {"kind": "pad"}
            info["arms"][1]["config"]["engine"] = {"max_prompt_tokens": 512, "prefill_chunk": 128}
            info["arms"][1]["length_ladder"] = [128, 512]

        assert load(tmp_path, change=pads).account("compiled").length_ladder == (128, 512)
        assert load(tmp_path, change=lambda info: None).account("compiled").length_ladder == ()

    def test_a_replica_without_a_last_word_is_silent(self, tmp_path):
        def last_words(info):
            info["final"] = {"eager-0": {"counters": {}}}

        run = load(tmp_path, change=last_words)
        assert (run.account("eager").silent, run.account("compiled").silent) == ([], ["compiled-0"])
        assert load(tmp_path, change=lambda info: None).account("compiled").silent == []


class TestTrials:
    def test_blocks_are_numbered_through_all_trials(self, tmp_path):
        run = load(tmp_path, replace(SHORT, trials=3))
        assert [trial.first_block for trial in run.trials] == [0, 3, 6]
        assert run.blocks == 9
        assert np.unique(run.block).tolist() == list(range(9))

    def test_a_short_last_block_joins_the_one_before(self, tmp_path):
        assert load(tmp_path / "short", replace(SHORT, duration_s=104)).blocks == 3
        assert load(tmp_path / "long", replace(SHORT, duration_s=106)).blocks == 4

    def test_arms_that_take_turns_share_a_longer_block(self, tmp_path):
        run = load(tmp_path, replace(SHORT, design="switchback", duration_s=240))
        assert (run.block_s, run.blocks) == (60.0, 4)

    def test_a_trial_that_was_stopped_lasted_as_long_as_it_was_seen(self, tmp_path):
        run = load(tmp_path, change=lambda info: info.update(complete=False, duration_s=600))
        assert 80 < run.seconds < 90


class TestSteady:
    def test_no_steady_request_is_cold_or_met_a_compile(self, tmp_path):
        run = load(tmp_path, replace(SHORT, arms=(EAGER, NAIVE)))
        everything = np.ones(len(run.requests), dtype=bool)
        rows = run.steady(everything, run.arms)
        windows = stall_windows(run.events, arm="naive", trial=1)
        assert 0 < len(rows) < np.count_nonzero(~run.cold)
        assert not run.cold[rows].any()
        assert not windows.touch(run.requests.start_ns[rows], run.requests.end_ns[rows]).any()

    def test_an_arm_that_never_compiles_loses_the_cold_start_alone(self, tmp_path):
        run = load(tmp_path, replace(SHORT, arms=(EAGER, NAIVE)))
        own = run.of_arm("eager")
        assert run.steady(own, ("eager",)).tolist() == np.flatnonzero(own & ~run.cold).tolist()


class TestDraws:
    def test_the_experiment_gives_the_seed_unless_the_caller_does(self, tmp_path):
        records = read_run(write_run(tmp_path / "run", replace(SHORT, seed=5)))
        assert (Run.of(records).seed, Run.of(records, 7).seed) == (5, 7)

    def test_each_place_draws_by_itself(self, tmp_path):
        run = load(tmp_path)
        assert run.rng(0, 1).random() == run.rng(0, 1).random() != run.rng(0, 2).random()


def test_bad_limits_are_refused_by_name(tmp_path):
    with pytest.raises(RecordError, match=r"gates.margin is -1"):
        load(tmp_path, replace(SHORT, gates={"margin": -1}))


def test_a_setting_that_is_no_table_is_refused(tmp_path):
    directory = write_run(tmp_path / "run", SHORT)
    (directory / "experiment.toml").write_text('gates = "wide"\n')
    with pytest.raises(RecordError, match="gates is 'wide': give a table"):
        Run.of(read_run(directory))
