"""Checks of the machines: each disturbance is named and opens the gates that it concerns; quiet machines open none."""

from __future__ import annotations

import math
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tailgate.analysis.checks.check import Evidence
from tailgate.analysis.checks.machines import LEVER, host, machine_verdict, speed
from tailgate.analysis.checks.table import RULES
from tailgate.analysis.judging.comparisons import Comparisons
from tailgate.analysis.run.machine_records import MachineRecords
from tailgate.analysis.settings.gate_limits import GateLimits
from tests.fakes.machines import FakeMachines, Trouble
from tests.fakes.runs import EAGER, FakeArm, FakeRun, run_in, write_run

ARMS = (EAGER, FakeArm(name="compiled"), FakeArm(name="naive"))


MACHINE_CHECKS = ("other work", "throttling", "machine speed")


def checks_of(machines, run, **more):
    """Return the checks of the machines of a run, of which `more` may be changed."""
    run = SimpleNamespace(
        **{"arms": run.arms, "control": run.arms[0], "treatments": run.arms[1:], "limits": run.limits}
        | {"trial_name": run.trial_name, "design": "mirrored", "in_turn": False, **more}
    )
    seen = Evidence(run=run, compared=Comparisons(), stalls={}, machines=machines)
    return [check for rule in RULES if rule.name in MACHINE_CHECKS for check in rule.find(seen)]


@cache
def judged(machines, *, trials=2, seed=1, arms=2, seconds=60.0):
    """Return the verdict on the machines of a short run, and its checks."""
    run = run_of(machines, trials=trials, seed=seed, arms=arms, seconds=seconds)
    machines = MachineRecords.of(run)
    checks = checks_of(machines, run)
    return machine_verdict(machines, checks, "trial {}".format), checks


def run_of(machines, *, trials=2, seed=1, arms=2, seconds=60.0):
    with tempfile.TemporaryDirectory() as folder:
        fake = FakeRun(
            machines=machines, trials=trials, duration_s=seconds, rate=1.0, seed=seed, arms=ARMS[:arms], telemetry=False
        )
        return run_in(write_run(Path(folder, "run"), fake))


def opened(machines, **more):
    """Return (check, arm) of the checks that fail, the arm None for all arms."""
    return {(check.check, check.arm) for check in judged(machines, **more)[1] if not check.ok}


def line(machines, **more):
    return judged(machines, **more)[0].line


def fake_machines(*troubles, **more):
    return FakeMachines(troubles=troubles, **more)


def facts_of(machines, *, trials, seed=1, arms=("eager", "compiled", "other", "last")):
    """Return the machines of a run without samples, known by their references, and its arms."""
    rng = np.random.default_rng([seed, 6])
    infos = [machines.facts(arms[: machines.cards or 2], trial, rng) for trial in range(1, trials + 1)]
    rows = [SimpleNamespace(number=at, info=info, seconds=180.0) for at, info in enumerate(infos, start=1)]
    records = MachineRecords.of(SimpleNamespace(records=SimpleNamespace(machines=None), trials=rows))
    return records, SimpleNamespace(
        arms=list(arms[: machines.cards or 2]), limits=GateLimits(), trial_name="trial {}".format
    )


def speed_checks(machines, **more):
    """Return the failed checks on arms whose machines are unequally fast."""
    return [check for check in checks_of(*facts_of(machines, **more)) if check.rule is speed and check.arm is not None]


def slower(size, **more):
    return FakeMachines(troubles=(Trouble(what="slow", place="cuda:1", size=size),), **more)


# In these runs eager, the control, sits on cuda:0 and compiled on cuda:1, unless they change places.
FOREIGN = Trouble(what="foreign")
BLIND = Trouble(what="unreadable", column="foreign_processes")


def capped(*cards, **more):
    return [Trouble(what="throttle", reason="sw_power_cap", place=f"cuda:{card}", **more) for card in cards]


@pytest.mark.parametrize(
    ("troubles", "check", "arm", "named"),
    [
        ([replace(FOREIGN, size=2)], "other work", "compiled", ("2 processes", "4 GiB", "cuda:1")),
        ([replace(FOREIGN, place="cuda:0")], "other work", None, ("cuda:0",)),
        ([BLIND, FOREIGN], "other work", "compiled", ("cuda:1 was held by others before the arms started", "trial 1")),
        ([BLIND, Trouble(what="held", size=30.0)], "other work", "compiled", ("cuda:1 was held by others before",)),
        ([Trouble(what="throttle", share=0.3, trials=(2,))], "throttling", "compiled", ("18 s of the 60 s", "heat")),
        (capped(1, trials=(1,)), "throttling", "compiled", ("power cap was 30 % lower on cuda:1 than on cuda:0",)),
        (
            [*capped(1, share=0.1), Trouble(what="unreadable", column="sm_mhz")],
            "throttling",
            "compiled",
            ("power cap",),
        ),
        ([Trouble(what="slow", size=0.85)], "machine speed", "compiled", ("cuda:1", " 15")),
        ([Trouble(what="busy", place="host", size=0.4)], "other work", None, ("40",)),
        ([Trouble(what="steal", place="host", size=0.02)], "other work", None, ("2 %", "hypervisor")),
        ([Trouble(what="memory_pressure", place="host", size=0.2)], "other work", None, ("memory 20 %",)),
        ([Trouble(what="slow", place="host", size=0.9, trials=(2,))], "machine speed", None, ("the host",)),
    ],
)
def test_a_disturbance_opens_the_arms_that_it_concerns_and_is_named(troubles, check, arm, named):
    disturbed = fake_machines(*troubles, swap=False)
    assert opened(disturbed) == {(check, arm)}
    assert [word for word in named if word not in line(disturbed)] == []


@pytest.mark.parametrize(("what", "limit"), [("steal", "max_steal_pct"), ("busy", "max_other_cpu_pct")])
@pytest.mark.parametrize(("share", "most_pct", "ok"), [(0.1, 20.0, True), (0.3, 20.0, False), (0.3, 0.0, False)])
def test_what_a_host_may_lose_is_a_setting(what, limit, share, most_pct, ok):
    run = run_of(fake_machines(Trouble(what=what, place="host", size=share)), trials=1)
    machines = MachineRecords.of(run)
    checks = checks_of(machines, run, limits=GateLimits(**{limit: most_pct}))
    found = next((check for check in checks if check.rule is host), None)
    assert (found is None) is ok
    if found is not None:
        assert found.rule.slows
        assert limit in found.remedy
        assert found.shift == pytest.approx(-LEVER * math.log(1.0 - share), rel=0.05)
        (alone,) = (item for item in checks_of(machines, run, design="switchback") if item.rule is host)
        assert alone.shift is None, "all of it may have fallen on one arm's turn"


@pytest.mark.parametrize(("shared", "part"), [(True, 0.5), (False, 1.0)])
def test_a_change_of_speed_during_a_trial_moved_its_mean_by_half_where_arms_ran_at_the_same_time(shared, part):
    run = run_of(FakeMachines(troubles=(Trouble(what="slow_after", place="host", size=0.7),), host_noise=0.0), trials=1)
    checks = checks_of(MachineRecords.of(run), run, in_turn=not shared)
    found = next(check for check in checks if check.rule is speed and not check.ok)
    assert found.shift == pytest.approx(-LEVER * part * math.log(0.7), rel=0.05)


def test_other_work_is_unknown_where_an_external_server_of_the_host_cannot_be_seen():
    run = run_of(fake_machines(Trouble(what="busy", place="host", size=0.4)), trials=1)
    info = dict(run.trials[0].info)
    info["monitor"] = {
        **info["monitor"],
        "unreadable": [{"name": "vllm-0", "what": "cpu_s", "why": "a container"}],
    }
    hidden = MachineRecords.of(replace(run, trials=(replace(run.trials[0], info=info),)))
    assert [host.foreign for host in hidden.hosts] == [None]
    checks = checks_of(hidden, run)
    assert machine_verdict(hidden, checks, "trial {}".format).verdict == "partly monitored"
    assert checks == []


@pytest.mark.parametrize(
    ("trouble", "check", "named"),
    [
        (Trouble(what="power_limit", size=0.6), "throttling", ("power limit was 40 % lower on cuda:1",)),
        (Trouble(what="clock", size=0.85), "throttling", ("highest clock under load was 15 % lower on cuda:1",)),
        (Trouble(what="slow_after", size=0.9, trials=(1,)), "machine speed", ("lower on cuda:1 after trial 1",)),
        (
            Trouble(what="slow", size=0.9, trials=(2,)),
            "machine speed",
            ("on cuda:1 in trial 2 than in trial 1",),
        ),
    ],
)
def test_a_card_with_other_limits_or_speeds_is_named(trouble, check, named):
    disturbed = fake_machines(trouble, swap=False)
    assert (check, "compiled") in opened(disturbed)
    assert [word for word in named if word not in line(disturbed)] == []


def test_a_card_that_slows_down_next_to_a_steady_one_counts_once():
    slowing = FakeMachines(troubles=(Trouble(what="slow_after", size=0.8),), swap=False, card_noise=0.0, host_noise=0.0)
    (found,) = speed_checks(slowing, trials=2)
    assert found.shift == pytest.approx(-LEVER * 0.5 * math.log(0.8))


@pytest.mark.parametrize("reason", ["hw_thermal_slowdown", "hw_power_brake_slowdown", "sync_boost"])
def test_every_reason_of_the_hardware_to_throttle_counts(reason):
    assert opened(fake_machines(Trouble(what="throttle", reason=reason, share=0.3), swap=False)) == {
        ("throttling", "compiled")
    }


class TestFairness:
    @pytest.mark.parametrize(
        "undisturbed",
        [
            fake_machines(
                replace(FOREIGN, place="cuda:2"), Trouble(what="slow", place="cuda:2", size=0.5), cards=3, swap=False
            ),
            fake_machines(*capped(1, share=0.1), swap=False),
        ],
        ids=["a card without an arm", "a power cap that hardly slows"],
    )
    def test_disturbances_that_concern_no_arm_leave_the_machines_quiet(self, undisturbed):
        assert (judged(undisturbed)[0].verdict, opened(undisturbed)) == ("quiet", set())

    def test_of_three_arms_only_the_one_on_the_card_is_open(self):
        hot = fake_machines(Trouble(what="throttle", place="cuda:2"), cards=3, swap=False)
        assert opened(hot, arms=3) == {("throttling", "naive")}

    def test_a_slower_card_is_balanced_by_changing_places(self):
        slow = fake_machines(Trouble(what="slow", size=0.85))
        assert (judged(slow)[0].verdict, opened(slow)) == ("quiet", set())

    def test_an_odd_number_of_trials_leaves_a_third_of_a_slower_card(self):
        assert opened(fake_machines(Trouble(what="slow", size=0.9)), trials=3) == set()
        assert ("machine speed", "compiled") in opened(fake_machines(Trouble(what="slow", size=0.82)), trials=3)

    def test_momentary_noise_is_among_trials_and_a_slow_card_is_not(self):
        moment = speed_checks(FakeMachines(host_noise=0.15, cards=4), trials=6)
        assert moment
        assert all(check.among_trials for check in moment)
        # Six trials on four cards leave a sixth of a slow card: of 15 %, less than the limit.
        assert all(check.among_trials for check in speed_checks(slower(0.85, cards=4, host_noise=0.15), trials=6))
        for stays in (slower(0.6, cards=4, host_noise=0.15), slower(0.85, cards=4, swap=False)):
            assert any(not check.among_trials for check in speed_checks(stays, trials=6))

    @pytest.mark.parametrize(
        "troubles",
        [[*capped(1, trials=(1,)), *capped(0, trials=(2,))], capped(1), capped(0, 1)],
        ids=["it follows the arm", "it stays with a card that changes arms", "on both cards"],
    )
    def test_a_power_cap_that_is_fair_opens_nothing(self, troubles):
        assert opened(fake_machines(*troubles)) == set()

    def test_heat_on_both_cards_alike_opens_all(self):
        both = fake_machines(*(Trouble(what="throttle", place=f"cuda:{card}") for card in (0, 1)), swap=False)
        assert opened(both) == {("throttling", None), ("throttling", "compiled")}

    def test_a_second_of_throttling_in_a_long_trial_opens_nothing(self):
        assert opened(fake_machines(Trouble(what="throttle", share=0.005)), seconds=200.0) == set()


@pytest.mark.parametrize(
    ("partial", "words"),
    [
        (fake_machines(*(replace(BLIND, place=f"cuda:{card}") for card in (0, 1))), "cuda:0, cuda:1"),
        (fake_machines(referenced=False), "no reference"),
        (fake_machines(sampled=False), "which was not sampled"),
    ],
)
def test_machines_that_were_sampled_in_part_open_nothing_and_are_not_quiet(partial, words):
    assert (judged(partial)[0].verdict, opened(partial)) == ("partly monitored", set())
    assert words in line(partial)


def test_machines_without_samples_are_not_quiet_and_have_no_check():
    judgement, checks = judged(None)
    assert (judgement.verdict, checks) == ("not monitored", [])


@pytest.mark.parametrize(("noise", "most"), [(0.008, 0), (0.012, 15)])
def test_the_noise_of_a_good_reference_hardly_ever_looks_like_drift(noise, most):
    runs = (checks_of(*facts_of(FakeMachines(host_noise=noise), trials=6, seed=seed)) for seed in range(100))
    assert sum(any(not check.ok for check in checks) for checks in runs) <= most


@pytest.mark.parametrize(("cards", "locked"), [(2, True), (1, False), (0, True)])
@pytest.mark.parametrize("seed", range(5))
def test_quiet_machines_open_nothing(cards, locked, seed):
    quiet = FakeMachines(cards=cards, locked=locked)
    assert (judged(quiet, seed=seed)[0].verdict, opened(quiet, seed=seed)) == ("quiet", set())
