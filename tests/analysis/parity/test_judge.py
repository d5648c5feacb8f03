"""Faults that are planted in made-up logits and vectors fail, and noise of the allowed size passes."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tailgate.analysis.arrays import Floats
from tailgate.analysis.judging.gates.parity import parity_gate
from tailgate.analysis.parity.judge import (
    KL_LIMIT,
    POSITION_LIMIT,
    PROMPT_LIMIT,
    WORST_LIMIT,
    Answers,
    Places,
    Task,
    judge,
    judge_evenness,
)
from tailgate.analysis.parity.measures import ERROR_LIMIT, measure, ratio_interval
from tailgate.analysis.parity.outcome import Parity
from tailgate.analysis.parity.vectors import LEAST_COSINE, TextRows, judge_vectors

REQUESTS, TOKENS, VOCABULARY = 12, 10, 400
NOISE = 0.02


def reference_of(seed=0):
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((REQUESTS * TOKENS, VOCABULARY))
    # a clear winner everywhere, so that each test plants the near ties that it is about
    logits[:, 7] = 6.0
    return logits


def noisy(reference, times=1.0, seed=1):
    rng = np.random.default_rng(seed)
    return (reference + times * NOISE * rng.standard_normal(reference.shape)).astype(np.float32)


def answers(logits, name="arm", **taken):
    """Greedy along the logits, but for `taken`: {"r3t5": token}."""
    tokens = logits.argmax(axis=1).reshape(REQUESTS, TOKENS)
    for place, token in taken.items():
        request, _, index = place[1:].partition("t")
        tokens[int(request), int(index)] = token
    return Answers(name=name, tokens=tokens.tolist(), logits=logits)


def outcome(arm, reference, control=None, dtype="bfloat16"):
    control = control or answers(noisy(reference), "eager")
    requests = len(reference) // TOKENS
    place = Places(lengths=[TOKENS] * requests, prompts=list(range(1, requests + 1)))
    task = Task(control=control, reference=reference, place=place, dtype=dtype, seed=1, max_kl=1.0, source="")
    return judge(task, [arm])


def found(parity):
    return {finding.name: finding for finding in parity.arms[0].findings}


def near_tie(reference, position, lead):
    """Token 11 is `lead` behind the winner there."""
    reference[position, 11] = reference[position, 7] - lead
    return reference


@pytest.mark.parametrize(("times", "verdict"), [(1.0, "PASS"), (1.3, "PASS"), (1.8, "FAIL")])
def test_an_arm_may_err_one_and_a_half_times_as_much(times, verdict):
    reference = reference_of()
    parity = outcome(answers(noisy(reference, times, seed=2)), reference)
    error = found(parity)["error"]
    assert (parity.control.verdict, parity.verdict, error.verdict, error.limit) == (
        *("PASS", verdict, verdict),
        ERROR_LIMIT,
    )
    assert (parity.arms[0].reasons == []) == (verdict == "PASS")
    assert error.value == pytest.approx(times, rel=0.05)
    assert error.low <= error.value <= error.high


def test_an_error_whose_interval_holds_the_limit_is_open():
    rng = np.random.default_rng(4)
    reference = reference_of()
    # requests differ so much that twelve of them do not tell
    by_request = np.repeat(np.exp(0.9 * rng.standard_normal(REQUESTS)), TOKENS)[:, None]
    arm = reference + 1.5 * by_request * (noisy(reference, seed=2) - reference)
    parity = outcome(answers(arm), reference, answers(noisy(reference), "eager"))
    error = found(parity)["error"]
    assert error.low < ERROR_LIMIT < error.high
    assert error.verdict == "INCONCLUSIVE"
    assert "parity.prompts" in error.reason


def test_one_position_gone_wrong_fails_where_median_and_p99_see_nothing():
    reference = reference_of()
    arm = noisy(reference, seed=2)
    arm[33] += 0.5 * np.random.default_rng(3).standard_normal(VOCABULARY)
    parity = outcome(answers(arm), reference)
    worst = found(parity)["worst error"]
    assert found(parity)["error"].verdict == "PASS"
    assert worst.verdict == "FAIL"
    assert worst.value > WORST_LIMIT
    assert "request 3 (prompt of 4 tokens), token 4 of 10" in worst.reason


def test_a_bias_on_likely_tokens_shows_in_the_divergence_alone():
    reference = reference_of()
    arm = noisy(reference, seed=2)
    arm[:, 7] -= 0.15
    parity = outcome(answers(arm), reference)
    assert found(parity)["error"].verdict == "PASS"
    divergence = found(parity)["divergence"]
    assert divergence.verdict == "FAIL"
    assert divergence.low > KL_LIMIT


@pytest.mark.parametrize(("requests", "verdict"), [(1, "INCONCLUSIVE"), (7, "INCONCLUSIVE"), (8, "PASS")])
def test_few_prompts_set_no_interval_and_pass_nothing(requests, verdict):
    reference = reference_of()[: requests * TOKENS]
    control, arm = (
        Answers(name=name, tokens=[[7] * TOKENS] * requests, logits=noisy(reference, seed=seed))
        for name, seed in (("eager", 1), ("arm", 2))
    )
    parity = outcome(arm, reference, control)
    assert parity.verdict == verdict
    error = found(parity)["error"]
    assert (error.low is None) == (error.high is None) == (verdict != "PASS")
    assert ("(no interval), limit 1.5: more parity.prompts decide, 8 at least." in error.reason) == (verdict != "PASS")


class TestFlips:
    @pytest.mark.parametrize(
        ("place", "lead", "times", "taken", "verdict"),
        [
            ((3, 3), 0.03, 1.0, {"r3t3": 11}, "PASS"),
            ((3, 3), 0.8, 1.0, {"r3t3": 11}, "FAIL"),
            ((3, 3), 0.8, 40.0, {}, "FAIL"),  # the arm's own noise does not widen the bound
            ((5, 2), 6.0, 1.0, {"r5t2": 11, "r5t3": 12}, "FAIL"),
            ((5, 2), 0.03, 1.0, {"r5t2": 11, "r5t3": 12}, "PASS"),  # what follows is not asked
        ],
    )
    def test_a_token_that_noise_cannot_turn_fails(self, place, lead, times, taken, verdict):
        request, token = place
        reference = near_tie(reference_of(), request * TOKENS + token, lead)
        flips = found(outcome(answers(noisy(reference, times, seed=2), **taken), reference))["flips"]
        assert (flips.verdict, flips.limit) == (verdict, 1.0)
        assert times > 1 or flips.value > 0
        if taken and verdict == "FAIL":
            where = f"request {request} (prompt of {request + 1} tokens), token {token + 1} of 10, where it takes 11"
            assert where in flips.reason

    def test_logits_that_prefer_another_token_count_as_an_answer_does(self):
        reference = near_tie(reference_of(), 33, 0.8)
        arm = noisy(reference, seed=2)
        arm[33, 11] = arm[33, 7] + 0.01
        assert found(outcome(answers(arm, r3t3=7), reference))["flips"].verdict == "FAIL"


class TestFloat32:
    @pytest.mark.parametrize(("lead", "flips"), [(1e-7, "PASS"), (0.5, "FAIL")])
    def test_another_token_fails_even_at_a_near_tie(self, lead, flips):
        reference = near_tie(reference_of(), 52, lead)
        control = answers(noisy(reference, 1e-5), "eager", r5t2=7)
        arm = answers(noisy(reference, 1e-5, seed=2), r5t2=11)
        parity = outcome(arm, reference, control, "float32")
        tokens = found(parity)["tokens"]
        assert (parity.verdict, tokens.verdict, tokens.value) == ("FAIL", "FAIL", 1.0)
        assert "first at request 5 (prompt of 6 tokens), token 3" in tokens.reason
        assert "eager takes 7 and arm 11" in tokens.reason
        assert found(parity)["flips"].verdict == flips


class TestControl:
    def test_a_control_far_from_the_reference_leaves_every_arm_open(self):
        reference = reference_of()
        wrong = answers(noisy(reference, 20.0), "eager", **{f"r{r}t{t}": 7 for r in range(12) for t in range(10)})
        parity = outcome(answers(noisy(reference, seed=2)), reference, wrong)
        assert (parity.verdict, parity.control.verdict) == ("INCONCLUSIVE", "INCONCLUSIVE")
        assert "The p99 of the error of eager against float64" in parity.arms[0].reasons[0]
        failing = outcome(answers(noisy(reference, 90.0, seed=2)), reference, wrong)
        assert failing.verdict == "INCONCLUSIVE"
        assert "FAIL" not in {finding.verdict for finding in failing.arms[0].findings}

    def test_a_control_that_does_not_answer_as_it_computes_leaves_every_arm_open(self):
        reference = reference_of()
        parity = outcome(answers(noisy(reference, seed=2)), reference, answers(noisy(reference), "eager", r1t1=99))
        assert parity.control.verdict == "INCONCLUSIVE"
        assert "request 1 (prompt of 2 tokens), token 2 of 10, where it takes 99" in parity.arms[0].reasons[0]


def row(replica="arm-0", same=6, dtype="float32", **more):
    return {"arm": "arm", "replica": replica, "error": None, "same": same, "of": 6, "dtype": dtype, **more}


MEASURED = {"verdict": "PASS", "reasons": [], "findings": [{"verdict": "PASS", "reason": "The KL is 0.01."}]}


def measured_as(verdict):
    return {"verdict": verdict, "findings": [{"verdict": verdict, "reason": "Why."}]}


GONE = row(same=0, error="UNAVAILABLE: gone", dtype="bfloat16")


@pytest.mark.parametrize(
    ("rows", "measured", "options", "verdict", "said"),
    [
        ([row(), row("arm-1")], {}, {}, "PASS", "12 of 12"),
        ([row(), row("arm-1", 5)], {}, {}, "FAIL", "11 of 12"),
        ([row(same=2, dtype="bfloat16")], {}, {}, "PASS", "2 of 6"),
        ([GONE], {}, {}, "INCONCLUSIVE", "arm-0 did not answer after the traffic: UNAVAILABLE: gone"),
        ([{**GONE, "later": True}], {}, {}, "INCONCLUSIVE", "Answers are asked for after the traffic."),
        ([row("arm-1", 5)], {"verdict": "PASS"}, {}, "FAIL", "5 of 6"),
        ([], measured_as("PASS"), {"required": True}, "PASS", ""),
        ([], measured_as("INCONCLUSIVE"), {"required": True}, "INCONCLUSIVE", "Why."),
        ([], measured_as("FAIL"), {"required": True}, "FAIL", "Why."),
        ([], measured_as(None), {"required": True}, "INCONCLUSIVE", ""),
        ([], {}, {"required": True}, "INCONCLUSIVE", ""),
        ([], {}, {}, "INCONCLUSIVE", ""),
        ([row(same=0, of=0)], {}, {}, "INCONCLUSIVE", ""),
        # Quantised weights have parity by their accuracy and not by their tokens.
        ([row(same=1)], {}, {"difference": "int8"}, "INCONCLUSIVE", "parity.full = true"),
        ([row(same=1)], MEASURED, {"difference": "int8", "required": True}, "PASS", "The KL is 0.01."),
        ([GONE], MEASURED, {"difference": "int8"}, "INCONCLUSIVE", "gone"),
    ],
)
def test_the_parity_gate_takes_answers_after_the_traffic_and_what_was_measured(rows, measured, options, verdict, said):
    required, difference = options.get("required", False), options.get("difference", "")
    gate = parity_gate("arm", measured, rows, required=required, quantisation_difference=difference)
    assert gate.verdict == verdict
    assert said in gate.reason


def test_answers_that_never_came_are_not_counted_as_equal():
    gate = parity_gate("arm", {}, [row(same=0, of=0, error="gone")], required=False)
    assert (gate.verdict, gate.value) == ("INCONCLUSIVE", None)


def test_no_number_fails_and_leaves_a_document_that_json_can_hold():
    reference = reference_of()
    arm = noisy(reference, seed=2)
    arm[17, 3] = math.nan
    arm[18] = math.inf
    parity = outcome(answers(arm, r1t7=7, r1t8=7), reference)
    assert found(parity)["finite"].verdict == "FAIL"
    assert found(parity)["finite"].value == 2
    assert "first at request 1 (prompt of 2 tokens), token 8" in found(parity)["finite"].reason
    assert json.loads(parity.model_dump_json(), parse_constant=pytest.fail)["verdict"] == "FAIL"


def test_the_interval_rests_on_requests_and_not_on_positions():
    """Positions that repeat their request's value add nothing to what is known."""
    rng = np.random.default_rng(0)
    few = np.exp(rng.standard_normal(8))
    once = ratio_interval(few, np.ones(8), np.arange(8), np.mean, np.random.default_rng(1))
    repeated = ratio_interval(
        np.repeat(few, 50), np.ones(400), np.repeat(np.arange(8), 50), np.mean, np.random.default_rng(1)
    )
    assert repeated == pytest.approx(once)
    value, low, high = once
    assert low < value < high


def test_a_ratio_to_nothing_is_infinite_and_of_nothing_to_nothing_is_one():
    request = np.arange(4)
    rng = np.random.default_rng(0)
    assert ratio_interval(np.ones(4), np.zeros(4), request, np.mean, rng) == (math.inf,) * 3
    assert ratio_interval(np.zeros(4), np.zeros(4), request, np.mean, rng) == (1.0, 1.0, 1.0)


REQUESTS_EACH, TOKENS_EACH, VOCABULARY_EACH = 20, 8, 60
PLACE = Places(lengths=[TOKENS_EACH] * REQUESTS_EACH, prompts=[1, *range(11, 10 + REQUESTS_EACH)])


def logits_of(seed=0):
    return np.random.default_rng(seed).standard_normal((REQUESTS_EACH * TOKENS_EACH, VOCABULARY_EACH)) * 3.0


def measured(size, seed=1, nonsense=slice(0, 0)):
    reference = logits_of()
    logits = reference + 3.0 * size * np.random.default_rng(seed).standard_normal(reference.shape)
    logits[nonsense] = logits_of(seed=7)[nonsense]
    return measure(logits, reference)


def evenness_of(own, control=None, place=PLACE):
    control = control or measured(0.01, seed=2)
    return {item.name: item for item in judge_evenness("int4", own, control, place, "bfloat16")}


@pytest.mark.parametrize("size", [0.02, 0.2])
def test_one_prompt_of_nonsense_fails_though_typical_errors_are_great(size):
    worst = evenness_of(measured(size, nonsense=slice(0, TOKENS_EACH)))["worst prompt"]
    assert (worst.verdict, worst.limit) == ("FAIL", PROMPT_LIMIT)
    assert "at request 0 (prompt of 1 token)" in worst.reason


def test_one_position_of_nonsense_fails():
    findings = evenness_of(measured(0.02, nonsense=slice(19, 20)))
    assert findings["worst prompt"].verdict == "PASS"
    assert (findings["worst position"].verdict, findings["worst position"].limit) == ("FAIL", POSITION_LIMIT)
    assert "request 2 (prompt of 12 tokens), token 4 of 8" in findings["worst position"].reason


def test_a_control_that_errs_at_one_position_alone_hides_no_nonsense_there():
    exact = measured(0.0)
    control = replace(exact, error=np.where(np.arange(len(exact.error)) == 19, 1e-4, 0.0))
    assert evenness_of(measured(0.02, nonsense=slice(19, 20)), control)["worst position"].verdict == "FAIL"


def test_prompts_of_few_positions_are_judged_position_by_position():
    place = Places(
        lengths=[2] * (REQUESTS_EACH * TOKENS_EACH // 2),
        prompts=[3] * (REQUESTS_EACH * TOKENS_EACH // 2),
    )
    assert list(evenness_of(measured(0.02), place=place)) == ["worst position"]
    assert evenness_of(measured(0.02, nonsense=slice(0, 1)), place=place)["worst position"].verdict == "FAIL"


def test_an_arm_without_error_passes_and_a_rounding_in_it_is_nothing():
    exact = measured(0.0)
    assert {item.verdict for item in evenness_of(exact, exact).values()} == {"PASS"}
    rounded = replace(exact, error=np.where(np.arange(len(exact.error)) == 3, 1e-4, exact.error))
    assert {item.verdict for item in evenness_of(rounded).values()} == {"PASS"}


TEXTS, WIDTH = 12, 32
ROWS = TextRows(
    texts=(*range(TEXTS), *range(TEXTS)), batches=(1,) * TEXTS + (4,) * TEXTS, lengths=tuple(range(1, TEXTS + 1))
)
TRUE: Floats = np.random.default_rng(1).normal(size=(TEXTS, WIDTH))
EVERY = TRUE[list(ROWS.texts)]


def off_by(share: float, *, seed: int = 2) -> Floats:
    """The vectors, each turned by noise of that size."""
    noise = np.random.default_rng(seed).normal(size=EVERY.shape)
    noise *= np.linalg.norm(EVERY, axis=1, keepdims=True) / np.linalg.norm(noise, axis=1, keepdims=True)
    return EVERY + share * noise


def judged(arm: Floats, *, control: Floats = EVERY, reference: Floats = TRUE, **more: Any) -> Parity:
    vectors = {"eager": control, "fast": arm}
    return judge_vectors("eager", vectors, reference, rows=ROWS, **{"limit": LEAST_COSINE["float32"], **more})


def test_noise_below_the_limit_passes_and_above_it_fails() -> None:
    # a cosine falls by about half of the square of the noise
    assert judged(off_by(0.01)).verdict == "PASS"
    outcome = judged(off_by(0.05))
    assert outcome.verdict == "FAIL"
    assert "cosine of fast with float64 is 0.99" in outcome.arms[0].reasons[0]
    assert judged(off_by(0.02)).verdict == "FAIL"
    assert judged(off_by(0.02), limit=LEAST_COSINE["bfloat16"]).verdict == "PASS"


def test_one_text_that_is_off_fails_and_is_named_with_its_batch() -> None:
    arm = EVERY.copy()
    arm[TEXTS + 3] = EVERY[TEXTS + 5]
    outcome = judged(arm)
    assert outcome.verdict == "FAIL"
    assert "(1 of 24 vectors below it)" in outcome.arms[0].reasons[0]
    assert "text 3 (4 tokens, in a batch of 4)" in outcome.arms[0].reasons[0]


@pytest.mark.parametrize("broken", [0.0, np.nan, np.inf])
def test_a_vector_without_direction_fails(broken: float) -> None:
    arm = EVERY.copy()
    arm[2] = broken
    outcome = judged(arm)
    assert outcome.verdict == "FAIL"
    assert "is -1.000000" in outcome.arms[0].reasons[0]
    assert "at text 2" in outcome.arms[0].reasons[0]


def test_nothing_is_blamed_on_an_arm_whose_control_is_not_float64s() -> None:
    outcome = judged(EVERY, control=off_by(0.3))
    assert outcome.control.verdict == "INCONCLUSIVE"
    assert outcome.verdict == "INCONCLUSIVE"
    broken = EVERY.copy()
    broken[0] = np.nan
    assert judged(EVERY, control=broken).verdict == "INCONCLUSIVE"


def test_texts_that_all_have_one_direction_show_nothing() -> None:
    same = np.tile(TRUE[:1], (TEXTS, 1))
    outcome = judged(same[list(ROWS.texts)], control=same[list(ROWS.texts)], reference=same)
    assert outcome.verdict == "INCONCLUSIVE"
    assert "tell texts apart" in outcome.control.reasons[0]


def test_an_encoder_that_refuses_a_text_fails_whatever_the_control_is() -> None:
    refused = {"strict": "2 of 24 vectors are refused"}
    for control, fast in ((EVERY, "PASS"), (off_by(0.3), "INCONCLUSIVE")):
        outcome = judged(EVERY, control=control, refused=refused)
        assert outcome.verdict == "FAIL"
        assert {arm.name: arm.verdict for arm in outcome.arms} == {"fast": fast, "strict": "FAIL"}
        assert refused["strict"] in outcome.arms[-1].reasons[0]
