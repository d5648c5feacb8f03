"""The devices of a run, in the names of the samples (`cuda:0`, `cpu`): which arm had which."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from analysis.records.plain_values import mapping, text_of
from analysis.records.schemas import RUN_HOST
from analysis.run.trials import Trial

_FIRST = "cuda:0"


def described(trial: Trial, host: str, device: str) -> Mapping[str, Any]:
    """What the machine monitor says of a device; empty where it says nothing."""
    row = mapping(mapping(mapping(trial.info.get("monitor")).get("devices")).get(device))
    return row if text_of(row, "host", RUN_HOST) == host else {}


def identity_of(trial: Trial, host: str, device: str) -> str:
    """What identifies a device in all trials, whatever its name there."""
    machine = mapping(mapping(mapping(trial.info.get("monitor")).get("machines")).get(host))
    return text_of(described(trial, host, device), "uuid", f"{text_of(machine, 'machine', host)} {device}")


def devices_of(trial: Trial) -> dict[str, str]:
    """The device of each managed arm: `auto` and `cuda` are the first card, or the processor.

    The monitor has resolved them where there was one; a replica that reports that it ran on the processor knows better.
    """
    monitor = mapping(trial.info.get("monitor"))
    cards = [str(name) for name in mapping(monitor.get("devices")) if described(trial, RUN_HOST, str(name))]
    first = _FIRST if _FIRST in cards else next(iter(cards), None)
    devices = {}
    for arm, given in {**mapping(trial.info.get("devices")), **mapping(monitor.get("arms"))}.items():
        name = str(given)
        product = mapping(mapping(trial.info.get("startup")).get(arm)).get("device")
        if product == "cpu":
            name = "cpu"
        elif name in ("auto", "cuda"):
            name = first or ("cpu" if name == "auto" and not product else _FIRST)
        devices[str(arm)] = name
    return devices
