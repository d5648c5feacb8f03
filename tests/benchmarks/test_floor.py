from __future__ import annotations

from benchmarks.floor import StepBytes, step_bytes
from servers.config import ModelConfig
from servers.engine.model import load_model


def test_the_floor_moves_weights_once_and_the_cache_of_every_row() -> None:
    needed = StepBytes(weights=1000, position=10)
    assert needed.total(batch=2, positions=48) == 1000 + 10 * 50
    assert needed.floor_tokens_per_s(batch=2, positions=48, bytes_per_s=3000) == 4


def test_quantised_weights_count_as_they_are_stored_and_have_their_share_of_the_floor() -> None:
    plain, fewer = (
        step_bytes(load_model(ModelConfig(device="cpu", quantisation=kind)))  # type: ignore[arg-type]
        for kind in ("none", "int8-weight-only")
    )
    assert (plain.quantised, plain.quantised_share(batch=1, positions=10)) == (0, 0.0)
    linear = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 176)
    assert linear < fewer.quantised < 1.1 * linear
    assert fewer.weights == plain.weights - 4 * linear + fewer.quantised
    assert fewer.quantised_share(batch=2, positions=48) == fewer.quantised / fewer.total(batch=2, positions=48)
    assert fewer.bytes_a_token(batch=2, positions=48) == fewer.total(batch=2, positions=48) / 2
