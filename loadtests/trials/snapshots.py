"""What replicas report once they are warm: the cost of their start, and whether all run the same thing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from analysis.records.documents import parse_json
from analysis.records.plain_values import mapping
from loadtests.experiments.whole_checks import same_kind_of_device
from servers.fields import ConfigError
from servers.rpc.telemetry_pb2 import SnapshotResponse


def start_up(snapshots: Sequence[SnapshotResponse]) -> dict[str, Any]:
    """What an arm's start cost: the slowest of its replicas for times, their sum for memory."""
    items: dict[str, int] = {}
    memory: Counter[str] = Counter()
    for snapshot in snapshots:
        for key, value in snapshot.startup_ns.items():
            items[key] = max(items.get(key, 0), value)
        memory.update(snapshot.memory_bytes)  # adds
    first = snapshots[0]
    return {
        "items_ns": items,
        "memory_bytes": dict(memory),
        "versions": dict(first.versions),
        # what no replica of the arm could see of its compilers, or one could not
        "blind_spots": sorted({text for snapshot in snapshots for text in snapshot.blind_spots}),
        "device": first.device,
        "dtype": first.dtype,
    }


def check_name(name: str, arm: str, snapshot: SnapshotResponse) -> None:
    """The replica is the one that was started as `name`. Otherwise ConfigError."""
    if (snapshot.arm, snapshot.replica) != (arm, name):
        raise ConfigError(
            f'{name} of arm "{arm}" answers as "{snapshot.replica}" of arm "{snapshot.arm}": see which program its '
            "port belongs to, and run again"
        )


def check_alike(snapshots: Mapping[str, SnapshotResponse], control: SnapshotResponse) -> None:
    """By their own reports all replicas run the same thing as the control. Otherwise ConfigError."""
    for name, snapshot in snapshots.items():
        for what, value, expected in (
            ("dtype", snapshot.dtype, control.dtype),
            ("attention", _attention(name, snapshot), _attention("the control", control)),
            ("vocabulary", snapshot.vocab_size, control.vocab_size),
            ("device", snapshot.device, control.device),
        ):
            alike = same_kind_of_device(str(value), str(expected)) if what == "device" else value == expected
            if not alike:
                raise ConfigError(
                    f"{name} runs with {what} {value} but the control with {expected}: not comparable; "
                    "make them equal, or set compare_models = true at the top if that is the question"
                )


def configuration(name: str, snapshot: SnapshotResponse) -> dict[str, Any]:
    """The tables of the arm's configuration, as the replica called `name` tells it. Otherwise ConfigError."""
    try:
        tables = parse_json(snapshot.config_json)
    except ValueError:
        tables = None
    if not isinstance(tables, dict):
        raise ConfigError(
            f"{name} tells no configuration but {snapshot.config_json[:80]!r}: is it a replica of tailgate?"
        )
    return tables


def _attention(name: str, snapshot: SnapshotResponse) -> str:
    return str(mapping(configuration(name, snapshot).get("model")).get("attention"))
