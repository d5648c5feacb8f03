"""What the records say of each machine during the traffic, and what they leave open."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pytest

from analysis.records.run_records import read_run
from analysis.records.schemas import BED
from analysis.run.run import Run
from analysis.run.test_bed import TestBed as Bed
from tests.fakes.beds import FakeBed
from tests.fakes.runs import FakeRun, write_run


def bed_of(folder, bed, *, samples=None, info=None, **more):
    """The test bed of a run of one minute, with other samples or another trial.json where given."""
    fake = FakeRun(bed=bed, duration_s=60.0, rate=1.0, telemetry=False, **more)
    records = read_run(write_run(folder / "run", fake))
    if samples is not None:
        records = replace(records, bed=samples)
    if info is not None:
        records = replace(records, trials=tuple({**trial, **info} for trial in records.trials))
    return Bed.of(Run.of(records))


def rows(*given):
    return pa.Table.from_pylist([{"trial": 1, "host": "run", **row} for row in given], schema=BED)


START = 1_700_000_000_000_000_000 + 100_000 * 1_000_000_000


def at(second, **row):
    return {"at_ns": START + int(second * 1e9), **row}


def test_samples_outside_the_traffic_do_not_count(tmp_path):
    device = {"kind": "device", "name": "cuda:0", "utilisation_pct": 50}
    samples = rows(
        *(at(second, **device, sm_mhz=1980, throttle=[]) for second in range(1, 61)),
        *(at(second, **device, sm_mhz=345, throttle=["hw_slowdown"]) for second in (-5, 0, 65)),
    )
    (seen,) = bed_of(tmp_path, FakeBed(), samples=samples).devices
    assert (seen.sm_mhz.low, seen.throttle_s, seen.seconds) == (1980, 0.0, 60.0)
    assert seen.locked is False  # it moved, if not during the traffic


def test_a_gap_in_the_samples_was_not_watched(tmp_path):
    device = {"kind": "device", "name": "cuda:0", "foreign_processes": 1}
    samples = rows(*(at(second, **device) for second in (1, 2, 3, 40, 41)))
    (seen,) = bed_of(tmp_path, FakeBed(), samples=samples).devices
    assert (seen.seconds, seen.foreign_s) == (5.0, 5.0)


@pytest.mark.parametrize(
    ("reasons", "throttled"),
    [
        (["gpu_idle", "applications_clocks_setting", "display_clock_setting"], {}),
        (["hw_slowdown", "hw_thermal_slowdown"], {"hw_slowdown": 1.0, "hw_thermal_slowdown": 1.0}),
    ],
)
def test_reasons_of_throttling_count_once_a_second_and_idle_is_none(tmp_path, reasons, throttled):
    (seen,) = bed_of(tmp_path, FakeBed(), samples=rows(at(1, kind="device", name="cuda:0", throttle=reasons))).devices
    assert (dict(seen.throttled_s), seen.throttle_s) == (throttled, 1.0 if throttled else 0.0)


def test_counters_that_start_again_lose_what_they_lost_and_no_more(tmp_path):
    counted = zip(range(1, 7), (10.0, 11.0, 12.0, 0.0, 1.0, 2.0), strict=True)
    samples = rows(*(at(second, kind="host", name="run", cpus=4, steal_s=stolen) for second, stolen in counted))
    (seen,) = bed_of(tmp_path, FakeBed(), samples=samples).hosts
    assert seen.steal == pytest.approx(0.25)


def test_what_is_not_of_the_run_is_the_hosts_time_less_its_own(tmp_path):
    samples = rows(
        *(at(second, kind="host", name="run", cpus=8, cpu_s=5.0 * second) for second in range(1, 11)),
        *(at(second, kind="process", name="eager-0", cpu_s=2.0 * second) for second in range(1, 11)),
        *(at(second, kind="process", name="load", cpu_s=1.0 * second) for second in range(1, 11)),
    )
    (seen,) = bed_of(tmp_path, FakeBed(), samples=samples).hosts
    assert (seen.busy, seen.foreign) == (pytest.approx(5 / 8), pytest.approx(2 / 8))
    alone = samples.slice(0, 10)
    assert bed_of(tmp_path, FakeBed(), samples=alone).hosts[0].foreign is None


def test_null_columns_leave_everything_unknown(tmp_path):
    kinds = ("host", "device", "process", "allocator", "something new")
    samples = rows(*(at(second, kind=kind, name="x") for second in range(1, 5) for kind in kinds))
    bed = bed_of(tmp_path, FakeBed(), samples=samples)
    (device,), (host,), (process,) = bed.devices, bed.hosts, bed.processes
    assert (device.throttled_s, device.foreign_s, device.sm_mhz, device.locked) == (None, None, None, None)
    assert (host.steal, host.foreign, host.pressure_cpu, process.cores) == (None, None, None, None)


@pytest.mark.parametrize(
    ("asked", "cards", "placed"),
    [("auto", 2, "cuda:0"), ("auto", 0, "cpu"), ("cuda", 2, "cuda:0"), ("cuda:1", 2, "cuda:1"), ("cpu", 2, "cpu")],
)
def test_an_arm_sits_where_its_device_is_resolved_to(tmp_path, asked, cards, placed):
    bed = bed_of(tmp_path, FakeBed(cards=cards), info={"devices": {"eager": asked}})
    assert bed.placed == {1: {"eager": placed}}


def test_speed_is_the_mean_of_before_and_after_and_more_is_faster(tmp_path):
    def reference(when, matmul, python):
        return {"host": "run", "device": "cuda:0", "when": when, "matmul_tflops": matmul, "python_ms": python}

    slow = [reference("before", 400.0, 20.0), reference("after", 400.0, 20.0)]
    fast = [reference("before", 800.0, 10.0), {**reference("after", 800.0, 10.0), "matmul_tflops": None}]
    speeds = [
        [bed_of(tmp_path / name, FakeBed(), info={"references": pair}).speed(1, "cuda:0", figure) for figure in FIGURES]
        for name, pair in (("slow", slow), ("fast", fast))
    ]
    assert [b - a for a, b in zip(*speeds, strict=True)] == [pytest.approx(0.6931, abs=1e-3)] * 2


FIGURES = ("matmul_tflops", "python_ms")


def test_a_figure_of_smaller_work_is_not_compared(tmp_path):
    rows = [
        {"device": f"cuda:{card}", "when": when, "read_gb_per_s": 4200.0, "python_ms": 10.0, "read_bytes": 1 << 32}
        for card in (0, 1)
        for when in ("before", "after")
    ]
    rows[3] |= {"read_gb_per_s": 3000.0, "read_bytes": 1 << 28}
    bed = bed_of(tmp_path, FakeBed(), info={"references": rows})
    assert [dict(row.figures) for row in bed.references][2:] == [
        {"read_gb_per_s": 4200.0, "python_ms": 10.0},
        {"python_ms": 10.0},
    ]


def test_a_card_is_known_by_its_own_number_over_trials(tmp_path):
    bed = bed_of(tmp_path, FakeBed(), trials=2)
    assert {(device.trial, device.name): device.card.identity for device in bed.devices}[2, "cuda:1"] == "GPU-1"
    assert {device.name: device.arms for device in bed.devices if device.trial == 2} == {
        "cuda:0": ("compiled",),
        "cuda:1": ("eager",),
    }
