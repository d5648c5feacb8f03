"""What was sampled of the machines, cut into one series for each thing and trial, and which arm had which device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from analysis.arrays import Bools, Floats, Ints
from analysis.records.plain_values import mapping, rows_of
from analysis.records.schemas import BED
from analysis.run.trials import Trial


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """The samples of one thing in one trial. Columns of numbers have NaN where nothing was read."""

    trial: int
    host: str
    name: str
    arm: str | None  # of a replica
    at_ns: Ints
    columns: Mapping[str, Floats]

    def known(self, column: str, start_ns: int, end_ns: int) -> tuple[Ints, Floats]:
        """(at_ns, values) of what was read of the column from `start_ns` to `end_ns`."""
        values = self.columns[column]
        keep: Bools = (self.at_ns >= start_ns) & (self.at_ns <= end_ns) & np.isfinite(values)
        return self.at_ns[keep], values[keep]


_NUMBERS = tuple(
    field.name
    for field in BED
    if field.name not in ("trial", "at_ns") and (pa.types.is_integer(field.type) or pa.types.is_floating(field.type))
)


def samples_of(bed: pa.Table | None, kind: str) -> list[Samples]:
    """The series of every thing of the kind (host, device, process, allocator); none where nobody watched.

    Rows without a time or a name belong nowhere.
    """
    if bed is None:
        return []
    placed = pc.and_(pc.is_valid(bed.column("at_ns")), pc.is_valid(bed.column("name")))
    rows = bed.filter(pc.and_(placed, pc.fill_null(pc.equal(bed.column("kind"), kind), False)))
    rows = rows.sort_by("at_ns")
    keys = [rows.column(name).to_pylist() for name in ("trial", "host", "name")]
    places: dict[tuple[Any, ...], list[int]] = {}
    for index, key in enumerate(zip(*keys, strict=True)):
        places.setdefault(key, []).append(index)
    at_ns = np.asarray(rows.column("at_ns").to_numpy(), dtype=np.int64)
    columns = {name: _floats(rows.column(name)) for name in _NUMBERS}
    arms = rows.column("arm").to_pylist()
    return [
        Samples(
            trial=int(trial or 0),
            host=str(host or "run"),
            name=str(name),
            arm=arms[own[0]],
            at_ns=at_ns[own],
            columns={column: values[own] for column, values in columns.items()},
        )
        for (trial, host, name), own in sorted(places.items(), key=lambda item: tuple(map(str, item[0])))
    ]


def devices_of(trial: Trial) -> dict[str, str]:
    """The device of each arm that tailgate started, as samples name it; `auto` and `cuda` are the first card.

    What a replica said of itself decides whether `auto` was a card at all.
    """
    devices = {}
    for arm, given in mapping(trial.info.get("devices")).items():
        product = mapping(mapping(trial.info.get("startup")).get(arm)).get("device")
        name = "cpu" if product == "cpu" else str(given)
        devices[str(arm)] = "cuda:0" if name == "cuda" or (name == "auto" and product) else name
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
    return device in names or (device == "cuda:0" and not names.isdisjoint(("cuda", "auto")))


def _floats(column: pa.ChunkedArray) -> Floats:
    return np.asarray(pc.cast(column, pa.float64(), safe=False).to_numpy(zero_copy_only=False), dtype=np.float64)
