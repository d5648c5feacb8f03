"""Comparisons of latency and of rates, paired, by trial and between separate arms."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from tailgate.analysis.judging import comparisons as comparisons_module
from tailgate.analysis.judging.comparisons import QUANTILES, compared, comparisons, samples_of, steady_rows
from tailgate.analysis.run import pairs as pairs_module
from tailgate.analysis.run.pairs import drawn
from tailgate.analysis.run.trials import SECOND
from tailgate.analysis.settings.metrics import JUDGED_METRICS
from tailgate.analysis.statistics.compare import Comparison, Sample, decide
from tailgate.analysis.statistics.unpaired import compare_separate
from tests.fakes.request_rows import change_rows
from tests.fakes.runs import EAGER, Compile, FakeArm, FakeRun, run_in, write_run

SMALL = FakeRun(duration_s=300, rate=2)


def run_of(path, run=SMALL, edit=None):
    directory = write_run(path / "run", run)
    if edit is not None:
        change_rows(directory / "trial-01" / "requests-0.arrow", edit)
    return run_in(directory)


def samples(run, arm, metric):
    return samples_of(run, metric, steady_rows(run, arm))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return run_of(tmp_path_factory.mktemp("comparisons"))


@pytest.fixture(scope="module")
def found(run):
    return comparisons(run)


def test_interim_evidence_shares_its_error_among_all_gates(run, monkeypatch):
    shared = set()
    monkeypatch.setattr(
        comparisons_module, "with_evidence", lambda _, item, __, *, gates, sooner: (shared.add(gates), (item, None))[1]
    )
    changes = {"sequential": True, "metrics": ("ttft", "e2e", "itl"), "quantiles": (0.5, 0.9, 0.99)}
    comparisons(replace(run, limits=run.limits.model_copy(update=changes)))
    assert shared == {9 * len(run.treatments)}


class TestWhatIsCompared:
    def test_five_latencies_at_five_quantiles(self, found):
        seen = {(item.metric, item.quantile) for item in (*found.gated, *found.secondary)}
        assert seen == {(m, q) for m in JUDGED_METRICS for q in QUANTILES}
        assert len(seen) == len(found.gated) + len(found.secondary)

    def test_ungated_comparisons_have_no_verdict(self, found):
        assert {item.verdict for item in found.secondary} == {"INCONCLUSIVE"}
        assert all("limit of" not in item.reason for item in found.secondary)
        assert all(item.reason.endswith(".") and item.reason.startswith("p") for item in found.secondary)

    def test_failures_are_adjusted_over_arms_and_gated_metrics_alone(self, tmp_path):
        slow = [FakeArm(name=name, ratio=1.5) for name in ("one", "two")]
        gates = {"metrics": ["ttft", "e2e", "tpot"], "quantiles": [0.5, 0.99]}
        gated = comparisons(run_of(tmp_path, FakeRun(arms=(EAGER, *slow), duration_s=300, rate=2, gates=gates))).gated
        assert len(gated) == 2 * 3 * 2
        assert {item.tests for item in gated} == {len(gated)}


class TestSteadyTraffic:
    def test_the_cold_start_is_left_out(self, run):
        steady, _ = samples(run, "compiled", "e2e")
        assert len(steady) == int((run.of_arm("compiled") & run.usable & ~run.cold).sum())
        assert run.cold.any()

    def test_a_compile_takes_its_requests_from_both_arms(self, tmp_path):
        naive = FakeArm(name="naive", compiles=[Compile(at_s=100, seconds=10)])
        run = run_of(tmp_path, FakeRun(arms=(EAGER, naive), duration_s=300, rate=2))
        mine, theirs = samples(run, "naive", "e2e")
        assert len(mine) == len(theirs) < int((run.of_arm("naive") & ~run.cold).sum())
        assert mine.values.max() < 9000

    def test_a_request_and_its_copy_go_together(self, tmp_path):
        def lose(rows):
            return [row for place, row in enumerate(rows) if row["arm"] == "eager" or place % 3]

        run = run_of(tmp_path, edit=lose)
        mine, theirs = samples(run, "compiled", "ttft")
        assert len(mine) == len(theirs) < int((run.of_arm("eager") & ~run.cold).sum())

    def test_a_metric_that_one_copy_lacks_is_compared_without_both(self, tmp_path):
        def single(rows):
            short = {"output_tokens": 1}
            return [row | (short if row["arm"] == "eager" and place % 2 else {}) for place, row in enumerate(rows)]

        run = run_of(tmp_path, edit=single)
        mine, theirs = samples(run, "compiled", "tpot")
        assert len(mine) == len(theirs) < len(samples(run, "compiled", "e2e")[0])

    def test_of_many_requests_some_are_drawn_from_the_whole_run_with_their_copies(self, tmp_path, monkeypatch):
        run = run_of(tmp_path)
        every = steady_rows(run, "compiled")
        monkeypatch.setattr(pairs_module, "MOST_REQUESTS", len(every.treatment) // 4)
        rows = steady_rows(run, "compiled")
        assert rows.paired
        assert np.array_equal(run.requests.pair[rows.treatment], run.requests.pair[rows.control])
        assert len(np.unique(rows.treatment)) == len(rows.treatment) == pytest.approx(len(every.treatment) / 4, rel=0.3)
        starts = run.requests.start_ns
        early = starts[rows.treatment] < np.median(starts[every.treatment])
        assert early.mean() == pytest.approx(0.5, abs=0.15)

    def test_a_copy_is_of_the_same_trial(self, tmp_path):
        run = run_of(tmp_path, replace(SMALL, trials=2))
        requests = run.requests
        ttft_ms = np.where(np.arange(len(requests)) % 50 == 0, np.nan, requests.ttft_ms)
        pair = requests.pair % np.int32((requests.trial == 1).sum())
        again = replace(run, requests=replace(requests, pair=pair, ttft_ms=ttft_ms))
        rows = steady_rows(again, "compiled")
        assert rows.paired
        assert (requests.trial[rows.treatment] == requests.trial[rows.control]).all()
        assert len(rows.treatment) == len(steady_rows(run, "compiled").treatment)
        samples = samples_of(again, "ttft", rows)
        assert 0 < len(samples[0]) < len(rows.treatment)
        assert np.array_equal(*(sample.trial for sample in samples))

    def test_an_arm_with_few_requests_keeps_them_all(self, monkeypatch):
        monkeypatch.setattr(pairs_module, "MOST_REQUESTS", 10_000)
        place, seeded = np.arange(90_000), SimpleNamespace(rng=np.random.default_rng)
        many = place[10_000:]
        mine, theirs = drawn(seeded, place < 8_000), drawn(seeded, place >= 10_000)
        assert len(mine) == 8_000
        assert len(theirs) == pytest.approx(10_000, rel=0.05)
        assert theirs.mean() == pytest.approx(many.mean(), rel=0.05)


class TestTokenGaps:
    def test_a_gap_is_in_the_block_in_which_it_ended(self, tmp_path):

        def pause(rows):
            for row in rows:
                since = (row["scheduled_ns"] - rows[0]["scheduled_ns"]) / SECOND
                if row["arm"] == "compiled" and 35 < since < 40:
                    row["token_ns"] = [row["token_ns"][0], row["token_ns"][0] + 40 * SECOND]
                    row["end_ns"] = row["sent_ns"] + row["token_ns"][-1]
                    row["output_tokens"] = 2
            return rows

        run = run_of(tmp_path, edit=pause)
        mine, _ = samples(run, "compiled", "itl")
        long = mine.values > 30_000
        assert long.sum() > 3
        assert set(mine.block[long].tolist()) == {2}
        own, _ = samples(run, "compiled", "max_itl")
        assert set(own.block[own.values > 30_000].tolist()) == {1}

    def test_requests_that_end_after_the_trial_are_in_its_last_block(self, run):
        trial = run.trials[0]
        at = np.array([trial.start_ns, trial.start_ns + 10_000 * SECOND, trial.start_ns - SECOND])
        assert run.block_of(np.zeros(3, dtype=np.int64), at).tolist() == [0, trial.blocks - 1, 0]


def test_a_slower_arm_is_slower_at_every_quantile(tmp_path):
    run = run_of(tmp_path, FakeRun(arms=(EAGER, FakeArm(name="compiled", ratio=1.5)), duration_s=300, rate=2))
    for metric in JUDGED_METRICS:
        for item in compared(run, "compiled", metric, samples(run, "compiled", metric), (0.5, 0.9)):
            assert item.ratio == pytest.approx(1.5, rel=0.15)


def test_no_data_is_compared_with_a_reason(tmp_path):
    run = run_of(tmp_path, edit=lambda rows: [row for row in rows if row["arm"] == "eager"])
    found = comparisons(run)
    assert {item.verdict for item in (*found.gated, *found.secondary)} <= {"INCONCLUSIVE"}
    assert all("has no error bars: " in item.reason for item in (*found.gated, *found.secondary))


PER_BLOCK, BLOCKS = 120, 22


def sample(
    rng: np.random.Generator, *, ratio: float = 1.0, trials: int = 1, first: int = 0, variance: float = 0.0
) -> Sample:
    """Draw lognormal latencies; each trial differs by its start and its day."""
    moved = ratio * np.exp(rng.normal(0.0, variance, trials))
    values = rng.lognormal(4.0, 0.3, (trials, BLOCKS * PER_BLOCK)) * moved[:, None]
    trial = np.repeat(np.arange(trials) + first, BLOCKS * PER_BLOCK)
    block = np.repeat(np.arange(trials * BLOCKS) + first * BLOCKS, PER_BLOCK)
    return Sample(values=values.ravel(), block=block, trial=trial)


def compare_arms(treatment: Sample, control: Sample, q: float = 0.5) -> Comparison:
    (item,) = compare_separate(
        treatment, control, qs=[q], margin=0.10, alpha=0.05, restart_spread=0.01, day_spread=0.01
    )
    return item


def test_tail_that_blocks_cannot_see_has_no_limits() -> None:
    rng = np.random.default_rng(1)
    few = [
        Sample(values=rng.lognormal(4.0, 0.3, 60), block=np.arange(60) // 3, trial=np.full(60, own)) for own in (1, 2)
    ]
    item = compare_arms(*few, q=0.99)
    assert item.ratio is not None
    assert (item.low, item.high, item.p_noninferior) == (None, None, None)
    assert decide([item])[0].verdict == "INCONCLUSIVE"


def test_arm_without_requests_and_quantile_of_zero_cannot_be_compared() -> None:
    full = sample(np.random.default_rng(1))
    nothing = full.only(np.zeros(len(full), dtype=np.bool_))
    assert compare_arms(full, nothing).obstacle == "the control has no request to compare"
    zero = Sample(values=np.zeros(len(full)), block=full.block, trial=full.trial)
    item = compare_arms(zero, full)
    assert (item.ratio, item.obstacle) == (None, None)
    assert "a quantile is unknown" in decide([item])[0].reason
