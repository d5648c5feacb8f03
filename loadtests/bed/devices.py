"""The devices of a trial's arms: what each is, what it does now, and who else is on it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from analysis.wording import counted
from loadtests.bed.processes import Processes
from loadtests.bed.readings import Probe, Readings, Seldom, probe

_PROC = Path("/proc")
_FIRST_NAMESPACE = "pid:[4026531836]"  # of processes, which every Linux starts with
_COSTLY_SHARE = 0.0005  # of a processor, for a device
MUCH_BYTES = 512 << 20  # more than a driver and a desktop take
_CONTAINER = (
    "the processes of other containers are not shown in one: give it the host's process ids (docker run --pid=host)"
)
_NOTHING_LISTED = "the driver lists no process, though memory of the device is in use"


class Card(Protocol):
    """One GPU, or a part of one, as its vendor's library shows it. Every call may raise."""

    @property
    def model(self) -> str:
        """What the vendor calls it."""

    @property
    def probes(self) -> Sequence[Probe]:
        """Columns of a sample."""

    @property
    def costly(self) -> Sequence[Probe]:
        """Columns that take so long to read that not every sample has them."""

    @property
    def facts(self) -> Sequence[Probe]:
        """What does not change within a trial, by the keys of trial.json."""

    def processes(self) -> Mapping[int, int | None]:
        """Memory in bytes of each process on it, null where that is hidden."""


class Library(Protocol):
    """A vendor's library. `cards` raises where there is no such GPU or driver."""

    def cards(self) -> Sequence[Card]:
        """Every GPU of the host, in the order of the PCI bus."""

    def card(self, identity: str) -> Card:
        """The GPU or part of one with this identity, such as GPU-… or MIG-…."""


def visible_cards(library: Library, environment: Mapping[str, str]) -> list[Card]:
    """The cards as CUDA numbers them for a process with this environment: cuda:N is the one at N.

    Raises ValueError where CUDA's order cannot be told.
    """
    cards = list(library.cards())
    named = environment.get("CUDA_VISIBLE_DEVICES", environment.get("HIP_VISIBLE_DEVICES"))
    by_number = named is None or re.search(r"(^|,)\s*\d", named)
    models = sorted({card.model for card in cards})
    if by_number and len(models) > 1 and environment.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        raise ValueError(
            f"{' and '.join(models)}: CUDA puts the fastest first, by its own rule: set CUDA_DEVICE_ORDER=PCI_BUS_ID"
        )
    if named is None:
        return cards
    seen: list[Card] = []
    for name in (item.strip() for item in named.split(",")):
        if re.fullmatch(r"\d+", name) and int(name) < len(cards):
            seen.append(cards[int(name)])
        elif name.startswith(("GPU-", "MIG-")):
            seen.append(library.card(name))
        else:
            break  # CUDA does not look at what follows a name that it does not know
    return seen


def index_of(device: str) -> int | None:
    """N of cuda:N, 0 of cuda; None for what is no such device."""
    kind, _, index = device.partition(":")
    return int(index or 0) if kind == "cuda" and (not index or index.isdecimal()) else None


def device_name(device: str) -> str:
    """The device as records name it: `cuda` is cuda:0. `auto` stays, as only a process on it knows what it finds."""
    index = index_of(device)
    return device if index is None else f"cuda:{index}"


class Devices:
    """The devices called `names` (cuda:N), read together. Foreign are processes that do not descend from the run's own.

    `processes` says who belongs to the run. `proc` is where the kernel's files lie.
    """

    def __init__(
        self,
        names: Sequence[str],
        cards: Sequence[Card],
        *,
        readings: Readings,
        processes: Processes,
        proc: Path = _PROC,
    ) -> None:
        self._readings = readings
        self._processes = processes
        self._proc = proc
        self._costly = {name: Seldom(share=_COSTLY_SHARE) for name in names}
        self._unresolved: dict[str, set[int]] = {}
        self._cards: dict[str, Card] = {}
        for name in names:
            index = index_of(name)
            if index is not None and index < len(cards):
                self._cards[name] = cards[index]
            else:
                readings.unreadable(name, "device", f"the driver shows {counted(len(cards), 'device')} to the run")

    def facts(self) -> dict[str, dict[str, Any]]:
        """Of each device what does not change: host, index, uuid, name, driver, limits, and how to lock its clocks."""
        host = self._readings.host
        return {name: {"host": host, **self._readings.of(name, card.facts)} for name, card in self._cards.items()}

    def before(self, at_ns: int) -> list[dict[str, Any]]:
        """What each device does before the run uses it, and processes of others on it, null where that is not shown."""
        looks = []
        for name, card in self._cards.items():
            row, listed = self._read(name, card)
            foreign = self._foreign(name, listed, row.get("memory_bytes"))
            processes = None
            if foreign is not None:
                processes = [{"pid": pid, "name": self._name_of(pid), "memory_bytes": foreign[pid]} for pid in foreign]
            now = {key: row.get(key) for key in ("memory_bytes", "utilisation_pct", "sm_mhz")}
            looks.append({"host": self._readings.host, "device": name, "at_ns": at_ns, "processes": processes, **now})
        return looks

    @property
    def is_unsure(self) -> bool:
        """Whether the last look showed a process that cannot be looked up. It counts if it is listed once more."""
        return any(self._unresolved.values())

    def hurry(self) -> None:
        """The next sample has every column."""
        for costly in self._costly.values():
            costly.hurry()

    def sample(self) -> tuple[list[dict[str, Any]], dict[int, int | None]]:
        """A row of each device, and what each process holds of all devices together."""
        rows: list[dict[str, Any]] = []
        held: dict[int, int | None] = {}
        for name, card in self._cards.items():
            row, listed = self._read(name, card)
            if self._costly[name].due:
                with self._costly[name].spending():
                    row |= self._readings.of(name, card.costly)
            for pid, size in (listed or {}).items():
                held[pid] = _total((held.get(pid, 0), size))
            foreign = self._foreign(name, listed, row.get("memory_bytes"))
            if foreign is not None:
                row |= {"foreign_processes": len(foreign), "foreign_memory_bytes": _total(foreign.values())}
            rows.append({"kind": "device", "name": name, **row})
        return rows, held

    def _read(self, name: str, card: Card) -> tuple[dict[str, Any], Mapping[int, int | None] | None]:
        """The columns of a sample, and the processes on the device; None where these cannot be listed."""
        listing = self._readings.of(name, [probe("foreign_processes", card.processes)])
        return self._readings.of(name, card.probes), listing.get("foreign_processes")

    def _foreign(
        self, name: str, listed: Mapping[int, int | None] | None, used_bytes: int | None
    ) -> dict[int, int | None] | None:
        """The listed processes that are of others, with their memory; None where the list cannot show that.

        One whose ancestors cannot be read may just have ended: it counts once it is listed again.
        """
        if listed is None:
            return None
        owners = {pid: self._processes.is_of_run(pid) for pid in listed}
        foreign = {pid: listed[pid] for pid, own in owners.items() if own is False}
        if not self._in_first_namespace():
            if not foreign:
                self._readings.unreadable(name, "foreign_processes", _CONTAINER)
            return foreign or None
        if not listed and (used_bytes or 0) > MUCH_BYTES:
            self._readings.unreadable(name, "foreign_processes", _NOTHING_LISTED)
            return None
        unresolved = {pid for pid, own in owners.items() if own is None}
        known = unresolved & self._unresolved.get(name, set())
        self._unresolved[name] = unresolved
        return foreign | {pid: listed[pid] for pid in known}

    def _in_first_namespace(self) -> bool:
        try:
            return (self._proc / "self/ns/pid").readlink().name == _FIRST_NAMESPACE
        except OSError:
            return False

    def _name_of(self, pid: int) -> str | None:
        try:
            return (self._proc / str(pid) / "comm").read_text(encoding="utf-8").strip()
        except OSError:
            return None


def _total(sizes: Iterable[int | None]) -> int | None:
    """The sum, None where one of them is."""
    total = 0
    for size in sizes:
        if size is None:
            return None
        total += size
    return total
