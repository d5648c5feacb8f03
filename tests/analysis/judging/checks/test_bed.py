"""Each trouble of a machine is seen and named, opens whose gates it concerns, and a quiet one opens nothing."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from analysis.judging.bed import judge_bed
from analysis.judging.checks.bed import check_bed
from analysis.records.run_records import read_run
from analysis.run.run import Run
from analysis.run.test_bed import TestBed as Bed
from tests.fakes.beds import FakeBed, Trouble
from tests.fakes.runs import EAGER, FakeArm, FakeRun, write_run

ARMS = (EAGER, FakeArm(name="compiled"), FakeArm(name="naive"))


@cache
def judged(bed, *, trials=2, seed=1, arms=2, seconds=60.0):
    """(the judgement on the bed of a short run, its checks)."""
    with tempfile.TemporaryDirectory() as folder:
        fake = FakeRun(
            bed=bed, trials=trials, duration_s=seconds, rate=1.0, seed=seed, arms=ARMS[:arms], telemetry=False
        )
        run = Run.of(read_run(write_run(Path(folder, "run"), fake)))
        return judge_bed(Bed.of(run), run.arms, run.limits.max_bed_drift)


def opened(bed, **more):
    """{(check, arm)} of the checks that fail, None for all arms."""
    return {(check.check, check.arm) for check in judged(bed, **more)[1] if not check.ok}


def line(bed, **more):
    return judged(bed, **more)[0].line


def bed(*troubles, **more):
    return FakeBed(troubles=troubles, **more)


def facts_of(bed, *, trials, seed=1, arms=("eager", "compiled", "other", "last")):
    """The bed of a run without samples: what its references say."""
    rng = np.random.default_rng([seed, 6])
    infos = [bed.facts(arms[: bed.cards or 2], trial, rng) for trial in range(1, trials + 1)]
    rows = [SimpleNamespace(number=at, info=info, seconds=180.0) for at, info in enumerate(infos, start=1)]
    return Bed.of(SimpleNamespace(records=SimpleNamespace(bed=None), trials=rows)), list(arms[: bed.cards or 2])


def apart_of(bed, **more):
    """The failed checks *bed apart* of the run."""
    checks, _ = check_bed(*facts_of(bed, **more), 0.05)
    return [check for check in checks if check.check == "bed apart" and not check.ok]


def slower(size, **more):
    """A bed of which one card is slower in all trials."""
    return FakeBed(troubles=(Trouble(what="slow", place="cuda:1", size=size),), **more)


# In these runs eager, the control, sits on cuda:0 and compiled on cuda:1, unless they change places.
class TestTroublesAreSeenAndNamed:
    def test_a_foreign_process_on_a_card(self):
        alone = bed(Trouble(what="foreign", size=2), swap=False)
        assert opened(alone) == {("foreign work", "compiled")}
        assert "2 processes of others (python, pid 4711) with 4 GiB were on cuda:1 throughout trial 1" in line(alone)

    @pytest.mark.parametrize(
        ("what", "size", "named"),
        [
            ("power_limit", 0.6, "cuda:1 had a power limit of 420 W in trial 1, cuda:0 of 700 W"),
            ("clock", 0.85, "cuda:1 had a highest clock under load of 1,683 MHz in trial 1, cuda:0 of 1,980 MHz"),
        ],
    )
    def test_a_lower_limit_on_one_card(self, what, size, named):
        lower = bed(Trouble(what=what, size=size), swap=False)
        assert ("device settings", "compiled") in opened(lower)
        assert any(named in item.text for item in judged(lower)[0].disturbances)

    @pytest.mark.parametrize(
        ("what", "size", "check", "named"),
        [
            ("busy", 0.4, "busy host", "work that is not of the run took 40"),
            ("steal", 0.04, "steal", "the hypervisor took 4 % of the processors' time from the host in trial"),
            ("memory_pressure", 0.2, "busy host", "tasks waited for memory 20 % of the time on the host"),
        ],
    )
    def test_a_busy_host_concerns_all_arms(self, what, size, check, named):
        busy = bed(Trouble(what=what, place="host", size=size))
        assert opened(busy) == {(check, None)}
        assert named in line(busy)

    @pytest.mark.parametrize(
        ("reason", "named"),
        [
            ("hw_thermal_slowdown", "heat, by the hardware"),
            ("hw_power_brake_slowdown", "power brake"),
            ("sync_boost", "sync boost"),
        ],
    )
    def test_a_throttled_card(self, reason, named):
        hot = bed(Trouble(what="throttle", reason=reason, share=0.3, trials=(2,)), swap=False)
        assert opened(hot) == {("throttling", "compiled")}
        assert line(hot) == f"Disturbed: cuda:1 was throttled for 18 s of the 60 s of trial 2 ({named})."

    def test_a_slow_neighbour_card(self):
        slow = bed(Trouble(what="slow", size=0.85), swap=False)
        assert opened(slow) == {("bed apart", "compiled")}
        assert "cuda:1 read memory 15" in line(slow) or "cuda:1 multiplied matrices 15" in line(slow)

    def test_a_card_far_below_its_kind(self):
        faulty = bed(Trouble(what="slow", place="cuda:0", size=0.6), Trouble(what="slow", size=0.6))
        assert opened(faulty) == {("slow bed", None)}
        assert "% of the speed that NVIDIA H200 is known for" in line(faulty)

    def test_a_card_that_slows_within_a_trial(self):
        tired = bed(Trouble(what="slow_after", size=0.9, trials=(1,)), swap=False)
        assert ("bed drift", "compiled") in opened(tired)
        assert "slower after trial 1 than before it" in line(tired)

    def test_a_card_that_slows_between_trials(self):
        aged = bed(Trouble(what="slow", size=0.9, trials=(2,)), swap=False)
        assert ("bed drift", "compiled") in opened(aged)
        assert "slower in trial 2 than in trial 1" in line(aged)

    def test_a_host_that_slows_is_told_from_a_card_and_concerns_all(self):
        slow = bed(Trouble(what="slow", place="host", size=0.9, trials=(2,)))
        assert opened(slow) == {("bed drift", None)}
        assert line(slow).startswith("Disturbed: the host beside cuda:")


class TestFairness:
    def test_what_disturbs_the_controls_card_concerns_all(self):
        assert opened(bed(Trouble(what="foreign", place="cuda:0"), swap=False)) == {("foreign work", None)}

    def test_what_disturbs_a_card_that_no_arm_uses_concerns_none(self):
        troubles = (Trouble(what="foreign", place="cuda:2"), Trouble(what="slow", place="cuda:2", size=0.5))
        idle = bed(*troubles, cards=3, swap=False)
        assert (judged(idle)[0].verdict, opened(idle)) == ("quiet", set())

    def test_of_three_arms_only_the_one_on_the_card_is_open(self):
        hot = bed(Trouble(what="throttle", place="cuda:2"), cards=3, swap=False)
        assert opened(hot, arms=3) == {("throttling", "naive")}

    def test_a_slower_card_is_balanced_by_changing_places_and_still_named(self):
        slow = bed(Trouble(what="slow", size=0.85))
        assert opened(slow) == set()
        assert "which the arms' changing places balances" in line(slow)
        assert judged(slow)[0].verdict == "disturbed"

    def test_an_odd_number_of_trials_balances_what_a_third_of_it_still_allows(self):
        assert opened(bed(Trouble(what="slow", size=0.9)), trials=3) == set()
        assert ("bed apart", "compiled") in opened(bed(Trouble(what="slow", size=0.82)), trials=3)

    def test_what_is_the_moments_is_in_what_trials_differ_by_and_what_stays_with_a_card_is_not(self):
        moment = apart_of(FakeBed(host_noise=0.15, cards=4), trials=6)
        assert moment
        assert all(check.among_trials for check in moment)
        # Six trials on four cards leave a sixth of what a slow one does: of 15 % that is less than the limit.
        assert all(check.among_trials for check in apart_of(slower(0.85, cards=4, host_noise=0.15), trials=6))
        for stays in (slower(0.6, cards=4, host_noise=0.15), slower(0.85, cards=4, swap=False)):
            checks = apart_of(stays, trials=6)
            assert any(not check.among_trials for check in checks)

    def test_a_power_cap_that_follows_the_arm_over_cards_is_its_own(self):
        # The same arm draws the most power, on either card, at one limit.
        follows = bed(
            Trouble(what="throttle", reason="sw_power_cap", place="cuda:1", trials=(1,)),
            Trouble(what="throttle", reason="sw_power_cap", place="cuda:0", trials=(2,)),
        )
        assert opened(follows) == set()
        now_and_then = bed(Trouble(what="throttle", reason="sw_power_cap", trials=(1,)))
        assert opened(now_and_then) == {("throttling", "compiled")}
        assert "(power cap), to 1,386 MHz in the mean where cuda:0 had 1,980 MHz" in line(now_and_then)

    def test_a_power_cap_that_stays_with_a_card_is_balanced_by_changing_places(self):
        stays = bed(Trouble(what="throttle", reason="sw_power_cap"))
        assert opened(stays) == set()
        assert "which the arms' changing places balances" in line(stays)

    def test_a_power_cap_that_hardly_slows_a_card_is_no_trouble(self):
        # For a tenth of the time, by 30 %: less than the reference may drift.
        brief = bed(Trouble(what="throttle", reason="sw_power_cap", share=0.1), swap=False)
        assert (judged(brief)[0].verdict, opened(brief)) == ("quiet", set())

    def test_a_power_cap_whose_clock_is_unknown_is_taken_for_one_that_matters(self):
        blind = bed(
            Trouble(what="throttle", reason="sw_power_cap", share=0.1),
            Trouble(what="unreadable", column="sm_mhz"),
            swap=False,
        )
        assert opened(blind) == {("throttling", "compiled")}

    def test_a_power_cap_on_both_cards_alike_is_what_the_cards_do(self):
        both = bed(*(Trouble(what="throttle", reason="sw_power_cap", place=f"cuda:{card}") for card in (0, 1)))
        assert opened(both) == set()

    def test_heat_on_both_cards_alike_still_opens(self):
        both = bed(*(Trouble(what="throttle", place=f"cuda:{card}") for card in (0, 1)), swap=False)
        assert opened(both) == {("throttling", None), ("throttling", "compiled")}

    def test_a_second_of_throttling_in_a_long_trial_is_no_trouble(self):
        assert opened(bed(Trouble(what="throttle", share=0.005)), seconds=200.0) == set()

    def test_what_the_experiment_itself_weighs_on_the_host_is_no_disturbance(self):
        busy = bed(Trouble(what="busy", place="host", size=0.4), pressure=("compute",))
        assert (judged(busy)[0].verdict, opened(busy)) == ("quiet", set())


class TestUnknown:
    def test_who_else_was_there_cannot_be_told(self):
        blind = bed(*(Trouble(what="unreadable", place=f"cuda:{card}", column="foreign_processes") for card in (0, 1)))
        judgement, checks = judged(blind)
        assert judgement.verdict == "partly watched"
        assert "cannot tell: who else was on cuda:0, cuda:1" in judgement.line
        assert "foreign work" not in {check.check for check in checks}

    def test_what_ran_before_the_arms_counts_where_nothing_else_tells(self):
        blind = bed(Trouble(what="unreadable", column="foreign_processes"), Trouble(what="foreign", size=1), swap=False)
        assert opened(blind) == {("foreign work", "compiled")}
        assert "python, pid 4711 ran on cuda:1 before the arms of trial 1 started" in line(blind)

    def test_memory_that_somebody_held_before_the_arms_shows_that_he_was_there(self):
        hidden = Trouble(what="unreadable", column="foreign_processes")
        blind = bed(hidden, Trouble(what="held", size=30.0), swap=False)
        assert opened(blind) == {("foreign work", "compiled")}
        assert line(blind).startswith("Disturbed: somebody held 30 GiB of cuda:1 before the arms of trial 1 started")

    @pytest.mark.parametrize(
        ("more", "said"),
        [
            ({"referenced": False}, "how fast the machines were, since no reference was measured"),
            ({"sampled": False}, "nothing was sampled"),
        ],
    )
    def test_half_a_bed_is_partly_watched(self, more, said):
        half = bed(**more)
        assert judged(half)[0].verdict == "partly watched"
        assert said in line(half)
        assert opened(half) == set()

    def test_a_run_that_nobody_watched_is_not_quiet_and_has_no_check(self):
        judgement, checks = judged(None)
        assert (judgement.verdict, checks) == ("not watched", [])
        assert judgement.line == "Not watched: nobody recorded how the machines of this run behaved."


class TestQuiet:
    def test_a_quiet_bed_says_what_it_was(self):
        assert line(bed()).startswith("Quiet: 2 × NVIDIA H200, clocks 1,980 MHz throughout, steal 0.0 %, reference wit")

    def test_a_host_without_cards_may_be_quiet_too(self):
        alone = bed(cards=0)
        assert (judged(alone)[0].verdict, opened(alone)) == ("quiet", set())
        assert line(alone).startswith("Quiet: 16 processors, steal 0.0 %, reference within")

    @pytest.mark.parametrize(("noise", "most"), [(0.008, 0), (0.012, 15)])
    def test_the_noise_of_a_good_reference_hardly_ever_looks_like_drift(self, noise, most):
        opened_runs = 0
        for seed in range(100):
            checks, _ = check_bed(*facts_of(FakeBed(host_noise=noise), trials=6, seed=seed), 0.05)
            opened_runs += any(not check.ok for check in checks)
        assert opened_runs <= most

    def test_quiet_beds_of_many_seeds_open_nothing(self):
        beds = [
            (FakeBed(cards=cards, locked=locked), seed)
            for cards, locked in ((2, True), (1, False), (0, True))
            for seed in range(5)
        ]
        verdicts = [
            (judged(one, seed=seed, trials=2)[0].verdict, opened(one, seed=seed, trials=2)) for one, seed in beds
        ]
        assert set(map(str, verdicts)) == {str(("quiet", set()))}
