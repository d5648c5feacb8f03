"""The devices of a run, in the names of the samples (`cuda:0`, `cpu`): what each is, and which arm had it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from analysis.records.plain_values import mapping, number, text_of
from analysis.records.schemas import RUN_HOST
from analysis.run.trials import Trial

_FIRST = "cuda:0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """What a trial says of one device."""

    host: str
    name: str  # cuda:0
    identity: str  # equal for one card over trials, whatever its name there
    model: str | None = None
    power_limit_w: float | None = None
    shared: bool = False  # a part of a card (MIG), so that what is known of the kind does not hold
    lock_command: str | None = None

    @classmethod
    def unknown(cls, host: str, name: str) -> Card:
        """A device that was sampled and is not described."""
        return cls(host=host, name=name, identity=f"{host} {name}")


def cards_of(monitor: Mapping[str, Any]) -> dict[tuple[str, str], Card]:
    """The devices that the monitor of a trial describes, by host and name."""
    machines = mapping(monitor.get("machines"))
    cards = {}
    for name, value in mapping(monitor.get("devices")).items():
        row, device = mapping(value), str(name)
        host = text_of(row, "host", RUN_HOST)
        machine = text_of(mapping(machines.get(host)), "machine", host)
        cards[host, device] = Card(
            host=host,
            name=device,
            identity=text_of(row, "uuid", f"{machine} {device}"),
            model=text_of(row, "name") or None,
            power_limit_w=number(row.get("power_limit_w")),
            shared=row.get("mig") is True,
            lock_command=text_of(row, "lock_command") or None,
        )
    return cards


def devices_of(trial: Trial) -> dict[str, str]:
    """The device of each arm that tailgate started, as `devices_in` finds it."""
    return devices_in(trial.info)


def devices_in(info: Mapping[str, Any]) -> dict[str, str]:
    """The device of each managed arm, by trial.json: `auto` and `cuda` are the first card, or the processor.

    The monitor has resolved them where there was one; a replica that reports that it ran on the processor knows better.
    """
    monitor = mapping(info.get("bed"))
    rows = mapping(monitor.get("devices")).items()
    cards = [str(name) for name, row in rows if (mapping(row).get("host") or RUN_HOST) == RUN_HOST]
    first = _FIRST if _FIRST in cards else next(iter(cards), None)
    devices = {}
    for arm, given in {**mapping(info.get("devices")), **mapping(monitor.get("arms"))}.items():
        name = str(given)
        product = mapping(mapping(info.get("startup")).get(arm)).get("device")
        if product == "cpu":
            name = "cpu"
        elif name in ("auto", "cuda"):
            name = first or ("cpu" if name == "auto" and not product else _FIRST)
        devices[str(arm)] = name
    return devices


def alone_on(trial: Trial, arm: str) -> str | None:
    """The card that the arm had to itself among all that the trial started; None where it had none, or shared it.

    A part of a card (MIG) is not a card: what the card reports is of all its parts.
    """
    devices = devices_of(trial)
    device = devices.get(arm, "")
    facts = mapping(mapping(mapping(trial.info.get("bed")).get("devices")).get(device))
    shared = facts.get("mig") is True or list(devices.values()).count(device) != 1
    return device if device.startswith("cuda") and not shared else None
