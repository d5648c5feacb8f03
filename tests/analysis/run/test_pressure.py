"""What is said of the pressure on a run's machines, and where a trial did not have it."""

from typing import Any

import pytest

from analysis.run.pressure import faults, in_words, phases_of

WHOLE = {"memory_share": 0.3, "compute_share": 0.25}
PARTS = {"schedule": [{"start_s": 0, "end_s": 60, "tenant_rps": 2}, {"start_s": 60, "end_s": 0, "cpus": 1}]}


@pytest.mark.parametrize(
    ("pressure", "sentence"),
    [
        (None, ""),
        ({"memory_share": 0.0, "schedule": []}, ""),
        (
            WHOLE,
            "Under pressure: over the whole traffic a neighbour on each device held 30 % of the memory and computed "
            "25 % of the time.",
        ),
        (
            PARTS,
            "Under pressure: from 0 to 60 s a second server on each device got 2 requests/s; from 60 s on each replica "
            "had 1 processor.",
        ),
        (
            {"start_s": 5, "end_s": 9.5, "memory_share": 0.125, "cpus": 2.5},
            "Under pressure: from 5 to 9.5 s a neighbour on each device held 12.5 % of the memory, and each replica "
            "had 2.5 processors.",
        ),
        (
            {"compute_share": 0.5, "tenant_rps": 0.5, "cpus": 1},
            "Under pressure: over the whole traffic a neighbour on each device computed 50 % of the time, a second "
            "server on each device got 0.5 requests/s, and each replica had 1 processor.",
        ),
        ("heavy", ""),
        ({"memory_share": "much", "schedule": 3}, ""),
    ],
)
def test_a_pressure_is_one_sentence(pressure: Any, sentence: str) -> None:
    assert in_words(phases_of({"pressure": pressure})) == sentence


def trial(*rows: dict[str, Any], complete: bool = True) -> dict[str, Any]:
    arms = [{"name": "a", "replicas": ["a-0"]}, {"name": "b", "replicas": ["b-0"]}]
    devices = {"a": "cuda:0", "b": "cuda:1"}
    return {"trial": 3, "complete": complete, "arms": arms, "devices": devices, "pressure": list(rows)}


def row(kind: str, device: str = "cuda:0", **values: Any) -> dict[str, Any]:
    return {"kind": kind, "device": device, "from_s": 0.0, "start_ns": 10**18, "end_ns": 10**18 + 10**10, **values}


BOTH = ("cuda:0", "cuda:1")


@pytest.mark.parametrize(
    ("pressure", "rows", "expected"),
    [
        ({"memory_share": 0.3}, [row("memory", device, error=None) for device in BOTH], []),
        ({"memory_share": 0.3}, [], ["memory from 0 s on was on 0 of 2 devices"]),
        ({"memory_share": 0.3}, [row("memory", error=None)], ["memory from 0 s on was on 1 of 2 devices"]),
        (
            {"memory_share": 0.3},
            [row("memory"), row("memory", "cuda:1", error="the neighbour ended with SIGKILL")],
            ["memory on cuda:1: the neighbour ended with SIGKILL"],
        ),
        (
            {"compute_share": 0.5},
            [row("compute", share=0.5, had_share=0.49), row("compute", "cuda:1", share=0.5, had_share=0.1)],
            ["compute on cuda:1: products took 10 % of the time, not 50 %"],
        ),
        (
            {"compute_share": 0.5},
            [row("compute", share=0.5, had_share=0.49), row("compute", "cuda:1", share=0.5)],
            ["compute on cuda:1: how much of the time products took is not known"],
        ),
        (
            {"tenant_rps": 2},
            [row("tenant", requests_per_s=2.0, answered=19), row("tenant", "cuda:1", requests_per_s=2.0, answered=4)],
            ["tenant on cuda:1: 4 of some 20 requests were answered"],
        ),
        ({"cpus": 2}, [{"kind": "cpus", "replica": name, "from_s": 0} for name in ("a-0", "b-0")], []),
        (
            {"cpus": 2},
            [{"kind": "cpus", "replica": "a-0", "from_s": 0, "error": "no process could be limited: no"}],
            ["cpus from 0 s on was on 1 of 2 replicas", "cpus on a-0: no process could be limited: no"],
        ),
        # another phase's rows do not count for this one
        (
            {"start_s": 5, "memory_share": 0.3},
            [row("memory"), row("memory")],
            ["memory from 5 s on was on 0 of 2 devices"],
        ),
    ],
)
def test_a_device_without_its_pressure_is_named(
    pressure: dict[str, Any], rows: list[dict[str, Any]], expected: list[str]
) -> None:
    phases = phases_of({"pressure": pressure})
    assert faults(phases, [trial(*rows)]) == [f"trial 3: {fault}" for fault in expected]


def test_two_names_of_one_card_are_one_device() -> None:
    info = trial(row("memory", error=None)) | {"devices": {"a": "cuda", "b": "cuda:0"}}
    assert faults(phases_of({"pressure": {"memory_share": 0.3}}), [info]) == []


def test_a_trial_that_was_cut_off_lacks_nothing_of_its_pressure() -> None:
    assert faults(phases_of({"pressure": WHOLE}), [trial(complete=False)]) == []


@pytest.mark.parametrize("damage", [None, 3, "x", [None, 4, {}], [{"kind": "memory", "from_s": "x", "start_ns": []}]])
def test_damaged_rows_are_none(damage: Any) -> None:
    info = {**trial(), "pressure": damage, "arms": [{"replicas": 4}], "devices": {"a": [1], "b": None}}
    phases = phases_of({"pressure": {**WHOLE, "tenant_rps": 1, "cpus": 1}})
    assert all(fault.startswith("trial 3: ") for fault in faults(phases, [info]))
