"""What each trial of a run says: latencies with their spread, compiles, start-up, memory and energy."""

import json
from pathlib import Path

import pytest

from analysis.records.run_records import read_run
from analysis.records.schemas import BED
from analysis.records.tables import RecordWriter
from analysis.releases.run_figures import ArmFigures, arm_figures
from analysis.run.run import Run
from tests.fakes.resources import tell
from tests.fakes.runs import EAGER, SECOND, Compile, FakeArm, FakeRun, start_of, write_run

NAIVE = FakeArm(name="naive", compiles=(Compile(at_s=60.0, seconds=4.0), Compile(at_s=90.0, seconds=2.0)))
RUN = FakeRun(arms=(EAGER, NAIVE), trials=2, duration_s=180, slo={"p99_e2e_ms": 5000})
MINUTE = FakeRun(arms=(EAGER, NAIVE), duration_s=60, rate=1)
PROCESS = {"kind": "process", "name": "naive-0", "arm": "naive"}


def figures(directory: Path, arm: str = "naive") -> ArmFigures:
    return arm_figures(Run.of(read_run(directory)), arm)


def bed(directory: Path, trial: int, rows: list[dict]) -> None:
    with RecordWriter(directory / f"trial-{trial:02}" / "bed.arrow", BED) as writer:
        for row in rows:
            writer.append({"trial": trial, "host": "run", **row})


def watched(row: dict, column: str, *levels: float | None, trial: int = 1) -> list[dict]:
    """The row again and again through the traffic of a minute, with these levels of the column."""
    step = 58 * SECOND // max(1, len(levels) - 1)
    return [row | {"at_ns": start_of(trial) + SECOND + at * step, column: level} for at, level in enumerate(levels)]


def test_every_trial_has_latencies_with_their_spread_and_compiles(tmp_path: Path) -> None:
    own = figures(write_run(tmp_path / "run", RUN)).values
    for key in ("p50_ttft_ms", "p99_ttft_ms", "p50_tpot_ms", "p99_e2e_ms", "p50_itl_ms"):
        assert set(own[key]) == {1, 2}
    value, luck = own["p50_tpot_ms"][1]
    assert value > 0
    assert luck.spread is not None
    assert 0.005 < luck.spread < 0.3
    assert luck.degrees == 2.0
    good, good_luck = own["good_pct"][1]
    assert 50 < good <= 100
    assert good_luck.spread is not None
    counted = ("warmup_compiles", "recompiles", "serving_compile_s", "compile_s", "startup_s")
    assert [own[key][1][0] for key in counted] == pytest.approx([1.0, 2.0, 6.0, 5.0, 3.0])


def test_few_requests_one_block_and_no_telemetry_leave_figures_unknown(tmp_path: Path) -> None:
    few = figures(write_run(tmp_path / "few", MINUTE)).values
    assert few["p99_e2e_ms"][1][1].spread is None
    short = FakeRun(arms=(EAGER, NAIVE), duration_s=30, rate=20.0, telemetry=False)
    own = figures(write_run(tmp_path / "short", short)).values
    assert own["p50_tpot_ms"][1][1].spread is None
    assert "recompiles" not in own


def test_memory_is_that_of_samples_where_every_trial_has_them(tmp_path: Path) -> None:
    arm = FakeArm(name="naive", memory_bytes={"process_peak": 600, "device_peak": 50})
    directory = write_run(tmp_path / "run", FakeRun(arms=(EAGER, arm), trials=2, duration_s=60, rate=1))
    for trial, peak, source in ((0, 600.0, "replicas"), (1, 600.0, "replicas"), (2, 905.0, "process samples")):
        if trial:
            early = PROCESS | {"at_ns": start_of(trial) - SECOND, "memory_bytes": 2000}  # before the traffic
            bed(directory, trial, [early, *watched(PROCESS, "memory_bytes", 901, 905, 903, trial=trial)])
        own = figures(directory)
        assert [value for value, _ in own.values["process_peak_bytes"].values()] == [peak, peak]
        assert own.sources == {"process_peak_bytes": source, "device_peak_bytes": "replicas"}


def test_host_memory_of_an_arm_on_a_card_is_that_of_its_engine_alone(tmp_path: Path) -> None:
    """Compile workers share most of their pages, which the sum over a family counts once for each."""
    directory = tell(write_run(tmp_path / "run", MINUTE), devices={"eager": "cuda:0", "naive": "cuda:1"})
    whole = watched(PROCESS, "memory_bytes", 18_000, 18_000)
    bed(directory, 1, whole)
    assert "process_peak_bytes" not in figures(directory).values
    bed(directory, 1, [*whole, *watched(PROCESS | {"kind": "allocator"}, "memory_bytes", 900, 900)])
    own = figures(directory)
    assert own.values["process_peak_bytes"][1][0] == 900.0
    assert own.sources["process_peak_bytes"] == "allocator samples"


@pytest.mark.parametrize(("second", "total"), [([80, 80], 200.0), ([], None), ([80], None), ([None, None], None)])
def test_peaks_of_replicas_add_up_where_each_was_watched(tmp_path: Path, second: list, total: float | None) -> None:
    directory = write_run(tmp_path / "run", MINUTE)
    path = directory / "trial-01" / "trial.json"
    info = json.loads(path.read_text())
    for arm in info["arms"]:
        arm["replicas"] = ["naive-0", "naive-1"] if arm["name"] == "naive" else []
    path.write_text(json.dumps(info))
    rows = watched(PROCESS | {"kind": "allocator"}, "peak_bytes", 100, 120)
    bed(directory, 1, rows + watched(PROCESS | {"kind": "allocator", "name": "naive-1"}, "peak_bytes", *second))
    assert figures(directory).values.get("device_peak_bytes", {1: (None,)})[1][0] == total


def test_energy_of_a_card_of_its_own_is_divided_by_its_tokens(tmp_path: Path) -> None:
    directory = tell(write_run(tmp_path / "run", MINUTE), devices={"eager": "cuda:0", "naive": "cuda:1"})
    start = start_of(1)
    rows = [
        {"kind": "device", "name": "cuda:1", "at_ns": start + second * SECOND, "power_w": 50.0}
        | ({"energy_j": 1000.0 + 50.0 * second} if second % 10 == 0 else {})
        for second in range(-30, 90)
    ]
    bed(directory, 1, rows)
    run = Run.of(read_run(directory))
    own = run.of_arm("naive")
    tokens, end_ns = int(run.requests.output_tokens[own].sum()), int(run.requests.end_ns[own].max())
    joules = 50.0 * (max(end_ns - start, 60 * SECOND) / SECOND)
    assert figures(directory).values["energy_per_token_j"][1][0] == pytest.approx(joules / tokens)
    assert "energy_per_token_j" not in figures(directory, "eager").values
    tell(directory, devices={"eager": "cuda:1", "naive": "cuda:1"})
    assert "energy_per_token_j" not in figures(directory).values


def test_a_share_of_errors_has_the_spread_of_its_requests(tmp_path: Path) -> None:
    faulty = FakeRun(arms=(EAGER, FakeArm(name="naive", error_share=0.2)), duration_s=180)
    directory = write_run(tmp_path / "run", faulty)
    value, luck = figures(directory).values["error_pct"][1]
    assert 10.0 < value < 30.0
    assert luck.spread is not None
    assert 0.01 < luck.spread < 0.3
    none, unsure = figures(directory, "eager").values["error_pct"][1]
    assert (none, unsure.spread is not None and unsure.spread > 1.0) == (0.0, True)
