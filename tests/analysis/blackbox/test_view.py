"""Which stalls are called compiles, on the evidence of many."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from analysis.blackbox import view as module
from analysis.blackbox.firstseen import SlowFirst, shapes_of
from analysis.blackbox.stalls import COMPILE, HOST, UNKNOWN, WORK, Stall, Watch
from analysis.blackbox.view import Outside, outside_of
from tests.analysis.blackbox.test_firstseen import requests

NOTHING = SlowFirst(first=0, others=0, p_value=1.0, excess_ms=math.nan)


def stall(
    *,
    new: bool,
    chance: float,
    cause: str = UNKNOWN,
    start: int = 1,
    as_long: float = 1.0,
    longest: float = 0.5,
    work_s: float = 0.3,
    rows: tuple[bool, float] = (False, 0.0),
) -> Stall:
    return Stall(
        arm="a",
        trial=1,
        replica=None,
        start_ns=start,
        end_ns=start + 2_000_000_000,
        cause=cause,
        chance=1e-6,
        begun=True,
        trigger=7 if new else -1,
        shape=64 if new else -1,
        chance_new=chance,
        chance_as_long=as_long,
        longest=longest,
        work_s=work_s,
        new_rows=rows[0],
        chance_rows=rows[1],
        requests=np.zeros(0, dtype=np.int64),
    )


def called(monkeypatch: pytest.MonkeyPatch, *stalls: Stall) -> Outside:
    """What is made of these stalls."""
    monkeypatch.setattr(module, "look", lambda *_: ({"a": list(stalls)}, {"a": []}))
    made = requests([64, 64, 64])
    return outside_of(made, {"a": shapes_of(made, "a")}, rng=np.random.default_rng(0))["a"]


def test_stalls_that_begin_with_unlikely_first_seen_shapes_are_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    found = called(monkeypatch, *(stall(new=True, chance=0.05) for _ in range(4)), stall(new=False, chance=0.05))
    assert found.p_value < 0.01
    assert [one.cause for one in found.stalls] == [COMPILE] * 4 + [UNKNOWN]
    assert found.recompiles


def test_where_nearly_every_shape_is_new_nothing_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    found = called(monkeypatch, *(stall(new=True, chance=0.8) for _ in range(6)))
    assert not found.recompiles
    assert len(found.of_cause(UNKNOWN)) == 6


def test_one_stall_is_called_only_when_a_first_seen_shape_is_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not called(monkeypatch, stall(new=True, chance=0.05)).recompiles
    assert called(monkeypatch, stall(new=True, chance=0.002)).recompiles


def test_stalls_of_the_host_and_long_prompts_are_no_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    others = [stall(new=True, chance=0.01, cause=cause) for cause in (HOST, HOST, WORK, WORK)]
    found = called(monkeypatch, *others)
    assert found.p_value == 1.0
    assert [one.cause for one in found.stalls] == [HOST, HOST, WORK, WORK]


def test_stalls_that_their_prompts_may_have_made_are_no_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    found = called(monkeypatch, *(stall(new=True, chance=0.05, work_s=work_s) for work_s in (2.1, 9.0, math.inf)))
    assert found.p_value == 1.0
    assert [one.cause for one in found.stalls] == [UNKNOWN] * 3


def test_where_stalls_come_with_long_prompts_only_prompts_as_long_tell_what_is_chance(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stalls = [stall(new=True, chance=0.1, as_long=0.7, longest=longest) for longest in (0.95, 0.9, 0.97, 0.92)]
    assert not called(monkeypatch, *stalls).recompiles
    assert called(monkeypatch, *(replace(one, longest=0.5) for one in stalls)).recompiles
    assert called(monkeypatch, *(replace(one, chance_as_long=0.1) for one in stalls)).recompiles


def test_stalls_that_begin_when_there_is_a_row_more_than_ever_are_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    rare = [stall(new=False, chance=0.0, rows=(True, 0.05)) for _ in range(4)]
    assert [one.cause for one in called(monkeypatch, *rare).stalls] == [COMPILE] * 4
    assert not called(monkeypatch, *(replace(one, chance_rows=0.8) for one in rare)).recompiles
    assert not called(monkeypatch, *(replace(one, new_rows=False) for one in rare)).recompiles


def test_an_arm_that_compiles_for_lengths_and_for_rows_is_called_for_both(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [stall(new=True, chance=0.05, rows=(False, 0.05)) for _ in range(3)]
    rows = [stall(new=False, chance=0.05, rows=(True, 0.05)) for _ in range(3)]
    assert [one.cause for one in called(monkeypatch, *lengths, *rows).stalls] == [COMPILE] * 6


def test_what_lengths_alone_tell_is_not_lost_where_rows_are_new_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    found = called(monkeypatch, *(stall(new=True, chance=0.05, rows=(True, 0.9)) for _ in range(4)))
    assert [one.cause for one in found.stalls] == [COMPILE] * 4
    assert found.p_value < 0.01


def test_no_stall_is_no_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    found = called(monkeypatch)
    assert (found.stalls, found.p_value, found.recompiles) == ((), 1.0, False)
    assert math.isnan(found.detectable_s), "an arm without a server was not watched"


def test_an_arm_is_watched_as_well_as_its_worst_server() -> None:
    watch = Watch(silences=100, busy_s=60.0, detectable_s=0.25, witnesses=2)
    both = (watch, replace(watch, detectable_s=1.5, witnesses=0))
    found = Outside(arm="a", stalls=(), p_value=1.0, watches=both, slow=NOTHING, shapes_known=True)
    assert (found.detectable_s, found.witnesses) == (1.5, 0)
    blind = replace(found, watches=(watch, replace(watch, detectable_s=math.nan)))
    assert math.isnan(blind.detectable_s)
    blind = replace(found, watches=(replace(watch, detectable_s=math.nan), watch))
    assert math.isnan(blind.detectable_s)


def test_one_more_arm_changes_nothing_of_the_first() -> None:
    made = requests([8] * 20 + [16] * 20)
    shapes = shapes_of(made, "a")
    alone = outside_of(made, {"a": shapes}, rng=np.random.default_rng(3))["a"]
    beside = outside_of(made, {"a": shapes, "b": shapes_of(made, "b")}, rng=np.random.default_rng(3))["a"]
    assert alone.slow == beside.slow
