"""Nonsense at one size is found in an arm whose error is great everywhere; a sensitive question is no nonsense."""

from dataclasses import replace

import numpy as np
import pytest

from analysis.parity.evenness import POSITION_LIMIT, PROMPT_LIMIT, judge_evenness
from analysis.parity.flips import Places
from analysis.parity.measures import measure

REQUESTS, TOKENS, VOCABULARY = 20, 8, 60
PLACE = Places(lengths=[TOKENS] * REQUESTS, prompts=[1, *range(11, 10 + REQUESTS)])


def logits_of(seed=0):
    return np.random.default_rng(seed).standard_normal((REQUESTS * TOKENS, VOCABULARY)) * 3.0


def measured(size, seed=1, nonsense=slice(0, 0)):
    reference = logits_of()
    logits = reference + 3.0 * size * np.random.default_rng(seed).standard_normal(reference.shape)
    logits[nonsense] = logits_of(seed=7)[nonsense]
    return measure(logits, reference)


def found(own, control=None, place=PLACE):
    return {item.name: item for item in judge_evenness("int4", own, control, place, "bfloat16")}


@pytest.mark.parametrize("size", [0.01, 0.05, 0.2])
def test_an_arm_that_errs_alike_everywhere_passes(size):
    findings = found(measured(size), measured(0.01, seed=2))
    assert {item.verdict for item in findings.values()} == {"PASS"}
    assert findings["worst prompt"].value == pytest.approx(1.0, abs=0.2)


@pytest.mark.parametrize("size", [0.02, 0.2])
@pytest.mark.parametrize("with_control", [True, False])
def test_one_prompt_of_nonsense_fails_though_typical_errors_are_great(size, with_control):
    control = measured(0.01, seed=2) if with_control else None
    worst = found(measured(size, nonsense=slice(0, TOKENS)), control)["worst prompt"]
    assert (worst.verdict, worst.limit) == ("FAIL", PROMPT_LIMIT)
    assert worst.reason.startswith("The typical error of int4 at request 0 (prompt of 1 token) is ")


def test_one_position_of_nonsense_fails():
    findings = found(measured(0.02, nonsense=slice(19, 20)), measured(0.01, seed=2))
    assert findings["worst prompt"].verdict == "PASS"
    assert (findings["worst position"].verdict, findings["worst position"].limit) == ("FAIL", POSITION_LIMIT)
    assert "request 2 (prompt of 12 tokens), token 4 of 8" in findings["worst position"].reason


def test_a_question_at_which_the_control_errs_as_much_more_is_no_fault_of_the_arm():
    sensitive = np.where(np.arange(REQUESTS * TOKENS) < TOKENS, 6.0, 1.0)
    own, control = measured(0.02), measured(0.01, seed=2)
    own = replace(own, error=own.error * sensitive)
    assert found(own, control)["worst prompt"].verdict == "INCONCLUSIVE", "uneven, and no nonsense"
    control = replace(control, error=control.error * sensitive)
    assert found(own, control)["worst prompt"].verdict == "PASS"


def test_prompts_of_few_positions_are_judged_position_by_position():
    place = Places(lengths=[2] * (REQUESTS * TOKENS // 2), prompts=[3] * (REQUESTS * TOKENS // 2))
    assert list(found(measured(0.02), place=place)) == ["worst position"]
    assert found(measured(0.02, nonsense=slice(0, 1)), place=place)["worst position"].verdict == "FAIL"


def test_an_arm_without_error_passes_and_a_rounding_in_it_is_nothing():
    exact = measured(0.0)
    assert {item.verdict for item in found(exact, exact).values()} == {"PASS"}
    rounded = replace(exact, error=np.where(np.arange(len(exact)) == 3, 1e-4, exact.error))
    assert {item.verdict for item in found(rounded).values()} == {"PASS"}
