"""The schedule of a trial: the contract's columns, three designs, reproducible from one seed and the trial number."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailgate.analysis.arrays import Ints
from tailgate.loadtests.traffic import arrivals
from tailgate.loadtests.traffic.drawing import build_schedule, read_source, switchback_order
from tailgate.loadtests.traffic.lengths import fitted_lengths, scaled
from tailgate.loadtests.traffic.schedule import Schedule
from tailgate.loadtests.traffic.settings import TrafficConfig
from tailgate.loadtests.trials import rate_search
from tailgate.servers.complaint import ConfigError
from tailgate.servers.fields import read
from tests.fakes.processes import refusal

SECOND = 1_000_000_000


def built(config: TrafficConfig, **changes: Any) -> Schedule:
    """The schedule of the first trial, unless `changes` say otherwise."""
    arguments: dict[str, Any] = {"arms": ("eager", "compiled"), "seed": 5, "trial": 1, "max_new_tokens": 256}
    return build_schedule(config, read_source(config), **{**arguments, "max_prompt_tokens": 2048, **changes})


def column(schedule: Schedule, name: str) -> list[Any]:
    values: list[Any] = schedule.table[name].to_pylist()
    return values


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.csv"
    lines = [f"2023-11-16 00:{n // 600:02}:{n / 10 % 60:06.3f},{10 + n},{1 + n % 7}" for n in range(1000)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]))
    return str(path)


def test_a_schedule_reads_back_and_no_offset_of_a_damaged_one_leads_out_of_it(tmp_path: Path) -> None:
    schedule, path = built(TrafficConfig(rate=4, duration_s=30, design="split")), tmp_path / "schedule.arrow"
    schedule.write(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["schedule.arrow"]
    back = Schedule.read(path, schedule.arms)
    assert back.table.equals(schedule.table)
    assert back.planned == schedule.planned
    whole, phase = path.read_bytes(), back.table["phase"].chunk(0)
    offsets = np.frombuffer(phase.buffers()[1], dtype="<i4")[:4].tobytes()
    for good, damaged in (
        (whole[-2000:], b""),
        (offsets, b"\xff\xff\xff\x7f" * 4),
        (b"prompt_seed", b"prompt_salt"),
    ):
        path.write_bytes(whole.replace(good, damaged))
        assert "build it again" in refusal(ConfigError, Schedule.read, path, ())


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**63),
    trial=st.integers(0, 50),
    design=st.sampled_from(["mirrored", "split", "switchback"]),
)
def test_equal_arguments_give_an_equal_schedule_within_limits(seed: int, trial: int, design: Any) -> None:
    config = TrafficConfig(rate=20, duration_s=20, block_s=5, design=design)
    first, second = built(config, seed=seed, trial=trial), built(config, seed=seed, trial=trial)
    assert first.table.equals(second.table)
    assert first.over == second.over
    assert 1 <= min(column(first, "prompt_tokens")) <= max(column(first, "prompt_tokens")) <= 2048
    assert 1 <= min(column(first, "max_tokens")) <= max(column(first, "max_tokens")) <= 256


def test_trials_and_seeds_differ_and_changing_one_part_of_the_traffic_leaves_the_others() -> None:
    base = built(TrafficConfig(rate=20, duration_s=60))
    for other in ({"trial": 2}, {"seed": 6}):
        changed = built(TrafficConfig(rate=20, duration_s=60), **other)
        for name in ("offset_ns", "prompt_tokens", "prompt_seed"):
            assert column(base, name)[:20] != column(changed, name)[:20]
    drawn = ("prompt_tokens", "max_tokens", "prompt_seed")
    faster = built(TrafficConfig(rate=40, duration_s=30))
    bursty = built(TrafficConfig(rate=20, duration_s=60, arrivals="gamma", burstiness=0.5))
    for other in (faster, bursty):
        common = min(len(base), len(other))
        for name in drawn:
            assert column(base, name)[:common] == column(other, name)[:common]
    texts = built(TrafficConfig(rate=20, duration_s=60, workload="sentences"))
    assert column(texts, "offset_ns") == column(base, "offset_ns")
    assert column(texts, "prompt_seed") == column(base, "prompt_seed")
    assert column(texts, "prompt_tokens") != column(base, "prompt_tokens")
    switched = built(TrafficConfig(rate=20, duration_s=60, design="switchback"))
    assert switched.table.drop(["arm"]).equals(base.table.drop(["arm"]))
    longer = built(TrafficConfig(rate=20, duration_s=180))
    assert longer.table.slice(0, len(base)).equals(base.table)


@pytest.mark.parametrize(
    ("design", "arm", "planned"),
    [("mirrored", "*", {"eager", "compiled"}), ("split", None, {"*"})],
)
def test_a_design_without_blocks_gives_all_rows_one_arm(design: Any, arm: str | None, planned: set[str]) -> None:
    schedule = built(TrafficConfig(rate=20, duration_s=30, design=design))
    assert set(column(schedule, "arm")) == {arm}
    assert schedule.planned == dict.fromkeys(planned, len(schedule))


def test_switchback_pins_the_arm_of_the_block() -> None:
    config = TrafficConfig(rate=50, duration_s=130, design="switchback", block_s=10)
    schedule = built(config, arms=("a", "b", "c"))
    by_block: dict[int, set[str]] = {}
    for at, arm in zip(column(schedule, "offset_ns"), column(schedule, "arm"), strict=True):
        by_block.setdefault(at // (10 * SECOND), set()).add(arm)
    assert sorted(by_block) == list(range(13))
    assert all(len(arms) == 1 for arms in by_block.values())
    assert schedule.planned == Counter(column(schedule, "arm"))


@given(blocks=st.integers(0, 60), arms=st.integers(1, 6), seed=st.integers(0, 2**32))
def test_every_arm_comes_once_in_each_switchback_group(blocks: int, arms: int, seed: int) -> None:
    order = switchback_order(blocks, arms, rng=np.random.default_rng(seed))
    assert len(order) == blocks
    for start in range(0, blocks - arms + 1, arms):
        assert sorted(order[start : start + arms].tolist()) == list(range(arms))
    last = order[blocks - blocks % arms :].tolist()
    assert len(set(last)) == len(last)
    more = switchback_order(blocks + arms, arms, rng=np.random.default_rng(seed))
    assert np.array_equal(more[:blocks], order)


def test_replayed_trace_keeps_each_arrival_with_its_lengths(trace: str) -> None:
    config = TrafficConfig(
        arrivals="trace", workload="trace", trace=trace, trace_start_s=20, time_scale=2, duration_s=30
    )
    schedule = built(config)
    expected = range(200, 350)
    assert column(schedule, "offset_ns") == [(n - 200) * 200_000_000 for n in expected]
    assert column(schedule, "prompt_tokens") == [10 + n for n in expected]
    assert column(schedule, "max_tokens") == [1 + n % 7 for n in expected]
    fitted = built(TrafficConfig(arrivals="trace", workload="conversation", trace=trace, duration_s=50))
    assert len(fitted) == 500


def test_a_trace_that_is_too_short_or_not_named_is_refused(trace: str) -> None:
    with pytest.raises(ConfigError, match=r"has 99\.9 s of traffic .* but duration_s is 120"):
        built(TrafficConfig(arrivals="trace", trace=trace, duration_s=120))
    for config in (TrafficConfig(arrivals="trace"), TrafficConfig(rate=1, workload="trace")):
        assert "names none: add --trace FILE" in refusal(ConfigError, read_source, config)


def test_shares_of_the_workers_make_the_whole() -> None:
    schedule = built(TrafficConfig(rate=20, duration_s=30))
    shares = [schedule.share(worker, 3) for worker in range(3)]
    assert all(set(np.unique(share.ints("index") % 3)) == {worker} for worker, share in enumerate(shares))
    whole = pa.concat_tables([share.table for share in shares]).sort_by("index")
    assert whole.combine_chunks().equals(schedule.table.combine_chunks())


SEARCH = {"arrivals": "saturation", "rates": [1.0, 2.0], "duration_s": 90}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({}, "rate is 0.0: give requests/s above 0"),
        ({"rate": -1}, "rate is -1.0: give requests/s above 0"),
        ({"rate": 1, "rampup_s": 60}, "lower rampup_s"),
        ({"rate": 1, "length_scales": [[0.0, 1.0, 2.0]]}, "length_scales[0] is [0.0, 1.0, 2.0]: give 2 or fewer"),
        ({"rate": 1, "length_scales": [[0.0, 1.0], [9.0, 0.0]]}, "length_scales[1][1] is 0.0: give 1e-06"),
        ({"rate": 1, "length_scales": [[5.0, 1.0]]}, "length_scales has segments from"),
        ({"rate": 1, "length_scales": [[0.0, 1.0], [60.0, 2.0]]}, "before duration_s"),
        ({"rate": 1, "workload": "trace", "trace": "a.csv", "length_scales": [[0.0, 1.0]]}, "remove length_scales"),
        ({"rate": 1, "burstiness": 0.5}, 'use arrivals = "gamma"'),
        ({"rate": 1, "arrivals": "piecewise", "rates": [[0, 1.0]]}, "remove rate or use arrivals"),
        ({"arrivals": "piecewise"}, "give [[0, rate], ...] up to 1e9 for piecewise"),
        ({**SEARCH, "rates": [1.0, -2.0]}, "rates[1] is -2.0: give 0 or more or give a list"),
        ({**SEARCH, "rates": [[0.0, 1.0]]}, "for saturation"),
        ({"arrivals": "piecewise", "rates": [[0.0, -1.0], [5.0, 1.0]]}, "give [[0, rate], ...] up to 1e9"),
        ({"arrivals": "piecewise", "rates": [[0.0, 1.0], [5.0, 1.0], [5.0, 2.0]]}, "let them rise"),
        ({"rate": 1, "trace": "a.csv"}, "neither arrivals nor workload"),
        ({"rate": 1, "time_scale": 2}, 'remove time_scale or use arrivals = "trace"'),
        ({"rate": 1, "design": "switchback", "rampup_s": 10}, "give a multiple"),
        ({"rate": 1, "tokenizer": "a"}, 'use prompts = "text"'),
        ({**SEARCH, "rates": [1.0]}, "lowest rate, highest rate"),
        ({**SEARCH, "rates": [4.0, 2.0]}, "0 < lowest < highest"),
        ({**SEARCH, "duration_s": 100}, "give 90"),
        ({**SEARCH, "duration_s": 60}, "give 90"),
        ({**SEARCH, "settle_s": 30}, "lower settle_s"),
        ({**SEARCH, "design": "split"}, "mirrored"),
    ],
)
def test_impossible_traffic_is_refused_in_one_line(wrong: dict[str, Any], message: str) -> None:
    said = refusal(ConfigError, read, TrafficConfig, wrong, where="traffic")
    assert message in said
    assert said.startswith("traffic.")


def rng(seed: int = 1) -> np.random.Generator:
    return np.random.default_rng(seed)


def gamma(rate: float, burstiness: float, duration_s: float, *, seed: int | np.random.Generator = 1) -> Ints:
    profile = np.array([[0, duration_s, rate]])
    return arrivals.renewals(profile, burstiness=burstiness, rng=np.random.default_rng(seed))


@pytest.mark.parametrize("rates", [(100, 0, 300), (0, 50, 200), (40, 80, 0)])
def test_traffic_follows_its_profile_of_rates(rates: tuple[float, ...]) -> None:
    steps = tuple((10.0 * place, float(rate)) for place, rate in enumerate(rates))
    config = TrafficConfig(arrivals="piecewise", rates=steps, duration_s=30)
    offsets = arrivals.renewals(arrivals.rate_profile(config), rng=rng())
    found, _ = np.histogram(offsets / 1e9, bins=[0, 10, 20, 30])
    counts = 10 * np.array(rates)
    assert (np.abs(found - counts) <= 4 * np.sqrt(counts)).all()


def test_a_schedule_too_large_for_memory_is_refused_before_it_is_built() -> None:
    with pytest.raises(ConfigError, match="the limit is 20,000,000"):
        gamma(1e6, 1.0, 1e6)


@settings(max_examples=30)
@given(
    rate=st.floats(0.01, 500),
    short_s=st.floats(0.01, 10),
    factor=st.floats(1, 5),
    burstiness=st.floats(0.05, 50),
    seed=st.integers(0, 2**32),
)
def test_offsets_are_sorted_and_a_longer_schedule_extends_the_shorter_one(
    rate: float, short_s: float, factor: float, burstiness: float, seed: int
) -> None:
    short, long = (gamma(rate, burstiness, duration_s, seed=seed) for duration_s in (short_s, short_s * factor))
    assert (np.diff(long) >= 0).all()
    assert ((long >= 0) & (long < short_s * factor * 1e9)).all()
    assert np.array_equal(short, long[: len(short)])
    assert (long[len(short) :] >= np.floor(short_s * 1e9) - 1).all()


@pytest.mark.parametrize("burstiness", [0.1, 1.0, 4.0])
def test_gaps_vary_by_burstiness_to_the_minus_half(burstiness: float) -> None:
    gaps = np.diff(gamma(200, burstiness, 500, seed=7)) / 1e9
    cv = burstiness**-0.5
    assert len(gaps) == pytest.approx(100_000, abs=4 * cv * 100_000**0.5)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.04)
    if burstiness == 1.0:
        assert np.mean(gaps > 1 / 200) == pytest.approx(np.exp(-1), abs=0.01), "they are exponential"


@pytest.mark.parametrize("burstiness", [0.1, 20.0])
def test_short_schedules_hold_rate_times_duration_on_average(burstiness: float) -> None:
    # An ordinary first gap would give (CV^2 - 1) / 2 more: 4.5 of them at burstiness 0.1, 0.475 fewer at 20.
    generator = rng(3)
    counts = np.array([len(gamma(4, burstiness, 2.5, seed=generator)) for _ in range(4000)])
    assert counts.mean() == pytest.approx(10, abs=4 * counts.std() / 4000**0.5)


def test_a_ramp_up_thins_linearly_and_leaves_the_rest() -> None:
    offsets = gamma(1000, 1.0, 100)
    kept = arrivals.rampup_kept(offsets, 40, rng=rng(2))
    early = offsets < 40 * SECOND
    assert kept[~early].all()
    share, _ = np.histogram(offsets[early & kept], bins=4, range=(0, 40 * SECOND))
    expected = 10_000 * np.array([0.125, 0.375, 0.625, 0.875])
    assert (np.abs(share - expected) < 4 * np.sqrt(expected)).all()
    schedule = built(TrafficConfig(rate=20, duration_s=30, rampup_s=10))
    for at_ns, phase in zip(column(schedule, "offset_ns"), column(schedule, "phase"), strict=True):
        assert phase == ("rampup" if at_ns < 10 * SECOND else "measure")


@pytest.mark.parametrize(
    ("fit", "inputs", "outputs", "most"),
    [
        # Lognormal: exp(mu + z sigma) of the published log moments.
        ("conversation", np.exp(6.633 + 0.985 * np.array([0, 1.2816, 2.3263])), [151.3, 454.8, 1115.8], np.inf),
        ("sentences", [27, 100, 289], [0, 0, 0], 512),
    ],
)
def test_lengths_have_the_published_quantiles_and_ceilings(fit: Any, inputs: Any, outputs: Any, most: float) -> None:
    drawn = fitted_lengths(fit, 200_000, rng=rng())
    quantiles = np.quantile(drawn, [0.5, 0.9, 0.99], axis=0).T
    assert quantiles[0] == pytest.approx(inputs, rel=0.03)
    assert quantiles[1] == pytest.approx(outputs, rel=0.05)
    assert drawn[:, 0].max() <= most
    assert drawn[:, 1].any() == (fit != "sentences")
    assert np.array_equal(fitted_lengths(fit, 100, rng=rng()), drawn[:100]), "more rows leave the first as they are"


def test_scaled_lengths_never_fall_below_one_and_no_answer_stays_none() -> None:
    rows = np.array([[1, 1], [10, 4], [1000, 99], [10, 0]])
    assert scaled(rows, np.array([[0.1], [2.5], [0.1], [3.0]])).tolist() == [[1, 1], [25, 10], [100, 10], [30, 0]]


def test_lengths_change_at_their_times_and_nothing_else_does() -> None:
    limits = {"max_prompt_tokens": 100_000, "max_new_tokens": 10_000}
    base = built(TrafficConfig(rate=20, duration_s=30), **limits)
    timed = TrafficConfig(rate=20, duration_s=30, length_scale=0.5, length_scales=((0.0, 1.0), (10.0, 4.0)))
    changed = built(timed, **limits)
    factors = np.where(base.offset_ns < 10 * SECOND, 0.5, 2.0)
    lengths = ["prompt_tokens", "max_tokens"]
    for name in lengths:
        assert changed.ints(name).tolist() == np.maximum(np.rint(base.ints(name) * factors), 1).tolist()
    assert changed.table.drop(lengths).equals(base.table.drop(lengths))


def test_lengths_over_a_limit_are_cut_to_it_and_counted_side_by_side() -> None:
    config = TrafficConfig(rate=20, duration_s=30)
    whole, cut = built(config, max_prompt_tokens=10**9, max_new_tokens=10**9), built(config)
    assert whole.over == {"requests": len(whole), "input_over": 0, "output_over": 0}
    for name, side, most in (("prompt_tokens", "input_over", 2048), ("max_tokens", "output_over", 256)):
        lengths = whole.ints(name)
        assert cut.ints(name).tolist() == np.minimum(lengths, most).tolist()
        assert cut.over[side] == (lengths > most).sum() > 0
    assert set(column(built(config, max_new_tokens=0), "max_tokens")) == {0}


def test_lengths_of_a_trace_under_other_arrivals_are_its_rows(trace: str) -> None:
    schedule = built(TrafficConfig(rate=30, duration_s=30, workload="trace", trace=trace))
    inputs, outputs = schedule.ints("prompt_tokens"), schedule.ints("max_tokens")
    assert len(set(inputs.tolist())) > 300
    assert np.array_equal(outputs, 1 + (inputs - 10) % 7)


@given(low=st.floats(0.1, 100), factor=st.floats(1.1, 1000), steps=st.integers(3, 30))
def test_a_staircase_rises_in_equal_ratios_from_end_to_end(low: float, factor: float, steps: int) -> None:
    rates = np.array(arrivals.staircase(low, low * factor, steps))
    assert (len(rates), rates[0], rates[-1]) == (steps, pytest.approx(low, rel=1e-3), pytest.approx(low * factor, 1e-3))
    assert rates[1:] / rates[:-1] == pytest.approx(factor ** (1 / (steps - 1)), rel=5e-3)


@pytest.mark.parametrize(
    ("brackets", "rates"),
    [
        ([(4.0, 8.0), (16.0, 32.0)], (4.757, 5.657, 6.727, 19.03, 22.63, 26.91)),
        ([(4.0, 8.0), (4.0, 8.0)], (4.416, 4.876, 5.384, 5.944, 6.563, 7.246)),  # one bracket's steps are shared
        ([(10.0, 10.1)], (10.0, 10.0, 10.0, 10.1, 10.1, 10.1)),  # too narrow: its ends are tried again
        ([(None, 2.0)], (0.6095, 0.743, 0.9057, 1.104, 1.346, 1.641)),  # open ends are searched further
        ([(50.0, None)], (60.95, 74.3, 90.57, 110.4, 134.6, 164.1)),
        ([(None, None), (50.0, None)], (2.828, 8.0, 22.63, 70.71, 100.0, 141.4)),
    ],
)
def test_the_next_trial_divides_the_bracket_of_every_arm(
    brackets: Any, rates: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rate_search, "to_search", lambda arm, _: brackets[int(arm)])
    arms = [str(number) for number in range(len(brackets))]
    assert rate_search.next_rates(arms, [], 6, low=1, high=64) == rates
