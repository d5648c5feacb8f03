"""A figure passes where it is surely within its limit, fails where it is surely worse, and is open in between."""

import json
from dataclasses import replace

import pytest

from analysis.records.tables import RecordError
from analysis.releases.comparison import arms_to_compare, compare_releases
from analysis.releases.history import History
from analysis.report.release import release_html
from analysis.settings.release_limits import ReleaseLimits
from tests.fakes.releases import LEVELS, Build, release

BUILD = Build()
ARMS = {"compiled": "compiled"}


def changed(build=BUILD, **factors):
    return replace(build, levels={key: level * factors.get(key, 1.0) for key, level in build.levels.items()})


def compared(baseline, candidate, *, days=1, seed=1, limits=None, **how):
    earlier = tuple(release(baseline, day=day, seed=seed) for day in range(days))
    later = release(candidate, day=days, seed=seed, **how)
    return compare_releases(History(releases=earlier), later, arms=ARMS, limits=limits or ReleaseLimits())


def row(document, figure):
    return next(item for item in document["figures"] if item["figure"] == figure)


# --- The reach --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_planted_decode_time_of_a_tenth_more_fails(seed: int) -> None:
    document = compared(BUILD, changed(p50_tpot_ms=1.1), seed=seed)
    assert (document["overall"], document["exit_code"]) == ("FAIL", 99)
    assert row(document, "p50_tpot_ms")["verdict"] == "FAIL"
    assert "decode time" in document["headline"]


@pytest.mark.parametrize("seed", range(5))
def test_planted_memory_of_a_third_more_fails_with_one_trial_each(seed: int) -> None:
    single = replace(BUILD, trials=1)
    document = compared(single, changed(single, process_peak_bytes=1.3), seed=seed)
    assert row(document, "process_peak_bytes")["verdict"] == "FAIL"


def test_days_that_differ_more_than_is_taken_for_granted_are_learnt_from_the_folder() -> None:
    build = replace(BUILD, day_spread=0.03)
    failed = [seed for seed in range(60) if compared(build, build, days=8, seed=seed)["overall"] == "FAIL"]
    assert len(failed) <= 3


def test_equal_builds_pass_with_enough_trials() -> None:
    build = replace(BUILD, trials=10, day_spread=0.003)
    assert compared(build, build, days=6)["overall"] == "PASS"


def test_slight_worsening_within_the_limit_never_fails_for_being_sure() -> None:
    """Three percent slower for sure, with five allowed."""
    build = replace(BUILD, trials=10, day_spread=0.0, start_spread=0.001, luck=0.001)
    judged = compared(build, changed(build, p50_tpot_ms=1.03), limits=ReleaseLimits(day_spread=0.002))
    assert row(judged, "p50_tpot_ms")["verdict"] == "PASS"
    assert row(judged, "p50_tpot_ms")["p_worse"] < 0.05


def test_single_noisy_trials_decide_only_big_differences() -> None:
    noisy = replace(BUILD, trials=1, luck=0.08)
    assert row(compared(noisy, changed(noisy, p99_e2e_ms=1.15)), "p99_e2e_ms")["verdict"] == "INCONCLUSIVE"
    assert row(compared(noisy, changed(noisy, p99_e2e_ms=3.0)), "p99_e2e_ms")["verdict"] == "FAIL"


def test_tail_of_too_few_requests_in_one_trial_is_open() -> None:
    few = replace(BUILD, trials=1, luck=None)
    judged = row(compared(few, few), "p99_ttft_ms")
    assert judged["verdict"] == "INCONCLUSIVE"
    assert (judged["low"], judged["high"]) == (None, None)
    assert "more trials would set some" in judged["reason"]


def test_open_gate_says_how_many_trials_would_do() -> None:
    build = replace(BUILD, levels={"p99_e2e_ms": 4000.0}, trials=3, start_spread=0.06, day_spread=0.0)
    judged = [row(compared(build, build, seed=seed), "p99_e2e_ms") for seed in range(20)]
    needed = [item["needed_trials"] for item in judged if item["verdict"] == "INCONCLUSIVE" and item["needed_trials"]]
    assert len(needed) > 5
    assert min(needed) >= 3
    assert all(item["needed_trials"] is None for item in judged if item["verdict"] == "PASS")


@pytest.mark.parametrize("seed", range(5))
def test_limits_beyond_any_number_are_none(seed: int) -> None:
    scattered = replace(BUILD, trials=2, start_spread=2.0, day_spread=0.0)
    document = compared(scattered, scattered, seed=seed, limits=ReleaseLimits(alpha=0.0001))
    assert row(document, "p50_tpot_ms")["verdict"] == "INCONCLUSIVE"
    json.dumps(document, allow_nan=False)
    assert release_html(document)


# --- More is better, less is better -----------------------------------------------------------------------------------


def test_goodput_that_falls_fails_and_that_rises_passes() -> None:
    build = replace(BUILD, levels={"good_pct": 90.0})
    assert row(compared(build, changed(build, good_pct=0.8)), "good_pct")["verdict"] == "FAIL"
    assert row(compared(build, changed(build, good_pct=1.05)), "good_pct")["verdict"] == "PASS"


def test_goodput_of_nothing_fails() -> None:
    build = replace(BUILD, levels={"good_pct": 90.0})
    assert row(compared(build, changed(build, good_pct=0.0)), "good_pct")["verdict"] == "FAIL"


def test_latency_that_falls_passes() -> None:
    judged = row(compared(BUILD, changed(p99_e2e_ms=0.6)), "p99_e2e_ms")
    assert judged["verdict"] == "PASS"
    assert judged["ratio"] == pytest.approx(0.6, abs=0.05)


# --- Counts -----------------------------------------------------------------------------------------------------------


def counting(**counts):
    return replace(BUILD, levels={}, counts=counts)


@pytest.mark.parametrize(
    ("before", "now", "verdict"),
    [
        ([12, 12], [12, 12], "PASS"),
        ([12, 12], [13, 13], "FAIL"),
        ([12, 12], [12, 13], "INCONCLUSIVE"),
        ([12, 13], [13, 13], "PASS"),
        ([12], [9], "PASS"),
    ],
)
def test_one_compile_more_at_each_start_fails(before, now, verdict) -> None:
    document = compared(counting(warmup_compiles=before), counting(warmup_compiles=now))
    assert row(document, "warmup_compiles")["verdict"] == verdict


@pytest.mark.parametrize(
    ("before", "now", "verdict"),
    [
        ([0, 0, 0], [0, 0, 0], "PASS"),
        ([0, 0, 0], [0, 1, 0], "FAIL"),
        ([5, 6, 5], [6, 5, 6], "INCONCLUSIVE"),  # the traffic's luck
        ([5, 6, 5], [15, 14, 16], "FAIL"),
        ([5, 6, 5], [2, 1, 0], "PASS"),
    ],
)
def test_recompiles_where_there_were_none_fail_and_where_there_were_some_are_weighed(before, now, verdict) -> None:
    document = compared(counting(recompiles=before), counting(recompiles=now))
    assert row(document, "recompiles")["verdict"] == verdict


def test_more_compiles_may_be_allowed() -> None:
    limits = ReleaseLimits(limits={"warmup_compiles": 2})
    document = compared(counting(warmup_compiles=[12]), counting(warmup_compiles=[14]), limits=limits)
    assert row(document, "warmup_compiles")["verdict"] == "PASS"


# --- The machine ------------------------------------------------------------------------------------------------------


def test_slower_machine_opens_the_fail_that_it_explains() -> None:
    document = compared(BUILD, BUILD, slower=1.2)
    judged = row(document, "p50_tpot_ms")
    assert judged["verdict"] == "INCONCLUSIVE"
    assert "card and host were slower (memory read ×1.20, Python ×1.20)" in judged["doubt"]
    assert judged["corrected"][0] < 1.05 < judged["corrected"][1]
    assert document["overall"] != "FAIL"
    assert "slower" in " ".join(document["notes"])


def test_slower_machine_does_not_excuse_more_than_it_explains() -> None:
    judged = row(compared(BUILD, changed(p50_tpot_ms=1.4), slower=1.12), "p50_tpot_ms")
    assert judged["verdict"] == "FAIL"


def test_faster_machine_opens_the_pass_that_it_may_have_made() -> None:
    document = compared(BUILD, changed(p50_tpot_ms=1.1, p99_e2e_ms=1.1), slower=1 / 1.15)
    assert row(document, "p50_tpot_ms")["verdict"] == "INCONCLUSIVE"
    assert row(document, "p99_e2e_ms")["verdict"] == "INCONCLUSIVE"
    assert "faster" in row(document, "p99_e2e_ms")["doubt"]


def test_tail_on_a_slower_machine_passes_where_it_is_good_all_the_same() -> None:
    judged = row(compared(BUILD, changed(p99_e2e_ms=0.5), slower=1.1), "p99_e2e_ms")
    assert judged["verdict"] == "PASS"


def test_memory_does_not_care_for_the_speed_of_the_machine() -> None:
    assert row(compared(BUILD, BUILD, slower=1.3), "process_peak_bytes")["verdict"] == "PASS"


def test_speed_on_machines_that_nobody_measured_is_open_unless_that_is_wished() -> None:
    blind = replace(BUILD, references={}, environment={}, trials=10)
    document = compared(blind, blind)
    assert row(document, "p50_tpot_ms")["verdict"] == "INCONCLUSIVE"
    assert "reference_s" in row(document, "p50_tpot_ms")["doubt"]
    assert row(document, "process_peak_bytes")["verdict"] == "PASS"
    trusted = compared(blind, blind, limits=ReleaseLimits(need_references=False))
    assert row(trusted, "p50_tpot_ms")["verdict"] == "PASS"


def test_the_same_machine_needs_no_references() -> None:
    known = replace(BUILD, references={}, trials=10, day_spread=0.002)
    assert row(compared(known, known), "p50_tpot_ms")["verdict"] == "PASS"


@pytest.mark.parametrize(("truth", "slower", "wrong"), [(1.015, 1.049, "FAIL"), (1.07, 1 / 1.049, "PASS")])
def test_small_difference_of_the_machine_decides_nothing_either(truth, slower, wrong) -> None:
    """A machine 4.9 % slower makes 6.4 % of 1.5 %, and one 4.9 % faster makes 2 % of 7 %; the limit is 5 %."""
    build = replace(BUILD, trials=6, day_spread=0.005, start_spread=0.003, luck=0.003)
    for seed in range(10):
        judged = row(
            compared(build, changed(build, p50_tpot_ms=truth), days=8, seed=seed, slower=slower), "p50_tpot_ms"
        )
        assert judged["verdict"] != wrong
        assert "slower" in judged["doubt"] or "faster" in judged["doubt"] or judged["verdict"] == "INCONCLUSIVE"


def test_noise_of_references_is_no_difference_of_the_machine() -> None:
    assert row(compared(BUILD, BUILD, slower=1.008), "p50_tpot_ms")["corrected"] is None


def test_card_that_only_one_run_measured_leaves_speed_open() -> None:
    on_card = replace(BUILD, trials=10, day_spread=0.002, environment={})
    hostly = replace(on_card, references={"python_ms": 10.0})
    judged = row(compared(on_card, hostly), "p50_tpot_ms")
    assert judged["verdict"] == "INCONCLUSIVE"
    assert "equally fast" in judged["doubt"]
    known = replace(on_card, environment={"machine": "0123456789ab"})
    same = compared(known, replace(known, references={"python_ms": 10.0}))
    assert row(same, "p50_tpot_ms")["verdict"] == "PASS"
    assert "no references in both runs tell the speed of the card; the machine is the same" in " ".join(same["notes"])


@pytest.mark.parametrize(("one", "two"), [(1e299, 1e-299), (1e-299, 1e299), (5.0, 1e300)])
def test_reference_that_no_machine_can_have_is_none(one: float, two: float) -> None:
    builds = [replace(BUILD, environment={}, references={"matmul_tflops": value}) for value in (one, two)]
    assert row(compared(*builds), "p50_tpot_ms")["verdict"] == "INCONCLUSIVE"


# --- What is not to be believed ---------------------------------------------------------------------------------------


def test_run_whose_load_was_not_as_claimed_decides_nothing_of_its_traffic() -> None:
    document = compared(BUILD, changed(replace(BUILD, doubts=("generator lag",)), p50_tpot_ms=2.0))
    judged = row(document, "p50_tpot_ms")
    assert judged["verdict"] == "INCONCLUSIVE"
    assert "generator lag" in judged["doubt"]
    assert row(document, "startup_s")["doubt"] == ""


def test_memory_that_was_held_fails_whatever_became_of_the_run() -> None:
    document = compared(BUILD, changed(replace(BUILD, doubts=("complete",)), process_peak_bytes=1.3))
    assert row(document, "process_peak_bytes")["verdict"] == "FAIL"
    within = compared(BUILD, replace(BUILD, doubts=("complete",)))
    assert row(within, "process_peak_bytes")["verdict"] == "INCONCLUSIVE"


@pytest.mark.parametrize("check", ["steal", "throttling", "busy host"])
def test_a_slower_machine_holds_no_less_memory(check: str) -> None:
    """So a slowed baseline leaves a FAIL of memory as it is, and a slowed candidate a PASS."""
    slowed = replace(BUILD, doubts=(check,))
    for baseline, candidate, verdict in (
        (slowed, changed(BUILD, process_peak_bytes=1.3), "FAIL"),
        (slowed, BUILD, "INCONCLUSIVE"),
        (BUILD, slowed, "PASS"),
        (replace(BUILD, doubts=(check, "complete")), changed(BUILD, process_peak_bytes=1.3), "INCONCLUSIVE"),
    ):
        assert row(compared(baseline, candidate), "process_peak_bytes")["verdict"] == verdict
    slower = compared(slowed, changed(BUILD, p50_tpot_ms=2.0))
    assert row(slower, "p50_tpot_ms")["verdict"] == "INCONCLUSIVE"


def test_a_slower_machine_excuses_no_count() -> None:
    """A baseline that is in doubt about its compiles is no measure, whatever took its time."""
    baseline = replace(counting(recompiles=[0, 0]), compile_doubts=("steal",))
    assert row(compared(baseline, counting(recompiles=[3, 3])), "recompiles")["verdict"] == "INCONCLUSIVE"


def test_lost_compile_events_open_the_pass_and_not_the_fail_of_counts() -> None:
    lost = {"compile_doubts": ("event counts",)}
    none = compared(counting(recompiles=[0, 0]), replace(counting(recompiles=[0, 0]), **lost))
    assert row(none, "recompiles")["verdict"] == "INCONCLUSIVE"
    some = compared(counting(recompiles=[0, 0]), replace(counting(recompiles=[2, 2]), **lost))
    assert row(some, "recompiles")["verdict"] == "FAIL"


@pytest.mark.parametrize(
    ("unknown", "counts", "verdict"),
    [
        ("baseline", ([0, 0], [3, 3]), "INCONCLUSIVE"),
        ("baseline", ([0, 0], [0, 0]), "PASS"),
        ("candidate", ([0, 0], [0, 0]), "INCONCLUSIVE"),
        ("candidate", ([0, 0], [3, 3]), "FAIL"),
        ("both", ([0, 0], [3, 3]), "FAIL"),
        ("both", ([0, 0], [0, 0]), "PASS"),
    ],
)
def test_a_kind_of_compile_that_one_version_did_not_know_is_no_regression(
    unknown: str, counts: tuple[list[int], list[int]], verdict: str
) -> None:
    one, two = (
        replace(counting(recompiles=own), unknown_kinds=("jit",) if unknown in (whose, "both") else ())
        for whose, own in zip(("baseline", "candidate"), counts, strict=True)
    )
    judged = row(compared(one, two), "recompiles")
    assert judged["verdict"] == verdict
    if verdict == "INCONCLUSIVE":
        assert f"recorded the {unknown} knew no compiles of kind jit: record it again" in judged["reason"]


def test_start_from_a_warm_compile_cache_is_not_laid_beside_one_from_a_cold_one() -> None:
    cold, warm = replace(BUILD, cache={"miss": 12, "hit": 0}), replace(BUILD, cache={"miss": 0, "hit": 12})
    judged = row(compared(cold, changed(warm, startup_s=0.3)), "startup_s")
    assert judged["verdict"] == "INCONCLUSIVE"
    assert "compile cache" in judged["doubt"]


def test_memory_by_two_ways_of_measuring_is_open() -> None:
    one, two = (replace(BUILD, sources={"process_peak_bytes": source}) for source in ("replicas", "process samples"))
    judged = row(compared(one, two), "process_peak_bytes")
    assert judged["verdict"] == "INCONCLUSIVE"
    assert "process samples" in judged["doubt"]


def test_figure_that_the_candidate_lost_is_open_and_that_the_baseline_never_had_is_left_out() -> None:
    without = replace(BUILD, levels={key: level for key, level in LEVELS.items() if key != "startup_s"})
    assert row(compared(BUILD, without), "startup_s")["verdict"] == "INCONCLUSIVE"
    document = compared(without, BUILD)
    assert row(document, "startup_s")["verdict"] is None
    assert "start-up" in " ".join(document["notes"])


# --- Which gates ------------------------------------------------------------------------------------------------------


def test_limits_choose_the_gates() -> None:
    limits = ReleaseLimits(limits={"p99_ttft_ms": None, "p50_tpot_ms": 0.2})
    document = compared(BUILD, changed(p50_tpot_ms=1.1), limits=limits)
    assert row(document, "p99_ttft_ms")["verdict"] is None
    assert row(document, "p50_tpot_ms")["verdict"] in ("PASS", "INCONCLUSIVE")


def test_no_errors_pass_a_limit_on_errors_and_first_errors_leave_it_open() -> None:
    limits = ReleaseLimits(limits={"error_pct": 0.1})
    none, some = replace(BUILD, levels={}, counts={"error_pct": [0, 0]}), replace(BUILD, counts={"error_pct": [0, 1]})
    assert row(compared(none, none, limits=limits), "error_pct")["verdict"] == "PASS"
    assert row(compared(none, some, limits=limits), "error_pct")["verdict"] == "INCONCLUSIVE"


@pytest.mark.parametrize("key", ["error_pct", "serving_compile_s", "compile_s"])
@pytest.mark.parametrize("trials", [2, 4, 6])
def test_much_where_there_was_nothing_fails_a_limit(key: str, trials: int) -> None:
    limits = ReleaseLimits(limits={key: 0.1})
    none, much = (counting(**{key: [value] * trials}) for value in (0.0, 20.0))
    judged = row(compared(none, much, limits=limits), key)
    assert (judged["verdict"], judged["baseline"]) == ("FAIL", 0.0)
    assert "that the baseline's nothing is taken for" in judged["reason"]
    assert row(compared(much, none, limits=limits), key)["verdict"] == "PASS"
    shown = row(compared(none, much), key)
    assert (shown["verdict"], shown["ratio"], shown["baseline"]) == (None, None, 0.0)


def test_speed_of_somebody_elses_server_is_open_though_the_load_came_from_one_machine() -> None:
    build = replace(BUILD, references={}, config={"kind": "openai", "model_name": "m"})
    assert row(compared(build, build), "p99_e2e_ms")["verdict"] == "INCONCLUSIVE"


def test_without_a_gate_nothing_passes() -> None:
    document = compared(replace(BUILD, levels={"p50_e2e_ms": 5.0}), replace(BUILD, levels={"p50_e2e_ms": 5.0}))
    assert document["overall"] == "INCONCLUSIVE"


def test_arms_are_those_of_one_name_unless_they_are_mapped() -> None:
    one, two = release(BUILD, day=0, seed=1, arm="padded"), release(BUILD, day=1, seed=1, arm="bucketed")
    with pytest.raises(RecordError, match="share no arm: padded in the baseline, bucketed in the candidate"):
        arms_to_compare(one, two)
    assert arms_to_compare(one, two, ["padded=bucketed"]) == {"padded": "bucketed"}
    with pytest.raises(RecordError, match='the candidate has no arm "padded": use bucketed'):
        arms_to_compare(one, two, ["padded"])
    with pytest.raises(RecordError, match="give each once"):
        arms_to_compare(one, two, ["padded=bucketed", "padded=bucketed"])
    document = compare_releases(History(releases=(one,)), two, arms={"padded": "bucketed"}, limits=ReleaseLimits())
    assert [arm["name"] for arm in document["arms"]] == ["bucketed"]
