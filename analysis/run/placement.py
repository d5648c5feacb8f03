"""Which arm had which device, in the names of the samples: `cuda:0`, `cpu`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from analysis.records.plain_values import mapping, rows_of
from analysis.records.schemas import RUN_HOST
from analysis.run.trials import Trial

_FIRST = "cuda:0"


def devices_of(trial: Trial) -> dict[str, str]:
    """The device of each arm that tailgate started, as `devices_in` finds it."""
    return devices_in(trial.info)


def devices_in(info: Mapping[str, Any]) -> dict[str, str]:
    """The device of each arm of ours, by trial.json: `auto` and `cuda` are the first card, or the processor.

    The watcher has resolved them where there was one; a replica that says that it ran on the processor knows better.
    """
    bed = mapping(info.get("bed"))
    cards = [
        str(name)
        for name, row in mapping(bed.get("devices")).items()
        if (mapping(row).get("host") or RUN_HOST) == RUN_HOST
    ]
    first = _FIRST if _FIRST in cards else next(iter(cards), None)
    devices = {}
    for arm, given in {**mapping(info.get("devices")), **mapping(bed.get("arms"))}.items():
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

    A part of a card (MIG) is not a card: what the card reports is of all its parts. A neighbour under [pressure] shares
    the card too.
    """
    devices = devices_of(trial)
    device = devices.get(arm, "")
    facts = mapping(mapping(mapping(trial.info.get("bed")).get("devices")).get(device))
    pressed = {str(row.get("device")) for row in rows_of(trial.info.get("pressure"))}
    shared = facts.get("mig") is True or list(devices.values()).count(device) != 1 or _card_of(pressed, device)
    return device if device.startswith("cuda") and not shared else None


def _card_of(names: set[str], device: str) -> bool:
    """Whether one of the names stands for the card."""
    return device in names or (device == _FIRST and not names.isdisjoint(("cuda", "auto")))
