"""Damage to any file of a run: no crash, no traceback, no false PASS, and no changed verdict without a reason."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.damage import DAMAGES, attempts
from tests.fakes.runs import EAGER, Compile, FakeArm, FakeRun, write_run

GATES = {"draws": 99, "metrics": ["e2e"], "quantile": 0.9, "min_blocks": 4, "margin": 1.0, "max_error_pct": 5}
NAIVE = FakeArm(name="compiled", compiles=[Compile(at_s=40, seconds=4), Compile(at_s=90, seconds=4)])
LENIENT = {"max_stall_s": 1000, "max_stall_s_per_min": 60, "max_requests_hit_pct": 100}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    quiet = FakeRun(stated=True, duration_s=150, rate=1, gates=GATES)
    stalled = FakeRun(stated=True, duration_s=150, rate=1, gates={**GATES, **LENIENT}, arms=(EAGER, NAIVE))
    return [write_run(folder / "quiet", quiet), write_run(folder / "stalled", stalled)]


@pytest.mark.parametrize("tries", [20])
def test_no_damage_ends_the_judge_or_makes_a_pass_or_goes_without_a_word(tries: int, runs: list[Path]) -> None:
    found = list(attempts(runs, tries=tries, seed=11, processes=2))
    assert [item for item in found if item.fault] == []
    assert len({item.damage for item in found}) == len(DAMAGES)
    assert sum(item.changed for item in found) > 0.3 * tries
    assert Counter(item.ended for item in found)["judged"] > 0.5 * tries


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: str(damage.__name__))
def test_damage_changes_the_file(damage) -> None:  # type: ignore[no-untyped-def]
    whole = bytes(range(256)) * 4
    changed = 0
    for seed in range(50):
        content = bytearray(whole)
        damage(content, random.Random(seed))
        changed += content != whole
    assert changed >= 35
