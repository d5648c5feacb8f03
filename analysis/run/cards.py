"""What a trial says of each device: its identity, its limits, and how to lock its clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from analysis.records.plain_values import mapping, number, text_of
from analysis.records.schemas import RUN_HOST


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """What a trial says of one device."""

    host: str
    name: str  # cuda:0
    identity: str  # equal for one card over trials, whatever its name there
    model: str | None
    power_limit_w: float | None
    power_limit_default_w: float | None
    sm_max_mhz: float | None
    shared: bool  # a part of a card (MIG), so that what is known of the kind does not hold
    lock_command: str | None


def cards_of(bed: Mapping[str, Any]) -> dict[tuple[str, str], Card]:
    """The devices that a trial's `bed` describes, by host and name."""
    machines = mapping(bed.get("machines"))
    cards = {}
    for name, value in mapping(bed.get("devices")).items():
        row = mapping(value)
        host = text_of(row, "host", RUN_HOST)
        machine = text_of(mapping(machines.get(host)), "machine", host)
        model = row.get("name")
        command = row.get("lock_command")
        device = str(name)
        cards[host, device] = Card(
            host=host,
            name=device,
            identity=text_of(row, "uuid", f"{machine} {device}"),
            model=model if isinstance(model, str) else None,
            **{key: number(row.get(key)) for key in ("power_limit_w", "power_limit_default_w", "sm_max_mhz")},
            shared=row.get("mig") is True,
            lock_command=command if isinstance(command, str) else None,
        )
    return cards
