from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from loadtests.bed.amd import AmdSmi
from loadtests.bed.readings import Readings

MIB = 1 << 20


def library(**changes: Any) -> Any:
    """AMD SMI without a driver: two GPUs, called by their place on the bus. Answers can be replaced by their name."""
    answers: dict[str, Any] = {
        "clock_info": lambda card, kind: {"clk": {"gfx": 1900, "mem": 1300}[kind], "max_clk": 2100},
        "power_info": lambda card: {"current_socket_power": "N/A", "average_socket_power": 140},
        "power_cap_info": lambda card: {"power_cap": 700_000_000, "default_power_cap": 750_000_000},
        "temp_metric": lambda card, kind, metric: 45,
        "gpu_activity": lambda card: {"gfx_activity": 90},
        "energy_count": lambda card: {"energy_accumulator": 2_000_000, "counter_resolution": 15.5},
        "gpu_vram_usage": lambda card: {"vram_used": 300, "vram_total": 192_000},
        "gpu_process_list": lambda card: [
            {"pid": 7, "memory_usage": {"vram_mem": 5}},
            {"pid": 8, "memory_usage": {"vram_mem": "N/A"}},
        ],
        "gpu_driver_info": lambda card: {"driver_version": "6.12"},
        "gpu_asic_info": lambda card: {"market_name": "AMD Instinct MI300X"},
        "gpu_device_uuid": lambda card: f"00ff-{card}",
        "gpu_device_bdf": lambda card: card,
        "processor_handles": lambda: ["0000:83:00.0", "0000:03:00.0"],
        **changes,
    }
    return SimpleNamespace(
        amdsmi_init=lambda: None,
        AmdSmiClkType=SimpleNamespace(GFX="gfx", MEM="mem"),
        AmdSmiTemperatureType=SimpleNamespace(HOTSPOT="hotspot"),
        AmdSmiTemperatureMetric=SimpleNamespace(CURRENT="current"),
        **{f"amdsmi_get_{name}": answer for name, answer in answers.items()},
    )


def test_a_card_is_sampled_in_the_tables_units() -> None:
    said: list[dict[str, str]] = []
    card = AmdSmi(library()).cards()[0]
    assert Readings("run", said.append).of("cuda:0", (*card.probes, *card.costly)) == {
        "sm_mhz": 1900,
        "memory_mhz": 1300,
        "power_w": 140.0,
        "power_limit_w": 700.0,
        "energy_j": 31.0,
        "temperature_c": 45,
        "utilisation_pct": 90,
        "memory_bytes": 300 * MIB,
        "memory_limit_bytes": 192_000 * MIB,
    }
    assert [item["what"] for item in said] == ["throttle"]
    assert card.processes() == {7: 5, 8: None}


def test_what_amd_smi_does_not_know_is_said() -> None:
    said: list[dict[str, str]] = []
    unknown = library(gpu_activity=lambda card: {"gfx_activity": "N/A"})
    row = Readings("run", said.append).of("cuda:0", AmdSmi(unknown).cards()[0].probes)
    assert "utilisation_pct" not in row
    assert ("utilisation_pct", "AMD SMI has no gfx_activity for this GPU") in [
        (item["what"], item["why"]) for item in said
    ]


def test_cards_come_in_the_order_of_the_bus_and_are_found_by_uuid() -> None:
    smi = AmdSmi(library())
    assert [card.uuid for card in smi.cards()] == ["00ff-0000:03:00.0", "00ff-0000:83:00.0"]
    assert smi.card("GPU-0000:83:00.0").uuid == "00ff-0000:83:00.0"
    with pytest.raises(ValueError, match="no GPU is called GPU-x"):
        smi.card("GPU-x")


def test_what_a_card_is() -> None:
    said: list[dict[str, str]] = []
    facts = Readings("run", said.append).of("cuda:0", AmdSmi(library()).cards()[0].facts)
    assert facts["name"] == "AMD Instinct MI300X"
    assert (facts["power_limit_w"], facts["power_limit_default_w"], facts["sm_max_mhz"]) == (700.0, 750.0, 2100)
    assert said == []
