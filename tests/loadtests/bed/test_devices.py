from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from loadtests.bed.devices import Devices, index_of, visible_cards
from loadtests.bed.nvml import Nvml, NvmlCard
from loadtests.bed.processes import Processes
from loadtests.bed.readings import Readings
from tests.fakes.nvml import GIB, FakeCard, FakeNvml

RUN, OWN, CHILD, OTHER, UNKNOWN = 100, 101, 102, 900, 950


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A run with two processes, and one of somebody else; what is listed beyond them cannot be looked up."""
    for pid, parent in ((RUN, 1), (OWN, RUN), (CHILD, OWN), (OTHER, 1)):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (some) name) S {parent}" + " 0" * 48)
        (tmp_path / str(pid) / "comm").write_text(f"program-{pid}\n")
    in_namespace(tmp_path, "pid:[4026531836]")
    return tmp_path


def in_namespace(proc: Path, name: str) -> None:
    folder = proc / "self" / "ns"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pid").unlink(missing_ok=True)
    (folder / "pid").symlink_to(name)


def devices(
    proc: Path, cards: Sequence[FakeCard], *names: str, said: list[dict[str, str]] | None = None
) -> tuple[Devices, list[dict[str, str]]]:
    said = [] if said is None else said
    readings = Readings("run", said.append)
    processes = Processes(readings, root=RUN, proc=proc)
    library: list[NvmlCard] = Nvml(FakeNvml(cards)).cards()
    return Devices(names or ("cuda:0",), library, readings=readings, processes=processes, proc=proc), said


def test_processes_that_do_not_descend_from_the_run_are_foreign(proc: Path) -> None:
    watched, said = devices(proc, [FakeCard(used=9 * GIB, processes={OWN: GIB, CHILD: 2 * GIB, OTHER: 4 * GIB})])
    (row,), held = watched.sample()
    assert (row["kind"], row["name"]) == ("device", "cuda:0")
    assert (row["foreign_processes"], row["foreign_memory_bytes"]) == (1, 4 * GIB)
    assert held == {OWN: GIB, CHILD: 2 * GIB, OTHER: 4 * GIB}
    assert said == []


def test_a_device_of_the_run_alone_has_no_foreign_processes(proc: Path) -> None:
    watched, said = devices(proc, [FakeCard(used=GIB, processes={OWN: GIB})])
    (row,), _ = watched.sample()
    assert (row["foreign_processes"], row["foreign_memory_bytes"]) == (0, 0)
    assert said == []


def test_what_a_process_holds_is_summed_over_devices(proc: Path) -> None:
    cards = [FakeCard(bus=1, processes={OWN: 1, CHILD: None}), FakeCard(bus=2, processes={OWN: 2, CHILD: 5})]
    watched, _ = devices(proc, cards, "cuda:0", "cuda:1")
    assert watched.sample()[1] == {OWN: 3, CHILD: None}


def test_foreign_memory_that_the_driver_hides_is_null(proc: Path) -> None:
    watched, _ = devices(proc, [FakeCard(processes={OTHER: None})])
    (row,), _ = watched.sample()
    assert (row["foreign_processes"], row["foreign_memory_bytes"]) == (1, None)


def test_a_process_that_cannot_be_looked_up_is_foreign_once_it_is_listed_again(proc: Path) -> None:
    watched, _ = devices(proc, [FakeCard(processes={UNKNOWN: GIB})])
    assert [watched.sample()[0][0]["foreign_processes"] for _ in range(3)] == [0, 1, 1]


def test_before_the_run_a_process_that_has_just_ended_is_nobody(proc: Path) -> None:
    card = FakeCard(processes={UNKNOWN: GIB})
    watched, _ = devices(proc, [card])
    (first,), unsure = watched.before(1), watched.is_unsure
    (still,) = watched.before(2)
    card.processes.clear()
    (gone,) = watched.before(3)
    assert (first["processes"], unsure) == ([], True)
    assert [process["pid"] for process in still["processes"]] == [UNKNOWN]
    assert (gone["processes"], watched.is_unsure) == ([], False)


def test_a_device_in_use_on_which_nobody_is_listed_does_not_show_whose_it_is(proc: Path) -> None:
    card = FakeCard(used=GIB)
    watched, said = devices(proc, [card])
    (row,), _ = watched.sample()
    assert "foreign_processes" not in row
    assert [(item["name"], item["what"]) for item in said] == [("cuda:0", "foreign_processes")]
    assert "lists no process" in said[0]["why"]
    card.used = 0
    assert watched.sample()[0][0]["foreign_processes"] == 0


@pytest.mark.parametrize("processes", [{}, {OWN: GIB}, {UNKNOWN: GIB}])
def test_in_a_container_nobody_else_can_be_ruled_out(proc: Path, processes: dict[int, int | None]) -> None:
    in_namespace(proc, "pid:[4026532999]")
    watched, said = devices(proc, [FakeCard(processes=processes)])
    for _ in range(3):
        assert "foreign_processes" not in watched.sample()[0][0]
    assert [item["what"] for item in said] == ["foreign_processes"]
    assert "--pid=host" in said[0]["why"]


def test_a_foreign_process_that_a_container_does_show_counts(proc: Path) -> None:
    in_namespace(proc, "pid:[4026532999]")
    watched, said = devices(proc, [FakeCard(processes={OTHER: GIB})])
    assert watched.sample()[0][0]["foreign_processes"] == 1
    assert said == []


def test_processes_that_cannot_be_listed_are_said(proc: Path) -> None:
    refused = {"nvmlDeviceGetComputeRunningProcesses": "Insufficient Permissions"}
    watched, said = devices(proc, [FakeCard(refused=refused)])
    (row,), held = watched.sample()
    assert "foreign_processes" not in row
    assert row["sm_mhz"] == 1980
    assert held == {}
    assert [(item["what"], item["why"]) for item in said] == [("foreign_processes", "Insufficient Permissions")]


def test_a_look_before_the_trial_names_who_is_there(proc: Path) -> None:
    card = FakeCard(used=5 * GIB, utilisation=93, processes={OWN: GIB, OTHER: 4 * GIB, UNKNOWN: None})
    watched, _ = devices(proc, [card])
    watched.before(6)  # who is listed twice cannot just have ended
    (look,) = watched.before(7)
    assert look == {
        "host": "run",
        "device": "cuda:0",
        "at_ns": 7,
        "processes": [
            {"pid": OTHER, "name": f"program-{OTHER}", "memory_bytes": 4 * GIB},
            {"pid": UNKNOWN, "name": None, "memory_bytes": None},
        ],
        "memory_bytes": 5 * GIB,
        "utilisation_pct": 93,
        "sm_mhz": 1980,
    }


def test_energy_costs_a_driver_much_and_is_read_seldom(proc: Path) -> None:
    watched, _ = devices(proc, [FakeCard(energy_ms=20.0)])
    assert ["energy_j" in watched.sample()[0][0] for _ in range(3)] == [True, False, False]
    watched.hurry()
    assert "energy_j" in watched.sample()[0][0]


def test_a_device_that_is_not_there_is_said(proc: Path) -> None:
    watched, said = devices(proc, [FakeCard()], "cuda:0", "cuda:1")
    assert list(watched.facts()) == ["cuda:0"]
    assert [(item["name"], item["what"]) for item in said] == [("cuda:1", "device")]
    assert "the driver shows 1 device" in said[0]["why"]


def order(environment: dict[str, str], *, second: str = "NVIDIA H200") -> list[str]:
    cards = [FakeCard(uuid="GPU-0", bus=1), FakeCard(uuid="GPU-1", bus=2, name=second), FakeCard(uuid="GPU-2", bus=3)]
    parts = [FakeCard(uuid="MIG-7", parent=cards[1])]
    found = visible_cards(Nvml(FakeNvml(cards, parts=parts)), environment)
    return [card.uuid for card in found if isinstance(card, NvmlCard)]


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
    for environment in ({}, {"CUDA_VISIBLE_DEVICES": "1,0"}):
        with pytest.raises(ValueError, match="set CUDA_DEVICE_ORDER=PCI_BUS_ID"):
            order(environment, second="NVIDIA L4")
    assert order({"CUDA_VISIBLE_DEVICES": "GPU-1"}, second="NVIDIA L4") == ["GPU-1"]
    in_order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert order(in_order, second="NVIDIA L4") == ["GPU-0", "GPU-1", "GPU-2"]


def test_only_cuda_devices_have_a_number() -> None:
    assert [index_of(name) for name in ("cuda", "cuda:0", "cuda:12", "cpu", "auto", "cuda:x")] == [
        *(0, 0, 12),
        *(None, None, None),
    ]
