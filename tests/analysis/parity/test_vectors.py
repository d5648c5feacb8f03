from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from analysis.arrays import Floats
from analysis.parity.borders import Borders
from analysis.parity.judge import Parity
from analysis.parity.vectors import LEAST_COSINE, Embedded, TextRows, cosines, judge_vectors

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


def judged(
    arm: Floats,
    *,
    control: Floats = EVERY,
    reference: Floats | None = TRUE,
    dtype: str = "float32",
    rows: TextRows = ROWS,
    **more: Any,
) -> Parity:
    arms = [Embedded(name="fast", vectors=arm)]
    return judge_vectors(Embedded(name="eager", vectors=control), arms, reference, rows=rows, dtype=dtype, **more)


def test_equal_directions_pass_whatever_their_length() -> None:
    outcome = judged(3.0 * EVERY)
    assert outcome.verdict == "PASS"
    assert outcome.arms[0].figures["cosine_control"]["least"] == pytest.approx(1.0)
    assert outcome.arms[0].figures["cosine"]["median"] == pytest.approx(1.0)


def test_noise_below_the_limit_passes_and_above_it_fails() -> None:
    # a cosine falls by about half of the square of the noise
    assert judged(off_by(0.01)).verdict == "PASS"
    outcome = judged(off_by(0.05))
    assert outcome.verdict == "FAIL"
    assert "cosine 0.99" in outcome.arms[0].reasons[0]
    assert judged(off_by(0.02), dtype="bfloat16").verdict == "PASS"
    assert LEAST_COSINE["bfloat16"] < LEAST_COSINE["float32"]


def test_one_text_that_is_off_fails_and_is_named_with_its_batch() -> None:
    arm = EVERY.copy()
    arm[TEXTS + 3] = EVERY[TEXTS + 5]
    outcome = judged(arm)
    assert outcome.verdict == "FAIL"
    assert "1 vector of 24" in outcome.arms[0].reasons[0]
    assert "text 3 (4 tokens, in a batch of 4)" in outcome.arms[0].reasons[0]


@pytest.mark.parametrize("broken", [0.0, np.nan, np.inf])
def test_a_vector_without_direction_fails(broken: float) -> None:
    arm = EVERY.copy()
    arm[2] = broken
    outcome = judged(arm)
    assert outcome.verdict == "FAIL"
    assert any("no direction to 1 vector of 24, first to text 2" in reason for reason in outcome.arms[0].reasons)
    assert outcome.to_dict()["arms"][0]["verdict"] == "FAIL"


def test_an_arm_without_any_direction_fails_and_its_figures_are_left_open() -> None:
    outcome = judged(np.zeros_like(EVERY))
    assert outcome.verdict == "FAIL"
    assert outcome.to_dict()["arms"][0]["figures"]["cosine"] == {"least": None, "median": None}


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


def test_without_a_reference_the_control_is_the_measure() -> None:
    assert judged(EVERY, reference=None).verdict == "PASS"
    assert judged(off_by(0.05), reference=None).verdict == "FAIL"


def test_no_text_shows_nothing() -> None:
    empty = np.zeros((0, WIDTH))
    rows = TextRows(texts=(), batches=(), lengths=())
    assert judged(empty, control=empty, reference=None, rows=rows).verdict == "INCONCLUSIVE"
    assert cosines(empty, empty).shape == (0,)


def test_vectors_of_another_width_are_no_matter_of_rounding() -> None:
    with pytest.raises(ValueError, match="cannot be compared"):
        cosines(np.ones((2, 3)), np.ones((2, 4)))


def test_a_length_that_no_text_has_leaves_an_encoder_open_and_excuses_no_fault() -> None:
    borders = {"fast": Borders(prompts=(1, 2, 24), unasked_prompts=(24,), batches={"encode": (1, 4)}, enough=13)}
    for arm, verdict in ((EVERY, "INCONCLUSIVE"), (off_by(0.5), "FAIL")):
        outcome = judged(arm, borders=borders)
        assert outcome.verdict == verdict
        assert "prompts of 24 tokens" in outcome.arms[0].reasons[-1]
        assert "parity.prompts = 13" in outcome.arms[0].reasons[-1]


def test_an_encoder_that_refuses_a_text_fails_whatever_the_control_is() -> None:
    refused = {"strict": "2 of 24 vectors are refused"}
    for control, fast in ((EVERY, "PASS"), (off_by(0.3), "INCONCLUSIVE")):
        outcome = judged(EVERY, control=control, refused=refused)
        assert outcome.verdict == "FAIL"
        assert {arm.name: arm.verdict for arm in outcome.arms} == {"fast": fast, "strict": "FAIL"}
        assert refused["strict"] in outcome.arms[-1].reasons[0]
