from __future__ import annotations

import numpy as np

from benchmarks.sentences import best_rate, drawn_texts, words_of


def test_texts_have_as_many_tokens_as_were_drawn_and_fit_the_model() -> None:
    words = words_of(100)
    texts = drawn_texts(500, words, 64, np.random.default_rng(1))
    tokens = [len(text.split()) + 2 for text in texts]  # one at each end
    assert len(words) == 95
    assert 3 <= min(tokens) < max(tokens) == 64


def test_the_best_rate_keeps_the_limit() -> None:
    calls = [
        {"p99_ms": 10.0, "sentences_per_s": 100.0},
        {"p99_ms": 50.0, "sentences_per_s": 400.0},
        {"p99_ms": 51.0, "sentences_per_s": 900.0},
    ]
    assert best_rate(calls, 50.0) == 400.0
    assert best_rate(calls, 5.0) == 0.0
