"""What each trial of a run says: latencies with their luck, compiles, start-up, memory and energy."""

import json
import math
from pathlib import Path

import pytest

from analysis.records.run_records import read_run
from analysis.records.schemas import BED
from analysis.records.tables import RecordWriter
from analysis.releases.run_figures import ArmFigures, arm_figures
from analysis.run.run import Run
from tests.fakes.runs import EAGER, SECOND, Compile, FakeArm, FakeRun, start_of, write_run

NAIVE = FakeArm(name="naive", compiles=(Compile(at_s=60.0, seconds=4.0), Compile(at_s=90.0, seconds=2.0)))
RUN = FakeRun(arms=(EAGER, NAIVE), trials=2, duration_s=180, slo={"p99_e2e_ms": 5000})


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


def test_every_trial_has_its_latencies_and_how_far_its_traffic_moved_them(tmp_path: Path) -> None:
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


def test_tail_of_few_requests_has_no_luck_that_is_known(tmp_path: Path) -> None:
    few = FakeRun(arms=(EAGER, NAIVE), duration_s=60, rate=1.0)
    value, luck = figures(write_run(tmp_path / "run", few)).values["p99_e2e_ms"][1]
    assert value > 0
    assert luck.spread is None


def test_one_block_cannot_say_how_blocks_differ(tmp_path: Path) -> None:
    short = FakeRun(arms=(EAGER, NAIVE), duration_s=30, rate=20.0)
    assert figures(write_run(tmp_path / "run", short)).values["p50_tpot_ms"][1][1].spread is None


def test_compiles_are_counted_at_the_start_and_while_serving(tmp_path: Path) -> None:
    own = figures(write_run(tmp_path / "run", RUN)).values
    assert own["warmup_compiles"][1][0] == 1.0
    assert own["recompiles"][2][0] == 2.0
    assert own["serving_compile_s"][1][0] == pytest.approx(6.0)
    assert own["compile_s"][1][0] == pytest.approx(5.0)
    assert own["startup_s"][1][0] == pytest.approx(3.0)


def test_run_without_telemetry_says_nothing_of_compiles(tmp_path: Path) -> None:
    blind = FakeRun(arms=(EAGER, NAIVE), duration_s=60, telemetry=False)
    assert "recompiles" not in figures(write_run(tmp_path / "run", blind)).values


def test_memory_is_that_of_samples_where_every_trial_has_them(tmp_path: Path) -> None:
    arm = FakeArm(name="naive", memory_bytes={"process_peak": 600, "device_peak": 50})
    directory = write_run(tmp_path / "run", FakeRun(arms=(EAGER, arm), trials=2, duration_s=60))
    told = figures(directory)
    assert told.values["process_peak_bytes"][1][0] == 600.0
    assert told.sources["process_peak_bytes"] == "replicas"
    for trial in (1, 2):
        sample = {"kind": "process", "name": "naive-0", "arm": "naive"}
        bed(directory, trial, watched(sample, "memory_bytes", 901, 905, 903, trial=trial))
    sampled = figures(directory)
    assert sampled.values["process_peak_bytes"][2][0] == 905.0
    assert sampled.sources == {"process_peak_bytes": "process samples", "device_peak_bytes": "replicas"}


def test_host_memory_of_an_arm_on_a_card_is_that_of_its_engine_alone(tmp_path: Path) -> None:
    """Compile workers share most of their pages, which the sum over a family counts once for each."""
    directory = write_run(tmp_path / "run", FakeRun(arms=(EAGER, NAIVE), duration_s=60))
    family = {"kind": "process", "name": "naive-0", "arm": "naive"}
    whole = watched(family, "memory_bytes", 18_000, 18_000)
    bed(directory, 1, whole)
    devices(directory, eager="cuda:0", naive="cuda:1")
    assert "process_peak_bytes" not in figures(directory).values
    bed(directory, 1, [*whole, *watched(family | {"kind": "allocator"}, "memory_bytes", 900, 900)])
    own = figures(directory)
    assert own.values["process_peak_bytes"][1][0] == 900.0
    assert own.sources["process_peak_bytes"] == "allocator samples"


def test_samples_of_one_trial_alone_do_not_mix_with_what_replicas_say(tmp_path: Path) -> None:
    arm = FakeArm(name="naive", memory_bytes={"process_peak": 600})
    directory = write_run(tmp_path / "run", FakeRun(arms=(EAGER, arm), trials=2, duration_s=60))
    bed(directory, 1, watched({"kind": "process", "name": "naive-0", "arm": "naive"}, "memory_bytes", 900, 900))
    own = figures(directory)
    assert [value for value, _ in own.values["process_peak_bytes"].values()] == [600.0, 600.0]


ALLOCATOR = {"kind": "allocator", "arm": "naive"}


def test_peaks_of_replicas_add_up(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", FakeRun(arms=(EAGER, NAIVE), duration_s=60))
    replicas(directory, "naive-0", "naive-1")
    one = watched(ALLOCATOR | {"name": "naive-0"}, "peak_bytes", 100, 120)
    bed(directory, 1, one + watched(ALLOCATOR | {"name": "naive-1"}, "peak_bytes", 80, 80))
    assert figures(directory).values["device_peak_bytes"][1][0] == 200.0


@pytest.mark.parametrize("second", [[], [80], [None, None]])
def test_replica_that_was_not_watched_through_the_traffic_leaves_no_sum(tmp_path: Path, second) -> None:
    directory = write_run(tmp_path / "run", FakeRun(arms=(EAGER, NAIVE), duration_s=60))
    replicas(directory, "naive-0", "naive-1")
    other = watched(ALLOCATOR | {"name": "naive-1"}, "peak_bytes", *second)
    bed(directory, 1, watched(ALLOCATOR | {"name": "naive-0"}, "peak_bytes", 100, 120) + other)
    assert "device_peak_bytes" not in figures(directory).values


def test_memory_from_before_the_traffic_is_not_its_peak(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", FakeRun(arms=(EAGER, NAIVE), duration_s=60))
    sample = {"kind": "process", "name": "naive-0", "arm": "naive"}
    early = sample | {"at_ns": start_of(1) - SECOND, "memory_bytes": 2000}
    bed(directory, 1, [early, *watched(sample, "memory_bytes", 900, 900)])
    assert figures(directory).values["process_peak_bytes"][1][0] == 900.0


def replicas(directory: Path, *names: str) -> None:
    path = directory / "trial-01" / "trial.json"
    info = json.loads(path.read_text())
    for arm in info["arms"]:
        arm["replicas"] = [name for name in names if name.startswith(arm["name"])]
    path.write_text(json.dumps(info))


def devices(directory: Path, **of_arm: str) -> None:
    path = directory / "trial-01" / "trial.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"devices": of_arm}))


def test_energy_of_a_card_of_its_own_is_shared_out_over_its_tokens(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", FakeRun(arms=(EAGER, NAIVE), duration_s=60))
    start = start_of(1)
    rows = [
        {"kind": "device", "name": "cuda:1", "at_ns": start + second * SECOND, "power_w": 50.0}
        | ({"energy_j": 1000.0 + 50.0 * second} if second % 10 == 0 else {})
        for second in range(-30, 90)
    ]
    bed(directory, 1, rows)
    devices(directory, eager="cuda:0", naive="cuda:1")
    run = Run.of(read_run(directory))
    own = run.of_arm("naive")
    tokens, end_ns = int(run.requests.output_tokens[own].sum()), int(run.requests.end_ns[own].max())
    joules = 50.0 * (max(end_ns - start, 60 * SECOND) / SECOND)
    assert figures(directory).values["energy_per_token_j"][1][0] == pytest.approx(joules / tokens)
    assert "energy_per_token_j" not in figures(directory, "eager").values
    devices(directory, eager="cuda:1", naive="cuda:1")
    assert "energy_per_token_j" not in figures(directory).values


def test_energy_of_a_card_that_tells_its_power_alone_is_not_laid_beside_a_count(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", FakeRun(arms=(EAGER, NAIVE), duration_s=60))
    moments = [start_of(1) + second * SECOND for second in range(-30, 90)]
    bed(directory, 1, [{"kind": "device", "name": "cuda:1", "at_ns": at, "power_w": 50.0} for at in moments])
    devices(directory, eager="cuda:0", naive="cuda:1")
    assert "energy_per_token_j" not in figures(directory).values


def test_luck_of_a_quantile_is_about_its_scatter_over_trials(tmp_path: Path) -> None:
    quiet = FakeRun(arms=(EAGER, FakeArm(name="naive")), trials=8, duration_s=300, drift=0.0, own_drift=0.0)
    trials = figures(write_run(tmp_path / "run", quiet)).values["p50_e2e_ms"]
    logs = [math.log(value) for value, _ in trials.values()]
    mean = sum(logs) / len(logs)
    scatter = math.sqrt(sum((item - mean) ** 2 for item in logs) / (len(logs) - 1))
    spreads = [luck.spread for _, luck in trials.values() if luck.spread is not None]
    assert len(spreads) == len(logs)
    assert 0.4 < sum(spreads) / len(spreads) / scatter < 2.5


def test_share_of_errors_has_the_luck_of_its_requests(tmp_path: Path) -> None:
    faulty = FakeRun(arms=(EAGER, FakeArm(name="naive", error_share=0.2)), duration_s=180)
    directory = write_run(tmp_path / "run", faulty)
    value, luck = figures(directory).values["error_pct"][1]
    assert 10.0 < value < 30.0
    assert luck.spread is not None
    assert 0.01 < luck.spread < 0.3
    none, unsure = figures(directory, "eager").values["error_pct"][1]
    assert (none, unsure.spread is not None and unsure.spread > 1.0) == (0.0, True)
