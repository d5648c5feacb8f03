"""Mean, standard deviation and coefficient of variation over trials, and what is flagged."""

from __future__ import annotations

import math

import pytest

from analysis.records.run_records import read_run
from analysis.run.run import Run
from analysis.run.test_bed import TestBed as Bed
from analysis.run.variation import variation_of, variations
from tests.fakes.beds import FakeBed, Trouble
from tests.fakes.runs import FakeRun, write_run


def test_one_trial_shows_nothing_of_the_variation():
    row = variation_of("eager", "p99_ttft_ms", [12.0])
    assert (row.n, row.mean, row.sd, row.cv, row.flagged) == (1, 12.0, None, None, False)


def test_the_standard_deviation_is_that_of_a_sample():
    row = variation_of("eager", "p99_ttft_ms", [90.0, 110.0])
    assert (row.mean, row.sd, row.cv) == (100.0, pytest.approx(14.142, abs=1e-3), pytest.approx(0.14142, abs=1e-5))
    assert row.flagged


@pytest.mark.parametrize(("values", "flagged"), [([100.0, 106.0], False), ([100.0, 108.0], True)])
def test_more_than_five_per_cent_is_flagged(values, flagged):
    assert variation_of("eager", "x", values).flagged is flagged


def test_trials_without_a_value_are_left_out():
    assert variation_of("eager", "x", [None, math.nan, 3.0]).n == 1
    assert (variation_of("eager", "x", [None]).mean, variation_of("eager", "x", [0.0, 0.0]).cv) == (None, None)


def test_every_figure_of_arms_and_machines_has_its_variation(tmp_path):
    troubled = FakeBed(troubles=(Trouble(what="slow", place="cuda:1", size=0.8, trials=(2,)),))
    fake = FakeRun(bed=troubled, trials=2, duration_s=60.0, rate=2.0, slo={"p99_e2e_ms": 6000})
    run = Run.of(read_run(write_run(tmp_path / "run", fake)))
    found = {(row.of, row.figure): row for row in variations(run, Bed.of(run))}
    for arm in ("eager", "compiled"):
        latencies = [f"{q}_{metric}_ms" for q in ("p50", "p99") for metric in ("ttft", "e2e", "tpot", "itl")]
        for figure in (*latencies, "goodput_rps", "output_tokens_per_s", "decode_step_ms", "startup_s"):
            assert found[arm, figure].n == 2, figure
    assert found["eager", "decode_step_ms"].mean == pytest.approx(10.0)
    assert found["eager", "startup_s"].mean == pytest.approx(3.0)
    assert not found["cuda:0", "matmul_tflops"].flagged
    assert found["cuda:1", "matmul_tflops"].flagged
    assert found["cuda:1", "sm_mhz"].mean == 1980
