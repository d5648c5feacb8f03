"""What the records say of the machines during the traffic: devices, hosts, references."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pyarrow as pa
import pytest

from tailgate.analysis.records.run_records import read_run
from tailgate.analysis.records.schemas import MACHINES
from tailgate.analysis.run.machine_records import MachineRecords, speeds_of
from tailgate.analysis.run.run import Run
from tests.fakes.machines import FakeMachines
from tests.fakes.runs import FakeRun, start_of, write_run


def machines_of(folder, *samples, info=None, cards=2, trials=1):
    """The machines of a run of one minute, with other samples or another trial.json where given."""
    fake = FakeRun(machines=FakeMachines(cards=cards), duration_s=60.0, rate=1.0, telemetry=False, trials=trials)
    records = read_run(write_run(folder / "run", fake))
    if samples:
        rows = [{"trial": 1, "host": "run", **row} for row in samples]
        records = replace(records, machines=pa.Table.from_pylist(rows, schema=MACHINES))
    if info is not None:
        records = replace(records, trials=tuple({**trial, **info} for trial in records.trials))
    return MachineRecords.of(Run.of(records))


def each(seconds, kind="device", name="cuda:0", **row):
    """A sample at each second; callables get the second."""
    return [
        {"at_ns": start_of(1) + int(second * 1e9), "kind": kind, "name": name}
        | {key: value(second) if callable(value) else value for key, value in row.items()}
        for second in seconds
    ]


def test_samples_outside_the_traffic_do_not_count(tmp_path):
    inside = each(range(1, 61), sm_mhz=1980, throttle=[])
    outside = each((-5, 0, 65), sm_mhz=345, throttle=["hw_slowdown"])
    (seen,) = machines_of(tmp_path, *inside, *outside).devices
    assert (seen.mean_mhz, seen.throttle_s, seen.seconds) == (1980, 0.0, 60.0)


def test_a_gap_in_the_samples_was_not_watched(tmp_path):
    (seen,) = machines_of(tmp_path, *each((1, 2, 3, 40, 41), foreign_processes=1)).devices
    assert (seen.seconds, seen.foreign_s) == (5.0, 5.0)


def test_a_counter_that_starts_again_loses_only_what_it_lost(tmp_path):
    stolen = [0.0, 10.0, 11.0, 12.0, 0.0, 1.0, 2.0]
    (seen,) = machines_of(tmp_path, *each(range(1, 7), "host", "run", cpus=4, steal_s=stolen.__getitem__)).hosts
    assert seen.steal == pytest.approx(0.25)


def test_work_of_others_is_the_time_of_the_host_less_that_of_the_run(tmp_path):
    host = each(range(1, 11), "host", "run", cpus=8, cpu_s=lambda second: 5.0 * second)
    own = each(range(1, 11), "process", "eager-0", cpu_s=lambda second: 2.0 * second)
    load = each(range(1, 11), "process", "load", cpu_s=lambda second: 1.0 * second)
    (seen,) = machines_of(tmp_path, *host, *own, *load).hosts
    assert seen.foreign == pytest.approx(2 / 8)
    assert machines_of(tmp_path, *host).hosts[0].foreign is None


def test_null_columns_leave_everything_unknown(tmp_path):
    kinds = ("host", "device", "process", "allocator", "something new")
    found = machines_of(tmp_path, *(row for kind in kinds for row in each(range(1, 5), kind, "x")))
    (device,), (host,) = found.devices, found.hosts
    assert (device.throttled_s, device.foreign_s, device.mean_mhz) == (None, None, None)
    assert (host.steal, host.foreign, host.pressure_memory) == (None, None, None)


@pytest.mark.parametrize(
    ("asked", "reported", "cards", "placed"),
    [
        ("auto", "NVIDIA H200", 2, "cuda:0"),
        ("auto", "cpu", 2, "cpu"),  # a build of torch without CUDA does not find the card that the driver shows
        ("auto", None, 0, "cpu"),
        ("cuda", "NVIDIA H200", 0, "cuda:0"),
        ("cuda:1", "NVIDIA H200", 2, "cuda:1"),
        ("cpu", "cpu", 2, "cpu"),
    ],
)
def test_an_arm_is_placed_on_its_device(tmp_path, asked, reported, cards, placed):
    info = {"devices": {"eager": asked}, "startup": {"eager": {"device": reported}}}
    assert machines_of(tmp_path, cards=cards, info=info).placed == {1: {"eager": placed}}


def test_a_card_is_known_by_its_own_number_over_trials(tmp_path):
    second = {device.name: device for device in machines_of(tmp_path, trials=2).devices if device.trial == 2}
    assert second["cuda:1"].card == "GPU-1"
    assert {name: device.arms for name, device in second.items()} == {"cuda:0": ("compiled",), "cuda:1": ("eager",)}


def reference(device="cuda:0", when="before", **figures):
    return {"host": "run", "device": device, "when": when, **figures}


def speeds(*trials):
    found = [SimpleNamespace(number=number, info={"references": rows}) for number, rows in enumerate(trials, start=1)]
    return [(row.device, row.figure, row.before, row.after) for row in speeds_of(found)]


@pytest.mark.parametrize(
    ("trials", "python_ms"),
    [
        ([[reference("cuda:0", python_ms=8.0), reference("cuda:1", python_ms=18.0)]], [(12.0, None)] * 2),
        ([[reference(python_ms=8.0), reference(when="after", python_ms=10.0)]], [(8.0, 10.0)]),
        ([[reference(python_ms=8.0)], [reference(python_ms=12.0)]], [(8.0, None), (12.0, None)]),
        ([[reference("cuda:0", python_ms=8.0), reference("cuda:1", error="taken")]], [(8.0, None)]),
    ],
    ids=["cards of one host", "before and after", "trials", "a card that was not measured"],
)
def test_speed_of_python_on_every_processor_is_that_of_the_host(trials, python_ms):
    for (_, _, *found), expected in zip(speeds(*trials), python_ms, strict=True):
        assert found == [pytest.approx(value) for value in expected]


def test_speed_is_the_mean_of_before_and_after_and_more_is_faster():
    def means(tflops, python_ms, after_tflops):
        before = reference(matmul_tflops=tflops, python_ms=python_ms)
        after = reference(when="after", matmul_tflops=after_tflops, python_ms=python_ms)
        found = speeds_of([SimpleNamespace(number=1, info={"references": [before, after]})])
        return [row.mean for row in found]

    slow, fast = means(400.0, 20.0, 400.0), means(800.0, 10.0, None)
    assert [b - a for a, b in zip(slow, fast, strict=True)] == [pytest.approx(math.log(2), abs=1e-3)] * 2


def test_a_figure_of_smaller_work_is_not_compared():
    full = {"read_gb_per_s": 4200.0, "read_bytes": 1 << 32}
    rows = [reference(f"cuda:{card}", when, **full) for card in (0, 1) for when in ("before", "after")]
    rows[3] |= {"read_gb_per_s": 3000.0, "read_bytes": 1 << 28}
    assert [found[2:] for found in speeds(rows)] == [(4200.0, 4200.0), (4200.0, None), (None, 3000.0)]
