"""AMD's GPUs through AMD SMI, the library behind amd-smi. It comes with ROCm, and tailgate does not install it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from loadtests.bed.readings import Probe, probe


class AmdSmi:
    """The library, opened. `smi` is the module amdsmi, or one like it. Raises its error where there is no driver."""

    def __init__(self, smi: Any) -> None:
        self._smi = smi
        smi.amdsmi_init()

    def cards(self) -> list[AmdCard]:
        """Every GPU of the host in the order of the PCI bus."""
        handles = self._smi.amdsmi_get_processor_handles()
        return [AmdCard(self._smi, handle) for handle in sorted(handles, key=self._smi.amdsmi_get_gpu_device_bdf)]

    def card(self, identity: str) -> AmdCard:
        """The GPU whose UUID is in what HIP calls it, GPU-…"""
        for card in self.cards():
            if card.uuid.endswith(identity.removeprefix("GPU-")):
                return card
        raise ValueError(f"no GPU is called {identity}")


class AmdCard:
    """One GPU. Functions of AMD SMI answer with a table, in which what they do not know is "N/A"."""

    def __init__(self, smi: Any, handle: Any) -> None:
        self._smi = smi
        self._handle = handle
        graphics, memory = smi.AmdSmiClkType.GFX, smi.AmdSmiClkType.MEM
        self.probes: Sequence[Probe] = (
            probe("sm_mhz", lambda: self._ask("clock_info", "clk", graphics)),
            probe("memory_mhz", lambda: self._ask("clock_info", "clk", memory)),
            probe("power_w", self._power),
            probe("power_limit_w", lambda: self._ask("power_cap_info", "power_cap") / 1e6),
            probe("throttle", self._throttle),
            probe("temperature_c", self._temperature),
            probe("utilisation_pct", lambda: self._ask("gpu_activity", "gfx_activity")),
            Probe(("memory_bytes", "memory_limit_bytes"), self._memory),
        )
        self.costly: Sequence[Probe] = (probe("energy_j", self._energy),)
        self.facts: Sequence[Probe] = (
            probe("uuid", lambda: self.uuid),
            probe("name", lambda: self.model),
            probe("driver", lambda: self._ask("gpu_driver_info", "driver_version")),
            probe("memory_bytes", lambda: self._memory()[1]),
            probe("power_limit_w", lambda: self._ask("power_cap_info", "power_cap") / 1e6),
            probe("power_limit_default_w", lambda: self._ask("power_cap_info", "default_power_cap") / 1e6),
            probe("sm_max_mhz", lambda: self._ask("clock_info", "max_clk", graphics)),
            probe("memory_max_mhz", lambda: self._ask("clock_info", "max_clk", memory)),
            probe("lock_command", lambda: f"sudo amd-smi set --gpu {self.uuid} --perf-determinism CLOCK_MHZ"),
        )

    @property
    def model(self) -> str:
        """Such as AMD Instinct MI300X."""
        return str(self._ask("gpu_asic_info", "market_name"))

    @property
    def uuid(self) -> str:
        """As AMD SMI writes it."""
        return str(self._smi.amdsmi_get_gpu_device_uuid(self._handle))

    def processes(self) -> Mapping[int, int | None]:
        """Memory in bytes of each process on it; None where the driver does not say."""
        listed = self._smi.amdsmi_get_gpu_process_list(self._handle)
        sizes = {int(process["pid"]): process["memory_usage"]["vram_mem"] for process in listed}
        return {pid: None if size == "N/A" else int(size) for pid, size in sizes.items()}

    def _ask(self, what: str, key: str, *arguments: Any) -> Any:
        value = getattr(self._smi, f"amdsmi_get_{what}")(self._handle, *arguments)[key]
        if value == "N/A":
            raise ValueError(f"AMD SMI has no {key} for this GPU")
        return value

    def _power(self) -> float:
        try:
            return float(self._ask("power_info", "current_socket_power"))
        except ValueError:  # kinds before MI300 have the average alone
            return float(self._ask("power_info", "average_socket_power"))

    def _throttle(self) -> list[str]:
        raise ValueError("AMD SMI has no reasons in common with NVML's")

    def _temperature(self) -> int:
        kind, now = self._smi.AmdSmiTemperatureType.HOTSPOT, self._smi.AmdSmiTemperatureMetric.CURRENT
        return int(self._smi.amdsmi_get_temp_metric(self._handle, kind, now))

    def _energy(self) -> float:
        count = self._smi.amdsmi_get_energy_count(self._handle)
        return float(
            count["energy_accumulator"] * count["counter_resolution"] / 1e6
        )  # the resolution is in microjoules

    def _memory(self) -> tuple[int, int]:
        usage = self._smi.amdsmi_get_gpu_vram_usage(self._handle)  # in MiB
        return int(usage["vram_used"]) << 20, int(usage["vram_total"]) << 20
