from __future__ import annotations

from typing import Any

import pynvml
import pytest

from loadtests.bed.nvml import REASONS, Nvml
from loadtests.bed.readings import Readings
from tests.fakes.nvml import GIB, FakeCard, FakeNvml, FakeNVMLError


def read(nvml: FakeNvml, *, facts: bool = False, index: int = 0) -> tuple[dict[str, Any], dict[str, str]]:
    said: dict[str, str] = {}
    card = Nvml(nvml).cards()[index]
    readings = Readings("run", lambda item: said.update({item["what"]: item["why"]}))
    return readings.of("cuda:0", card.facts if facts else (*card.probes, *card.costly)), said


def test_a_card_is_sampled() -> None:
    row, said = read(FakeNvml([FakeCard(used=3 * GIB, utilisation=97, sm_mhz=1755, throttle=0x4 | 0x20)]))
    assert row == {
        "sm_mhz": 1755,
        "memory_mhz": 3201,
        "power_w": 89.036,
        "power_limit_w": 700.0,
        "energy_j": 2766.025,
        "throttle": ["sw_power_cap", "sw_thermal_slowdown"],
        "temperature_c": 41,
        "utilisation_pct": 97,
        "memory_bytes": 3 * GIB,
        "memory_limit_bytes": 140 * GIB,
    }
    assert said == {}


def test_a_card_that_nothing_slows_down_has_no_reason() -> None:
    assert read(FakeNvml([FakeCard()]))[0]["throttle"] == []


def test_what_a_card_is_and_how_to_lock_its_clocks() -> None:
    facts, said = read(FakeNvml([FakeCard(bus=1), FakeCard(uuid="GPU-1", bus=2)]), facts=True, index=1)
    assert facts == {
        "index": 1,
        "uuid": "GPU-1",
        "name": "NVIDIA H200",
        "driver": "580.159.04",
        "memory_bytes": 140 * GIB,
        "power_limit_w": 650.0,
        "power_limit_default_w": 700.0,
        "sm_max_mhz": 1980,
        "memory_max_mhz": 3201,
        "sm_application_mhz": 1980,
        "mig": False,
        "persistence": True,
        "lock_command": "sudo nvidia-smi -i 1 -lgc 1980,1980",
    }
    assert said == {}


def test_each_value_that_nvml_refuses_is_said_in_its_words_and_the_others_are_read() -> None:
    refused = {
        "nvmlDeviceGetCurrentClocksThrottleReasons": "Not Supported",
        "nvmlDeviceGetPowerUsage": "Insufficient Permissions",
        "nvmlDeviceGetMemoryInfo": "Unknown Error",
    }
    row, said = read(FakeNvml([FakeCard(refused=refused)]))
    unknown = "Unknown Error"
    assert said == {
        "throttle": "Not Supported",
        "power_w": "Insufficient Permissions",
        "memory_bytes": unknown,
        "memory_limit_bytes": unknown,
    }
    assert row["sm_mhz"] == 1980
    assert not set(said) & set(row)


def test_memory_is_without_that_of_the_driver_where_it_tells_them_apart() -> None:
    assert read(FakeNvml([FakeCard(used=GIB)]))[0]["memory_bytes"] == GIB
    old = FakeCard(used=GIB, refused={"nvmlMemory_v2": "Function Not Found"})
    assert read(FakeNvml([old]))[0]["memory_bytes"] == GIB + GIB // 2


def test_cards_come_in_the_order_of_the_pci_bus() -> None:
    cards = Nvml(FakeNvml([FakeCard(uuid="GPU-b", bus=9), FakeCard(uuid="GPU-a", bus=3)])).cards()
    assert [(card.uuid, card.index) for card in cards] == [("GPU-a", 1), ("GPU-b", 0)]


def test_a_part_of_a_card_has_its_own_memory_and_processes_and_the_cards_clocks() -> None:
    whole = FakeCard(uuid="GPU-1", used=50 * GIB, processes={1: 1, 2: 2}, sm_mhz=1234)
    part = FakeCard(uuid="MIG-1", used=GIB, processes={2: 2}, parent=whole, sm_mhz=0)
    card = Nvml(FakeNvml([whole], parts=[part])).card("MIG-1")
    said: list[Any] = []
    row = Readings("run", said.append).of("cuda:0", card.probes)
    assert (row["memory_bytes"], row["sm_mhz"]) == (GIB, 1234)
    assert card.processes() == {2: 2}
    facts = Readings("run", said.append).of("cuda:0", card.facts)
    assert (facts["uuid"], facts["mig"], facts["index"]) == ("MIG-1", True, 0)
    assert said == []


def test_cards_are_found_by_the_start_of_their_uuid() -> None:
    library = Nvml(FakeNvml([FakeCard(uuid="GPU-abc"), FakeCard(uuid="GPU-def")]))
    assert library.card("GPU-d").uuid == "GPU-def"
    with pytest.raises(ValueError, match="no GPU is called GPU-x"):
        library.card("GPU-x")


def test_processes_are_listed_also_where_a_card_draws_nothing() -> None:
    refused = {"nvmlDeviceGetGraphicsRunningProcesses": "Not Supported"}
    card = Nvml(FakeNvml([FakeCard(processes={7: GIB, 8: None}, refused=refused)])).cards()[0]
    assert card.processes() == {7: GIB, 8: None}


def test_a_host_without_a_driver_is_an_error_in_nvmls_words() -> None:
    with pytest.raises(FakeNVMLError, match="Driver Not Loaded"):
        Nvml(FakeNvml([], missing="Driver Not Loaded"))


def test_the_library_has_what_is_called_of_it_with_these_values() -> None:
    fake = FakeNvml([FakeCard()])
    called = {name for name in (*vars(fake), *vars(FakeNvml)) if name.startswith("nvml")}
    assert len(called) > 20
    assert [name for name in called if not hasattr(pynvml, name)] == []
    assert (pynvml.NVML_CLOCK_SM, pynvml.NVML_CLOCK_MEM, pynvml.NVML_TEMPERATURE_GPU) == (1, 2, 0)
    # By their bits, as the table names them.
    for bit, name in REASONS.items():
        constant = "nvmlClocksThrottleReason" + "".join(word.capitalize() for word in name.split("_"))
        assert getattr(pynvml, constant) == bit
