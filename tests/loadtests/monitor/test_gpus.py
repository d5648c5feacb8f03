"""Devices of a machine: what drivers show of them, foreign processes, and how CUDA numbers them."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import psutil
import pynvml
import pytest

from tailgate.loadtests.monitor import host
from tailgate.loadtests.monitor.__main__ import find_cards
from tailgate.loadtests.monitor.gpus import REASONS, Gpus, index_of, visible_cards
from tailgate.loadtests.monitor.host import machine_identity
from tailgate.loadtests.monitor.processes import Processes
from tailgate.loadtests.monitor.readings import Readings, Unreadable
from tests.fakes.machines import GIB, FakeCard, FakeNvml

RUN, OWN, CHILD, OTHER, UNKNOWN = 100, 101, 102, 900, 950


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with two processes, and a foreign one; /proc shows no other."""
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    (tmp_path / "stat").write_text("btime 1700000000\n")
    for pid, parent in ((RUN, 1), (OWN, RUN), (CHILD, OWN), (OTHER, 1)):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (program-{pid}) S {parent}" + " 0" * 48)
    return tmp_path


def devices(*cards: FakeCard, sees_all: bool = True) -> tuple[Gpus, list[Unreadable]]:
    """The devices of a run, and what could not be read of them."""
    unreadable: list[Unreadable] = []
    readings = Readings(unreadable.append)
    found = {f"cuda:{index}": card for index, card in enumerate(visible_cards(FakeNvml(cards), {}))}
    return Gpus(found, readings=readings, processes=Processes(readings, root=RUN), sees_all=sees_all), unreadable


FIRST, CONTAINER = True, False  # whether the namespace is the first, which shows all processes
NOT_SHOWN = (None, None)


@pytest.mark.parametrize(
    ("namespace", "used", "processes", "foreign", "why"),
    [
        (FIRST, 9 * GIB, {OWN: GIB, CHILD: 2 * GIB, OTHER: 4 * GIB}, [(1, 4 * GIB)], ""),
        (FIRST, 9 * GIB, {OWN: GIB}, [(0, 0)], ""),
        (FIRST, 9 * GIB, {OTHER: None}, [(1, None)], ""),  # the driver hides how much it holds
        (FIRST, 9 * GIB, {UNKNOWN: GIB}, [(0, 0), (1, GIB)], ""),  # it may just have ended, unless it is listed again
        (FIRST, 0, {}, [(0, 0)], ""),
        (FIRST, GIB, {}, [NOT_SHOWN], "lists no process"),
        (CONTAINER, 0, {}, [NOT_SHOWN], "--pid=host"),
        (CONTAINER, 0, {OWN: GIB}, [NOT_SHOWN], "--pid=host"),
        (CONTAINER, 0, {UNKNOWN: GIB}, [NOT_SHOWN], "--pid=host"),
        (CONTAINER, 0, {OTHER: GIB}, [(1, GIB)], ""),
    ],
)
def test_processes_that_do_not_descend_from_the_run_are_foreign_where_they_are_shown(
    namespace: bool, used: int, processes: dict[int, int | None], foreign: list[tuple[Any, Any]], why: str, proc: Path
) -> None:
    watched, unreadable = devices(FakeCard(used=used, processes=processes), sees_all=namespace)
    for expected in [*foreign, foreign[-1]]:
        (row,), held = watched.sample()
        assert (row["kind"], row["name"], held) == ("device", "cuda:0", processes)
        assert (row.get("foreign_processes"), row.get("foreign_memory_bytes")) == expected
    assert [(item.name, item.what) for item in unreadable] == [("cuda:0", "foreign_processes")] * bool(why)
    assert all(why in item.why for item in unreadable)


def test_memory_of_a_process_is_summed_over_devices(proc: Path) -> None:
    cards = [FakeCard(bus=1, processes={OWN: 1, CHILD: None}), FakeCard(bus=2, processes={OWN: 2, CHILD: 5})]
    watched, _ = devices(*cards)
    assert watched.sample()[1] == {OWN: 3, CHILD: None}


def test_processes_that_cannot_be_listed_are_reported(proc: Path) -> None:
    refused = {"nvmlDeviceGetComputeRunningProcesses": "Insufficient Permissions"}
    watched, unreadable = devices(FakeCard(refused=refused))
    (row,), held = watched.sample()
    assert "foreign_processes" not in row
    assert (row["sm_mhz"], held) == (1980, {})
    assert [(item.what, item.why) for item in unreadable] == [("foreign_processes", "Insufficient Permissions")]


@pytest.mark.parametrize(
    ("nvml", "found", "why"),
    [
        (FakeNvml([FakeCard()]), ["cuda:0"], "the driver shows 1 device"),
        (FakeNvml([], missing="Driver Not Loaded"), [], "Driver Not Loaded"),
    ],
)
def test_a_device_that_is_not_there_is_reported(
    nvml: FakeNvml, found: list[str], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    unreadable: list[Unreadable] = []
    assert list(find_cards(["auto", "cuda:1"], Readings(unreadable.append))) == found
    assert [(item.name, item.what) for item in unreadable] == [("cuda:1", "device")]
    assert why in unreadable[0].why


def order(environment: dict[str, str], *, second: str = "NVIDIA H200") -> list[str]:
    cards = [FakeCard(uuid="GPU-0", bus=1), FakeCard(uuid="GPU-1", bus=2, name=second), FakeCard(uuid="GPU-2", bus=3)]
    parts = [FakeCard(uuid="MIG-7")]
    return [card.uuid for card in visible_cards(FakeNvml(cards, parts=parts), environment)]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, ["GPU-0", "GPU-1", "GPU-2"]),
        ("2,0", ["GPU-2", "GPU-0"]),
        (" 1 , GPU-0", ["GPU-1", "GPU-0"]),
        ("MIG-7", ["MIG-7"]),
        ("", []),
        ("-1", []),
        ("1,-1,0", ["GPU-1"]),  # CUDA stops at the first that it does not know
        ("0,9,1", ["GPU-0"]),
    ],
)
def test_devices_are_numbered_as_cuda_does_among_the_visible_ones(visible: str | None, expected: list[str]) -> None:
    assert order({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}) == expected


def test_the_order_of_unlike_cards_is_not_guessed() -> None:
    for variables in ({}, {"CUDA_VISIBLE_DEVICES": "1,0"}):
        with pytest.raises(ValueError, match="CUDA_DEVICE_ORDER=PCI_BUS_ID"):
            order(variables, second="NVIDIA L4")
    assert order({"CUDA_VISIBLE_DEVICES": "GPU-1"}, second="NVIDIA L4") == ["GPU-1"]
    in_order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert order(in_order, second="NVIDIA L4") == ["GPU-0", "GPU-1", "GPU-2"]


def test_only_cuda_devices_have_a_number() -> None:
    assert [index_of(name) for name in ("cuda", "cuda:12", "cpu", "auto", "cuda:x")] == [0, 12, None, None, None]


def read(card: FakeCard, *, facts: bool = False) -> dict[str, Any]:
    probes = visible_cards(FakeNvml([card]), {})[0]
    return Readings(pytest.fail).of("cuda:0", probes.facts if facts else probes.probes)


def test_a_card_is_described_and_sampled() -> None:
    card = FakeCard(used=3 * GIB, utilisation=97, sm_mhz=1755, throttle=0x4 | 0x20)
    assert read(card, facts=True) == {"uuid": card.uuid, "name": "NVIDIA H200", "power_limit_w": 650.0}
    assert read(card) == {
        "sm_mhz": 1755,
        "power_w": 89.036,
        "power_limit_w": 700.0,
        "throttle": ["sw_power_cap", "sw_thermal_slowdown"],
        "temperature_c": 41,
        "utilisation_pct": 97,
        "memory_bytes": 3 * GIB,
        "memory_limit_bytes": 140 * GIB,
    }


def test_memory_leaves_out_that_of_the_driver_where_nvml_knows_it() -> None:
    for refused, more in (({}, 0), ({"nvmlMemory_v2": "Function Not Found"}, GIB // 2)):
        assert read(FakeCard(used=GIB, refused=refused))["memory_bytes"] == GIB + more


def test_pynvml_has_every_function_and_constant_that_the_fake_has() -> None:
    fake = FakeNvml([FakeCard()])
    called = {name for name in (*vars(fake), *vars(FakeNvml)) if name.startswith("nvml")}
    assert len(called) > 15
    assert [name for name in called if not hasattr(pynvml, name)] == []
    assert (pynvml.NVML_CLOCK_SM, pynvml.NVML_TEMPERATURE_GPU) == (1, 0)
    # By their bits, as the table names them.
    for bit, name in REASONS.items():
        constant = "nvmlClocksThrottleReason" + "".join(word.capitalize() for word in name.split("_"))
        assert getattr(pynvml, constant) == bit


def test_a_machine_is_known_by_its_gpus_its_id_or_its_last_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = machine_identity(["GPU-a", "GPU-b"])
    assert re.fullmatch("[0-9a-f]{12}", one or "")
    assert machine_identity(["GPU-b", "GPU-a"], tmp_path / "none") == one
    assert machine_identity(["GPU-a"]) != one
    (tmp_path / "id").write_text("0123456789abcdef\n")
    by_id, by_start = machine_identity([], tmp_path / "id"), machine_identity([], tmp_path / "none")
    assert by_id != by_start
    (tmp_path / "id").write_text("")  # as in an image of a machine that never started
    assert machine_identity([], tmp_path / "id") == by_start is not None
    monkeypatch.setattr(host, "host_identity", lambda: "")
    assert machine_identity([], tmp_path / "none") is None
