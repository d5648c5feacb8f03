import json

import numpy as np
import pytest

from analysis.judging.comparisons import PHASES, QUANTILES, blocks_at, compared, comparisons, judge_quantiles
from analysis.records.run_records import read_run
from analysis.records.schemas import REQUESTS
from analysis.records.tables import RecordWriter, read_table
from analysis.run.run import Run
from analysis.run.trials import SECOND
from analysis.settings.metrics import JUDGED_METRICS
from tests.fakes.runs import EAGER, Compile, FakeArm, FakeRun, write_run

SMALL = FakeRun(duration_s=300, rate=2)


def run_of(path, run=SMALL, edit=None):
    directory = write_run(path / "run", run)
    if edit is not None:
        file = directory / "trial-01" / "requests-0.arrow"
        rows = edit(read_table(file, REQUESTS)[0].to_pylist())
        file.unlink()
        with RecordWriter(file, REQUESTS) as writer:
            for row in rows:
                writer.append(row)
    return Run.of(read_run(directory))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return run_of(tmp_path_factory.mktemp("comparisons"))


@pytest.fixture(scope="module")
def found(run):
    return comparisons(run)


class TestWhatIsCompared:
    def test_five_latencies_at_five_quantiles_in_each_phase(self, found):
        seen = {(item.metric, item.quantile, item.phase) for item in (*found.gated, *found.beside)}
        assert seen == {(m, q, p) for m in JUDGED_METRICS for q in QUANTILES for p in PHASES}
        assert len(seen) == len(found.gated) + len(found.beside)

    def test_what_the_experiment_asks_for_gates_and_nothing_else(self, found):
        assert [(item.metric, item.quantile, item.phase) for item in found.gated] == [
            ("ttft", 0.99, "steady"),
            ("e2e", 0.99, "steady"),
        ]

    def test_what_stands_beside_has_no_verdict_to_give(self, found):
        assert {item.verdict for item in found.beside} == {"INCONCLUSIVE"}
        assert all(item.p_inferior_holm is None and "limit of" not in item.reason for item in found.beside)
        assert all(item.reason.endswith(".") and item.reason.startswith("p") for item in found.beside)

    def test_failures_are_adjusted_over_arms_and_gated_metrics_alone(self, tmp_path):
        slow = [FakeArm(name=name, ratio=1.5) for name in ("one", "two")]
        gates = {"metrics": ["ttft", "e2e", "tpot"], "quantiles": [0.5, 0.99]}
        gated = comparisons(run_of(tmp_path, FakeRun(arms=(EAGER, *slow), duration_s=300, rate=2, gates=gates))).gated
        assert len(gated) == 2 * 3 * 2
        # Each stands for two tests: of a typical block, and of the whole run.
        tests = sum(1 + (item.p_inferior_whole is not None) for item in gated)
        smallest = min(item.p_inferior for item in gated)
        assert min(item.p_inferior_holm for item in gated) == pytest.approx(min(1.0, tests * smallest))

    def test_another_quantile_joins_the_five(self, tmp_path):
        gates = {"quantiles": [0.75], "margins": {"e2e": 0.3}}
        found = comparisons(run_of(tmp_path, FakeRun(duration_s=120, rate=2, gates=gates)))
        assert [(item.metric, item.quantile, item.margin) for item in found.gated] == [
            ("ttft", 0.75, 0.1),
            ("e2e", 0.75, 0.3),
        ]
        assert {item.quantile for item in found.beside} == {*QUANTILES, 0.75}

    def test_what_stands_beside_does_not_change_the_draws_of_a_gate(self, run, found):
        assert [item.p_inferior for item in judge_quantiles(run, "compiled", "e2e", "steady", qs=(0.99,))] == [
            item.p_inferior_whole for item in found.gated if item.metric == "e2e"
        ]


class TestPhases:
    def test_steady_and_cold_share_no_request(self, run):
        steady, cold, everything = (compared(run, "compiled", "e2e", phase)[0] for phase in PHASES)
        assert len(steady) + len(cold) == len(everything)
        assert set(cold.block.tolist()) == {0}

    def test_a_compile_takes_its_requests_from_both_arms(self, tmp_path):
        naive = FakeArm(name="naive", compiles=[Compile(at_s=100, seconds=10)])
        run = run_of(tmp_path, FakeRun(arms=(EAGER, naive), duration_s=300, rate=2))
        mine, theirs = compared(run, "naive", "e2e", "steady")
        assert len(mine) == len(theirs) < len(compared(run, "naive", "e2e", "all")[0])
        assert mine.values.max() < 9000

    def test_a_request_and_its_copy_go_together(self, tmp_path):
        def lose(rows):
            return [row for place, row in enumerate(rows) if row["arm"] == "eager" or place % 3]

        run = run_of(tmp_path, edit=lose)
        mine, theirs = compared(run, "compiled", "ttft", "all")
        assert len(mine) == len(theirs) < int(run.of_arm("eager").sum())

    def test_a_metric_that_one_copy_lacks_is_compared_without_both(self, tmp_path):
        def single(rows):
            short = {"output_tokens": 1}
            return [row | (short if row["arm"] == "eager" and place % 2 else {}) for place, row in enumerate(rows)]

        run = run_of(tmp_path, edit=single)
        mine, theirs = compared(run, "compiled", "tpot", "all")
        assert len(mine) == len(theirs) < len(compared(run, "compiled", "e2e", "all")[0])


class TestTokenGaps:
    def test_a_gap_is_in_the_block_in_which_it_ended(self, tmp_path):
        """A request due at 25 s pauses after its first token until 65 s: that gap is of the third block."""

        def pause(rows):
            for row in rows:
                since = (row["scheduled_ns"] - rows[0]["scheduled_ns"]) / SECOND
                if row["arm"] == "compiled" and 20 < since < 25:
                    row["token_ns"] = [row["token_ns"][0], row["token_ns"][0] + 40 * SECOND]
                    row["end_ns"] = row["sent_ns"] + row["token_ns"][-1]
                    row["output_tokens"] = 2
            return rows

        run = run_of(tmp_path, edit=pause)
        mine, _ = compared(run, "compiled", "itl", "all")
        long = mine.values > 30_000
        assert long.sum() > 3
        assert set(mine.block[long].tolist()) == {2}
        own, _ = compared(run, "compiled", "max_itl", "all")
        assert set(own.block[own.values > 30_000].tolist()) == {0}

    def test_gaps_are_pooled_over_requests(self, run):
        mine, theirs = compared(run, "compiled", "itl", "all")
        tokens = run.requests.output_tokens[run.of_arm("compiled")]
        assert len(mine) == len(theirs) == int((tokens - 1).sum())

    def test_what_ends_after_the_trial_is_in_its_last_block(self, run):
        trial = run.trials[0]
        at = np.array([trial.start_ns, trial.start_ns + 10_000 * SECOND, trial.start_ns - SECOND])
        assert blocks_at(run, np.ones(3, dtype=np.int64), at).tolist() == [0, trial.blocks - 1, 0]


def test_a_slower_arm_is_slower_at_every_quantile(tmp_path):
    run = run_of(tmp_path, FakeRun(arms=(EAGER, FakeArm(name="compiled", ratio=1.5)), duration_s=300, rate=2))
    for metric in JUDGED_METRICS:
        for item in judge_quantiles(run, "compiled", metric, "all", qs=(0.5, 0.9)):
            assert item.ratio == pytest.approx(1.5, rel=0.15)


def test_a_few_blocks_set_no_limits_rather_than_endless_ones(tmp_path):
    naive = FakeArm(name="naive", compiles=[Compile(at_s=5, seconds=12)])
    gates = {"alpha": 0.0001, "cold_s": 60}
    found = comparisons(run_of(tmp_path, FakeRun(arms=(EAGER, naive), duration_s=95, rate=3, gates=gates)))
    cold = [item for item in found.beside if item.phase == "cold"]
    assert max(item.blocks for item in cold) <= 3
    assert any(item.low is None and item.high is None for item in cold)
    assert all(item.high is None or item.high < 1000 * item.ratio for item in cold)


def test_no_data_is_compared_with_a_reason(tmp_path):
    run = run_of(tmp_path, edit=lambda rows: [row for row in rows if row["arm"] == "eager"])
    found = comparisons(run)
    assert {item.verdict for item in (*found.gated, *found.beside)} <= {"INCONCLUSIVE"}
    assert all("cannot be compared" in item.reason for item in (*found.gated, *found.beside))


def test_the_same_seed_gives_the_same_comparisons(run, found):
    assert comparisons(run) == found
    assert json.dumps([item.low for item in found.beside]) != "[]"
