"""Calibration: halves of the control, blocks, restarts, and the verdict in words."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from analysis.foresight.calibration import (
    Calibration,
    Halves,
    Restarts,
    Share,
    _verdict,
    calibrate,
    compared_halves,
    control_values,
    first_half,
    made_slower,
    restarts_of,
)
from analysis.records.export import export
from analysis.records.run_records import read_run
from analysis.records.tables import RecordError
from analysis.run.run import Run
from analysis.statistics.compare import Sample, compare_quantiles, compare_typical
from tests.analysis.judging.test_load_steps import write_search
from tests.fakes.machines import FakeBed, Trouble
from tests.fakes.runs import EAGER, FakeArm, FakeRun, write_run

QUICK = {"draws": 99, "metrics": ["e2e"]}


def run_of(directory: Path, run: FakeRun) -> Run:
    return Run.of(read_run(write_run(directory, run)))


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_of(tmp_path_factory.mktemp("long") / "run", FakeRun(duration_s=690, rate=6.0, gates=QUICK))


@pytest.fixture(scope="module")
def calibrated(long_run: Run) -> Calibration:
    return calibrate(long_run, splits=30)


def test_a_half_made_slower_is_judged_like_slower_latencies(long_run: Run) -> None:
    material = control_values(long_run, "e2e")
    rng = np.random.default_rng(3)
    for _ in range(4):
        chosen = first_half(long_run, material, "at random", rng)
        (plain,) = compared_halves(long_run, "e2e", material, chosen, np.random.default_rng(9))
        half = material.sample.only(chosen)
        slow = Sample(values=half.values * 1.2, block=half.block, trial=half.trial)
        whole = compare_quantiles(
            slow,
            material.sample.only(~chosen),
            qs=(0.99,),
            margin=plain.margin,
            alpha=plain.alpha,
            draws=long_run.limits.draws,
            rng=np.random.default_rng(9),
            paired=False,
            restart_spread=0.0,
        )
        (really,) = compare_typical(slow, material.sample.only(~chosen), whole=whole, restart_spread=0.0)
        derived = made_slower(plain, 1.2)
        for one, other in ((derived.ratio, really.ratio), (derived.low, really.low), (derived.high, really.high)):
            assert one == pytest.approx(other, rel=0.01)


@pytest.mark.parametrize(("sessions", "units"), [(7, 14), (None, None)])
def test_a_session_is_never_split(tmp_path: Path, sessions: int | None, units: int | None) -> None:
    records = read_run(write_run(tmp_path / "run", FakeRun(duration_s=60, trials=2, gates=QUICK)))
    index = records.requests.schema.get_field_index("session_id")
    names = [None if sessions is None else f"s{row % sessions}" for row in range(records.requests.num_rows)]
    field = records.requests.schema.field(index)
    table = records.requests.set_column(index, field, pa.array(names, field.type))
    run = Run.of(replace(records, requests=table))
    material = control_values(run, "e2e")
    assert len(np.unique(material.unit)) == (units or len(material.unit))
    chosen = first_half(run, material, "at random", np.random.default_rng(1))
    for unit in np.unique(material.unit):
        assert len(set(chosen[material.unit == unit].tolist())) == 1
    assert 0 < chosen.sum() < len(chosen)


def share(count: int, of: int = 100) -> Share:
    return Share.of_splits([True] * count + [False] * (of - count))


GOOD = Halves(
    metric="e2e",
    quantile=0.99,
    how="at random",
    effect=1.0,
    requests=2000,
    blocks=25,
    slower=share(5),
    faster=share(4),
    covered=share(91),
    passed=share(60),
    untested=0,
)


@pytest.mark.parametrize(
    ("change", "trust", "said"),
    [
        ({}, "trustworthy", ""),
        ({"slower": share(20)}, "do not trust", "20 of 100 equal halves"),
        ({"faster": share(20)}, "do not trust", "called faster"),
        ({"covered": share(60)}, "do not trust", "60 of 100 splits"),
        ({"slower": share(12)}, "too few data to say", "more splits will tell"),
        ({"blocks": 17}, "too few data to say", "17 steady blocks; 18"),
        ({"requests": 499}, "too few data to say", "499 values"),
        ({"slower": share(0, 5), "untested": 95}, "too few data to say", "Only 5 of 100"),
        ({"slower": share(0, 0), "faster": share(0, 0), "covered": share(0, 0)}, "too few data to say", "Only 0 of"),
        ({"effect": 1.2, "slower": share(100), "covered": share(90)}, "trustworthy", ""),
    ],
)
def test_the_verdict_follows_from_what_was_counted(
    long_run: Run, change: dict[str, object], trust: str, said: str
) -> None:
    found, reasons = _verdict(long_run, [replace(GOOD, **change)], [], [])  # type: ignore[arg-type]
    assert found == trust
    assert said in " ".join(reasons)


def test_starts_that_differ_more_than_blocks_are_a_doubt_below_six_trials(long_run: Run) -> None:
    apart = Restarts(arm="new", metric="e2e", quantile=0.99, trials=3, between=0.2, within=0.02, p_value=0.001)
    trust, reasons = _verdict(long_run, [GOOD], [apart], [])
    assert trust == "do not trust"
    assert "100.0 times" in reasons[0]
    assert "6 trials" in reasons[0]
    six = replace(long_run, trials=long_run.trials * 6)
    assert _verdict(six, [GOOD], [apart], [])[0] == "trustworthy"


@pytest.mark.parametrize(("trials", "doubted"), [(2, True), (6, False)])
def test_a_drift_that_trials_differ_by_is_a_doubt_below_six_trials(tmp_path: Path, trials: int, doubted: bool) -> None:
    bed = FakeBed(card_noise=0.0, host_noise=0.0, troubles=(Trouble(what="slow_after", size=0.8),))
    run = run_of(tmp_path / "run", FakeRun(duration_s=120, rate=2.0, trials=trials, gates=QUICK, bed=bed))
    assert any("% slower" in reason for reason in calibrate(run, splits=5).reasons) is doubted


def test_the_variance_between_trials_is_compared_with_that_within() -> None:
    alike = [(value, 0.01**2, 4.0) for value in (0.01, -0.005, 0.0, 0.004)]
    apart = [(value * 20, variance, degrees) for value, variance, degrees in alike]
    calm, wild = (restarts_of("new", "e2e", 0.99, found) for found in (alike, apart))
    assert wild.between == pytest.approx(20 * calm.between)
    assert calm.within == wild.within == pytest.approx(0.01)
    assert (calm.p_value or 0) > 0.3
    assert (wild.p_value or 1) < 0.001
    still = restarts_of("new", "e2e", 0.99, [(0.0, 0.0, 1.0), (0.1, 0.0, 1.0)])
    assert (still.p_value, still.ratio) == (None, None)


def test_a_check_that_doubts_the_statistics_is_reported(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", FakeRun(duration_s=60, lag_ms=400.0, gates=QUICK))
    found = calibrate(run, splits=5)
    assert found.trust == "do not trust"
    assert any("were sent 400.0 ms late" in reason for reason in found.reasons)


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_every_form_of_records_calibrates_alike(tmp_path: Path, form: str) -> None:
    folder = write_run(tmp_path / "run", FakeRun(duration_s=60, gates=QUICK))
    other = tmp_path / form / "run"
    other.parent.mkdir()
    export(folder, other, form=form, tables=["requests", "steps", "compile_events"])
    assert calibrate(Run.of(read_run(other)), splits=5) == calibrate(Run.of(read_run(folder)), splits=5)


@pytest.mark.parametrize(
    "arms",
    [
        (EAGER, FakeArm(name="compiled", weight=0.0)),
        (EAGER, FakeArm(name="compiled", error_share=1.0)),
        (replace(EAGER, error_share=1.0), FakeArm(name="compiled")),
    ],
)
def test_missing_and_failed_arms_are_never_trustworthy(tmp_path: Path, arms: tuple[FakeArm, ...]) -> None:
    run = run_of(tmp_path / "run", FakeRun(duration_s=60, design="split", arms=arms, gates=QUICK))
    assert calibrate(run, splits=5).trust != "trustworthy"


def test_a_search_for_the_load_is_refused(tmp_path: Path) -> None:
    run = Run.of(read_run(write_search(tmp_path / "run", {"eager": 9, "new": 17}, [[4, 8, 16]])))
    with pytest.raises(RecordError, match="calibrate a run with one steady load"):
        calibrate(run, splits=20)
