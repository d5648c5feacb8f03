"""What is said of the pressure on a run's machines, and where a trial did not have it."""

from typing import Any

import pytest

from analysis.run.pressure import faults, in_words, phases_of

WHOLE = {"memory_share": 0.3, "compute_share": 0.25}


@pytest.mark.parametrize(
    ("pressure", "parts"),
    [
        (None, ()),
        ({"memory_share": 0.0, "schedule": []}, ()),
        ({"memory_share": "much", "schedule": 3}, ()),
        (
            {"start_s": 5, "end_s": 9.5, "memory_share": 0.125, "cpus": 2.5},
            ("from 5 to 9.5 s", "12.5 % of the memory", "2.5 processors"),
        ),
    ],
)
def test_a_pressure_is_described_with_its_time_and_its_parts(pressure: Any, parts: tuple[str, ...]) -> None:
    words = in_words(phases_of({"pressure": pressure}))
    assert bool(words) == bool(parts)
    assert all(part in words for part in parts)


def trial(*rows: dict[str, Any], complete: bool = True) -> dict[str, Any]:
    arms = [{"name": "a", "replicas": ["a-0"]}, {"name": "b", "replicas": ["b-0"]}]
    devices = {"a": "cuda:0", "b": "cuda:1"}
    return {"trial": 3, "complete": complete, "arms": arms, "devices": devices, "pressure": list(rows)}


def row(kind: str, device: str = "cuda:0", **values: Any) -> dict[str, Any]:
    return {"kind": kind, "device": device, "from_s": 0.0, "start_ns": 10**18, "end_ns": 10**18 + 10**10, **values}


BOTH = ("cuda:0", "cuda:1")


def half(**values: Any) -> dict[str, Any]:
    return row("compute", share=0.5, **values)


@pytest.mark.parametrize(
    ("pressure", "rows", "expected"),
    [
        ({"memory_share": 0.3}, [row("memory", device, error=None) for device in BOTH], []),
        ({"memory_share": 0.3}, [], ["0 of 2 devices"]),
        ({"memory_share": 0.3}, [row("memory", error=None)], ["1 of 2 devices"]),
        ({"memory_share": 0.3}, [row("memory"), row("memory", "cuda:1", error="SIGKILL")], ["cuda:1: SIGKILL"]),
        ({"start_s": 5, "memory_share": 0.3}, [row("memory"), row("memory")], ["from 5 s on was on 0 of 2 devices"]),
        ({"compute_share": 0.5}, [half(had_share=0.49), half(device="cuda:1", had_share=0.1)], ["10 % of the time"]),
        ({"compute_share": 0.5}, [half(had_share=0.49), half(device="cuda:1")], ["not known"]),
        (
            {"tenant_rps": 2},
            [row("tenant", requests_per_s=2.0, answered=19), row("tenant", "cuda:1", requests_per_s=2.0, answered=4)],
            ["cuda:1: 4 of some 20 requests"],
        ),
        ({"cpus": 2}, [{"kind": "cpus", "replica": name, "from_s": 0} for name in ("a-0", "b-0")], []),
        (
            {"cpus": 2},
            [{"kind": "cpus", "replica": "a-0", "from_s": 0, "error": "no"}],
            ["1 of 2 replicas", "a-0: no"],
        ),
    ],
)
def test_a_device_without_its_pressure_is_named(
    pressure: dict[str, Any], rows: list[dict[str, Any]], expected: list[str]
) -> None:
    found = faults(phases_of({"pressure": pressure}), [trial(*rows)])
    assert len(found) == len(expected)
    for fault, said in zip(found, expected, strict=True):
        assert fault.startswith("trial 3: ")
        assert said in fault


def test_a_trial_that_was_cut_off_lacks_nothing_of_its_pressure() -> None:
    assert faults(phases_of({"pressure": WHOLE}), [trial(complete=False)]) == []


@pytest.mark.parametrize("damage", [None, 3, "x", [None, 4, {}], [{"kind": "memory", "from_s": "x", "start_ns": []}]])
def test_damaged_rows_are_none(damage: Any) -> None:
    info = {**trial(), "pressure": damage, "arms": [{"replicas": 4}], "devices": {"a": [1], "b": None}}
    phases = phases_of({"pressure": {**WHOLE, "tenant_rps": 1, "cpus": 1}})
    assert all(fault.startswith("trial 3: ") for fault in faults(phases, [info]))
