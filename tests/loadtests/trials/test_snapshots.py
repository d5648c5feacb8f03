from __future__ import annotations

import json

import pytest

from loadtests.trials.snapshots import check_alike, check_name, start_up
from servers.fields import ConfigError
from servers.rpc.telemetry_pb2 import SnapshotResponse


def snapshot(*, dtype: str = "float32", device: str = "cuda:0", vocab: int = 256, attention: str = "sdpa", **more: int):
    return SnapshotResponse(
        dtype=dtype,
        device=device,
        vocab_size=vocab,
        config_json=json.dumps({"model": {"attention": attention}}),
        startup_ns={"load": more.get("load_ns", 1)},
        memory_bytes={"weights": more.get("weights", 10)},
    )


def test_the_slowest_replica_is_an_arms_start_and_memory_adds_up() -> None:
    cost = start_up([snapshot(load_ns=5, weights=10), snapshot(load_ns=9, weights=12)])
    assert (cost["items_ns"], cost["memory_bytes"]) == ({"load": 9}, {"weights": 22})


def test_what_one_replica_cannot_see_its_arm_cannot() -> None:
    blind = SnapshotResponse(blind_spots=["torch 9 is not read"])
    assert start_up([snapshot(), blind, blind])["blind_spots"] == ["torch 9 is not read"]
    assert start_up([snapshot()])["blind_spots"] == []


def test_two_devices_of_one_kind_are_alike() -> None:
    check_alike({"new-0": snapshot(device="cuda:1")}, snapshot())


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (snapshot(dtype="float16"), "dtype float16 but the control with float32"),
        (snapshot(attention="eager"), "attention eager but the control with sdpa"),
        (snapshot(vocab=300), "vocabulary 300 but the control with 256"),
        (snapshot(device="cpu"), "device cpu but the control with cuda:0"),
    ],
)
def test_a_replica_that_runs_something_else_is_named(other: SnapshotResponse, what: str) -> None:
    with pytest.raises(ConfigError, match=f"new-0 runs with {what}: not comparable"):
        check_alike({"new-0": other}, snapshot())


@pytest.mark.parametrize("said", ["", "{", "[]", "[" * 5000, "1" * 5000])
def test_a_configuration_that_cannot_be_read_is_one_line(said: str) -> None:
    with pytest.raises(ConfigError, match=r"compiled-0 tells no configuration but .*: is it a replica") as caught:
        check_alike({"compiled-0": SnapshotResponse(config_json=said)}, snapshot())
    assert len(str(caught.value)) < 200


def test_a_replica_that_answers_under_another_name_is_none_of_the_run() -> None:
    check_name("new-0", "new", SnapshotResponse(arm="new", replica="new-0"))
    with pytest.raises(ConfigError, match='new-0 of arm "new" answers as "eager-0" of arm "eager"'):
        check_name("new-0", "new", SnapshotResponse(arm="eager", replica="eager-0"))
