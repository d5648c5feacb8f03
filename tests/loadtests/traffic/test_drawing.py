"""What is drawn: arrivals, lengths, turns, samples of traces, and the rates of a search."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtests.traffic import arrivals
from loadtests.traffic.conversations import read_conversations
from loadtests.traffic.drawing import build_schedule
from loadtests.traffic.lengths import IntArray, Lengths, fitted_lengths
from loadtests.traffic.limits import within_limits
from loadtests.traffic.rate_steps import closer, staircase
from loadtests.traffic.schedule import Schedule
from loadtests.traffic.settings import TrafficConfig
from loadtests.traffic.source import read_source
from loadtests.traffic.traces import read_trace
from loadtests.traffic.turns import Turns, growing_context, session_turns
from servers.fields import ConfigError

SECOND = 1_000_000_000


def rng(seed: int = 1) -> np.random.Generator:
    return np.random.default_rng(seed)


def gamma(rate: float, burstiness: float, duration_s: float, *, seed: int | np.random.Generator = 1) -> IntArray:
    profile = np.array([[0, duration_s, rate, rate]])
    return arrivals.renewals(profile, burstiness=burstiness, rng=np.random.default_rng(seed))


def lengths_of(*rows: tuple[int, int]) -> Lengths:
    columns = np.array(rows, dtype=np.int64).reshape(-1, 2)
    return Lengths(input_tokens=columns[:, 0], output_tokens=columns[:, 1])


def turns_of(session: list[int], turn: list[int]) -> Turns:
    return Turns(session=np.array(session), turn=np.array(turn), offset_ns=np.arange(len(turn)))


def built(config: TrafficConfig, **changes: Any) -> Schedule:
    arguments: dict[str, Any] = {"arms": ("eager", "compiled"), "seed": 5, "trial": 1, "max_new_tokens": 256}
    return build_schedule(config, read_source(config, seed=5), **{**arguments, "max_prompt_tokens": 2048, **changes})


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


@pytest.mark.parametrize("burstiness", [0.1, 4.0])
def test_gaps_vary_by_burstiness_to_the_minus_half(burstiness: float) -> None:
    offsets = gamma(200, burstiness, 500, seed=7)
    gaps = np.diff(offsets)
    cv = burstiness**-0.5
    assert len(offsets) == pytest.approx(100_000, abs=4 * cv * 100_000**0.5)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.04)


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
    phases = built(TrafficConfig(rate=20, duration_s=30, rampup_s=10)).table
    for at_ns, phase in zip(phases["offset_ns"].to_pylist(), phases["phase"].to_pylist(), strict=True):
        assert phase == ("rampup" if at_ns < 10 * SECOND else "measure")


@pytest.mark.parametrize(
    ("fit", "inputs", "outputs", "most"),
    [
        # Lognormal: exp(mu + z sigma) of the published log moments.
        ("conversation", np.exp(6.633 + 0.985 * np.array([0, 1.2816, 2.3263])), [151.3, 454.8, 1115.8], np.inf),
        ("code", [1469, 5187, 7436], [13, 55, 251], 7436),
        ("long-context", [6909, 27367, 85400], [350, 597, 1118], 126195),
        ("sentences", [27, 100, 289], [0, 0, 0], 512),
    ],
)
def test_lengths_have_the_published_quantiles_and_ceilings(fit: Any, inputs: Any, outputs: Any, most: float) -> None:
    drawn = fitted_lengths(fit, 200_000, rng=rng())
    quantiles = [np.quantile(tokens, [0.5, 0.9, 0.99]) for tokens in (drawn.input_tokens, drawn.output_tokens)]
    assert quantiles[0] == pytest.approx(inputs, rel=0.03)
    assert quantiles[1] == pytest.approx(outputs, rel=0.05)
    assert drawn.input_tokens.max() <= most
    assert drawn.output_tokens.any() == (fit != "sentences")
    few = fitted_lengths(fit, 100, rng=rng())
    assert np.array_equal(few.input_tokens, drawn.input_tokens[:100]), "more rows leave the first as they are"


def test_scaled_lengths_never_fall_below_one_and_no_answer_stays_none() -> None:
    scaled = lengths_of((1, 1), (10, 4), (1000, 99)).scaled(np.array([0.1, 2.5, 0.1]))
    assert scaled.input_tokens.tolist() == [1, 25, 100]
    assert scaled.output_tokens.tolist() == [1, 10, 10]
    assert lengths_of((10, 0)).scaled(3.0).output_tokens.tolist() == [0]
    for bad in (0.0, -1.0, float("nan"), np.array([1.0, -1.0])):
        with pytest.raises(ConfigError, match="length_scale"):
            lengths_of((1, 1), (1, 1)).scaled(bad)


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


def test_turns_follow_one_think_time_after_each_other() -> None:
    starts = np.arange(40_000, dtype=np.int64) * SECOND
    turns = session_turns(starts, rng().geometric(1 / 3, size=40_000), think_time_s=7, rng=rng(2))
    assert np.array_equal(turns.offset_ns[turns.turn == 0], starts)
    follows = np.flatnonzero(turns.turn > 0)
    assert (turns.turn[follows] == turns.turn[follows - 1] + 1).all()
    gaps = (turns.offset_ns[follows] - turns.offset_ns[follows - 1]) / 1e9
    assert (gaps.min() >= 0, gaps.mean(), gaps.std()) == (True, pytest.approx(7, rel=0.02), pytest.approx(7, rel=0.03))


def test_context_grows_by_the_inputs_and_answers_before() -> None:
    lengths = lengths_of((10, 3), (20, 400), (30, 5), (7, 7))
    grown = growing_context(lengths, turns_of([0, 0, 0, 1], [0, 1, 2, 0]), max_new_tokens=100)
    # The second answer is cut to 100 tokens, so only 100 of it come back as context.
    assert grown.tolist() == [10, 10 + 3 + 20, 10 + 3 + 20 + 100 + 30, 7]


def test_drop_ends_the_session_at_its_first_long_turn() -> None:
    lengths = lengths_of((5, 5), (9, 50), (10, 5), (5, 5), (20, 10))
    left, kept, counts = within_limits(
        lengths, turns_of([0, 0, 0, 1, 1], [0, 1, 2, 0, 1]), policy="drop", max_prompt_tokens=20, max_new_tokens=10
    )
    assert kept.tolist() == [True, False, False, True, True]
    assert left.input_tokens.tolist() == [5, 5, 20]
    assert (counts.input_over, counts.output_over, counts.requests_dropped) == (0, 1, 2)


@pytest.mark.parametrize("policy", ["clip", "drop", "fail"])
def test_lengths_at_the_limit_are_unchanged(policy: Any) -> None:
    row = lengths_of((512, 64))
    left, kept, counts = within_limits(row, turns_of([0], [0]), policy=policy, max_prompt_tokens=512, max_new_tokens=64)
    assert (kept.all(), left.input_tokens[0], left.output_tokens[0]) == (True, 512, 64)
    assert (counts.input_over, counts.output_over, counts.requests_dropped) == (0, 0, 0)


@pytest.mark.parametrize("over_limit", ["clip", "drop"])
def test_a_closed_loop_has_as_many_rows_as_asked_for_and_no_times(over_limit: Any) -> None:
    config = TrafficConfig(
        arrivals="closed", concurrency=4, num_prompts=50, rampup_s=5, duration_s=20, over_limit=over_limit
    )
    schedule = built(config, max_prompt_tokens=1000)
    assert (schedule.loop, schedule.planned, len(schedule)) == ("closed", {}, 50)
    assert set(schedule.offset_ns.tolist()) == {0}
    assert len(built(TrafficConfig(arrivals="closed", concurrency=4))) == 1024


def azure(folder: Path, count: int) -> Path:
    """One request a second, its input length its number from 1."""
    rows = [f"2023-11-17 00:{n // 60:02}:{n % 60:02}.0,{n + 1},{1 + n % 7}" for n in range(count)]
    path = folder / "trace.csv"
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    return path


def test_a_sample_of_a_trace_is_even_sorted_and_the_same_for_equal_seeds(tmp_path: Path) -> None:
    path = azure(tmp_path, 3000)
    drawn = [read_trace(path, sample=300, seed=seed).input_tokens.tolist() for seed in (1, 1, *range(2, 12))]
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0] == sorted(set(drawn[0]))
    assert len(drawn[0]) == 300
    assert abs(np.mean(drawn) - 1500) < 60
    assert read_trace(path, sample=5000).input_tokens.tolist() == list(range(1, 3001))


def test_lengths_of_a_trace_under_other_arrivals_are_its_rows(tmp_path: Path) -> None:
    schedule = built(TrafficConfig(rate=30, duration_s=30, workload="trace", trace=str(azure(tmp_path, 1000))))
    inputs, outputs = schedule.ints("prompt_tokens"), schedule.ints("max_tokens")
    assert len(set(inputs.tolist())) > 300
    assert np.array_equal(outputs, 1 + (inputs - 1) % 7)


def test_texts_to_embed_have_no_answers_whatever_their_trace_holds(tmp_path: Path) -> None:
    traffic = TrafficConfig(rate=30, duration_s=10, workload="trace", trace=str(azure(tmp_path, 100)))
    assert set(built(traffic, max_new_tokens=0).ints("max_tokens").tolist()) == {0}


def test_a_sample_of_conversations_is_even_and_the_same_for_equal_seeds(tmp_path: Path) -> None:
    path = tmp_path / "talks.json"
    talk = '{{"conversations": [{{"from": "human", "value": "{0}"}}, {{"from": "gpt", "value": "a"}}]}}'
    path.write_text("[" + ",".join(talk.format(number) for number in range(400)) + "]")
    samples = [read_conversations(path, keep=40, seed=seed) for seed in (1, 1, *range(2, 22))]
    drawn = [[int(talk.exchanges[0].question) for talk in sample.kept] for sample in samples]
    assert samples[0].read == 400
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(set(drawn[0])) == 40
    assert abs(np.mean(drawn[1:]) - 199.5) < 20


@pytest.mark.parametrize("ids", [[1, 2, 3], ["a"], [-1], 7, [True]])
def test_hash_ids_that_cannot_be_are_refused(tmp_path: Path, ids: object) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps({"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": ids}))
    with pytest.raises(ConfigError, match=r"(expected|3) hash_ids"):
        read_trace(path)


@given(low=st.floats(0.1, 100), factor=st.floats(1.1, 1000), steps=st.integers(3, 30))
def test_a_staircase_rises_in_equal_ratios_from_end_to_end(low: float, factor: float, steps: int) -> None:
    rates = np.array(staircase(low, low * factor, steps))
    assert (len(rates), rates[0], rates[-1]) == (steps, pytest.approx(low, rel=1e-3), pytest.approx(low * factor, 1e-3))
    assert rates[1:] / rates[:-1] == pytest.approx(factor ** (1 / (steps - 1)), rel=5e-3)


@pytest.mark.parametrize(
    ("brackets", "rates"),
    [
        ([(4.0, 8.0), (16.0, 32.0)], (4.757, 5.657, 6.727, 19.03, 22.63, 26.91)),
        ([(4.0, 8.0), (4.0, 8.0)], (4.416, 4.876, 5.384, 5.944, 6.563, 7.246)),  # one bracket's steps are shared
        ([(10.0, 10.1)], (10.0, 10.0, 10.0, 10.1, 10.1, 10.1)),  # too narrow: its ends are tried again
    ],
)
def test_the_next_trial_divides_the_bracket_of_every_arm(brackets: Any, rates: tuple[float, ...]) -> None:
    assert closer(brackets, 6, low=1, high=64) == rates


@pytest.mark.parametrize(
    ("bracket", "low", "high"), [((None, 2.0), 0.5, 2.0), ((50.0, None), 50.0, 200.0), ((None, None), 1.0, 64.0)]
)
def test_an_open_bracket_is_searched_beyond_its_end(bracket: Any, low: float, high: float) -> None:
    rates = closer([bracket], 3, low=1, high=64)
    assert low < rates[0] < rates[1] < rates[2] < high
    assert rates[1] == pytest.approx((low * high) ** 0.5, rel=1e-3)
