"""Plans follow from their seeds, and over many seeds everything that can be hit is hit in every phase."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.faults import devices, memory_groups
from tests.faults.fault import PHASES
from tests.faults.plan import FAMILIES, KINDS, covering, plan
from tests.faults.signals import roles


def test_a_plan_follows_from_its_seed_and_says_what_goes_wrong() -> None:
    assert str(plan(7)) == str(plan(7))
    assert len({str(plan(seed)) for seed in range(50)}) == 50
    assert all(moment.fault.name in str(plan(7)) for moment in plan(7).moments)


def test_over_many_seeds_all_that_can_be_hit_is_hit_in_every_phase() -> None:
    plans = [plan(seed) for seed in range(3000)]
    assert {item.kind for item in plans} == set(KINDS)
    hit = Counter((item.kind, moment.fault.name) for item in plans for moment in item.moments)
    for kind in KINDS:
        for role in roles(kind):
            for number in ("SIGKILL", "SIGTERM", "SIGSTOP"):
                assert hit[kind, f"{number} of {role}"], (kind, number, role)
    assert {moment.phase for item in plans for moment in item.moments} >= set(PHASES)
    families = Counter(item.family for item in plans)
    assert families["safety"] > families["liveness"] > families["none"] > 100
    bad = sum(item.is_bad for item in plans)
    assert 0.3 < bad / len(plans) < 0.7


def test_what_a_liveness_plan_hits_goes_on_or_is_not_needed() -> None:
    for seed in range(500):
        item = plan(seed)
        if item.family == "liveness":
            assert item.moments
            for moment in item.moments:
                assert moment.lasts_s is not None or moment.fault.name.split(" of ")[1] in ("page", "watcher")


@pytest.mark.parametrize("seed", range(200))
def test_quick_plans_take_seconds_and_all_state_a_limit(seed: int) -> None:
    quick = plan(seed, quick=True)
    assert quick.kind not in ("engine", "users' ramp")
    assert sum(moment.lasts_s or 0.0 for moment in quick.moments) <= 6.0
    for item in (quick, plan(seed)):
        assert item.duration_s < item.limit_s < 500.0


def test_nobody_is_hit_before_or_after_it_is_there() -> None:
    for seed in range(1000):
        for moment in plan(seed).moments:
            if moment.fault.name.endswith(" of load"):
                assert moment.phase not in ("preparing", "starting arms", "judging"), plan(seed)


def test_the_plans_of_make_test_cover_all_quick_kinds_and_as_many_faults_as_they_are() -> None:
    plans = [plan(seed, quick=True) for seed in covering(20)]
    assert len({item.seed for item in plans}) == 20
    assert {item.kind for item in plans} == set(KINDS) - {"engine", "users' ramp"}
    assert {item.family for item in plans} == {"safety", "liveness"}
    assert len({moment.fault.name for item in plans for moment in item.moments}) >= 18


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_each_family_alone_plans_faults_for_every_seed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "why_no_device", lambda: "")
    monkeypatch.setattr(memory_groups, "why_no_groups", lambda: "")
    for seed in range(100):
        item = plan(seed, families=(name,), kind="engine" if name == "devices" else "run")
        # Whoever lost its memory need not go on.
        assert item.moments or item.family == "none" or (name in ("devices", "groups") and item.family == "liveness")
        assert item.limit_s < 500.0
