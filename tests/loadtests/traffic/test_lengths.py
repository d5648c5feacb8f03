"""Lengths: the published figures, and reproducible."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import pytest

from loadtests.traffic.lengths import (
    CODE_INPUT,
    CODE_OUTPUT,
    CONVERSATION_INPUT,
    CONVERSATION_OUTPUT,
    SENTENCE_INPUT,
    LengthFit,
    Lengths,
    fitted_lengths,
    workloads_of,
)
from servers.fields import ConfigError


def rng(seed: int = 1) -> np.random.Generator:
    return np.random.default_rng(seed)


def lengths_of(rows: list[tuple[int, int]]) -> Lengths:
    columns = np.array(rows, dtype=np.int64).reshape(-1, 2)
    return Lengths(input_tokens=columns[:, 0], output_tokens=columns[:, 1])


def quantile(fit: LengthFit, p: float) -> float:
    return float(fit.at(np.array([NormalDist().inv_cdf(p)]))[0])


def test_conversation_fit_has_the_published_log_moments() -> None:
    drawn = fitted_lengths("conversation", 200_000, rng=rng())
    for tokens, mu, sigma in ((drawn.input_tokens, 6.633, 0.985), (drawn.output_tokens, 5.019, 0.859)):
        logs = np.log(tokens)
        assert logs.mean() == pytest.approx(mu, abs=0.01)
        assert logs.std() == pytest.approx(sigma, abs=0.01)
        # Lognormal quantiles: exp(mu + z sigma).
        expected = np.exp(mu + sigma * np.array([0.0, 1.2816, 2.3263]))
        assert np.quantile(tokens, [0.5, 0.9, 0.99]) == pytest.approx(expected, rel=0.03)


def test_code_fit_goes_through_the_published_quantiles() -> None:
    assert [quantile(CODE_INPUT, p) for p in (0.5, 0.9, 0.99)] == pytest.approx([1469, 5187, 7436])
    assert [quantile(CODE_OUTPUT, p) for p in (0.5, 0.9, 0.99)] == pytest.approx([13, 55, 251])
    drawn = fitted_lengths("code", 200_000, rng=rng())
    assert np.quantile(drawn.input_tokens, [0.5, 0.9, 0.99]) == pytest.approx([1469, 5187, 7436], rel=0.03)
    assert np.quantile(drawn.output_tokens, [0.5, 0.9, 0.99]) == pytest.approx([13, 55, 251], rel=0.05)
    assert drawn.input_tokens.max() == 7436


def test_long_context_fit_goes_through_the_quantiles_of_its_trace() -> None:
    drawn = fitted_lengths("long-context", 200_000, rng=rng())
    assert np.quantile(drawn.input_tokens, [0.5, 0.9, 0.99]) == pytest.approx([6909, 27367, 85400], rel=0.03)
    assert np.quantile(drawn.output_tokens, [0.5, 0.9, 0.99]) == pytest.approx([350, 597, 1118], rel=0.03)
    assert drawn.input_tokens.max() <= 126195
    assert drawn.output_tokens.max() <= 2000


def test_a_fit_without_a_tail_is_lognormal() -> None:
    assert quantile(CONVERSATION_INPUT, 0.5) == pytest.approx(np.exp(6.633))
    assert quantile(CONVERSATION_OUTPUT, 0.8413447) == pytest.approx(np.exp(5.019 + 0.859), rel=1e-5)


def test_sentences_lie_between_queries_and_passages_and_have_no_answer() -> None:
    words = [(quantile(SENTENCE_INPUT, share) - 2) / 1.3 for share in (0.1586553, 0.8413447)]
    assert words == pytest.approx([5.96, 55.98], rel=1e-4)  # MS MARCO, as BEIR counts it
    assert [round(quantile(SENTENCE_INPUT, q)) for q in (0.5, 0.9, 0.99)] == [27, 100, 289]
    drawn = fitted_lengths("sentences", 20_000, rng=rng())
    assert drawn.input_tokens.max() <= 512
    assert not drawn.output_tokens.any()
    assert not drawn.scaled(3.0).output_tokens.any()


def test_every_task_has_fits_of_its_own() -> None:
    assert workloads_of("embed") == ["sentences"]
    assert workloads_of("generate") == ["code", "conversation", "long-context"]


@pytest.mark.parametrize("fit", ["conversation", "code", "long-context"])
def test_more_rows_leave_the_first_as_they_are(fit: str) -> None:
    few = fitted_lengths(fit, 100, rng=rng())  # type: ignore[arg-type]
    many = fitted_lengths(fit, 1000, rng=rng())  # type: ignore[arg-type]
    assert np.array_equal(few.input_tokens, many.input_tokens[:100])
    assert np.array_equal(few.output_tokens, many.output_tokens[:100])


def test_each_row_may_have_a_factor_of_its_own() -> None:
    scaled = lengths_of([(10, 4), (10, 4), (10, 4)]).scaled(np.array([0.1, 1.0, 2.5]))
    assert scaled.input_tokens.tolist() == [1, 10, 25]
    assert scaled.output_tokens.tolist() == [1, 4, 10]
    assert len(lengths_of([]).scaled(np.array([]))) == 0
    with pytest.raises(ConfigError, match="length_scale is -1"):
        lengths_of([(1, 1), (1, 1)]).scaled(np.array([1.0, -1.0]))


def test_scaled_lengths_never_fall_below_one() -> None:
    scaled = lengths_of([(1, 1), (10, 4), (1000, 99)]).scaled(0.1)
    assert scaled.input_tokens.tolist() == [1, 1, 100]
    assert scaled.output_tokens.tolist() == [1, 1, 10]
    for bad in (0.0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match="length_scale"):
            lengths_of([(1, 1)]).scaled(bad)
