from __future__ import annotations

import torch

from benchmarks.floor import StepBytes, measure_bandwidth, step_bytes
from servers.config import ModelConfig
from servers.engine.model import load_model


def test_the_floor_moves_weights_once_and_the_cache_of_every_row() -> None:
    needed = StepBytes(weights=1000, position=10)
    assert needed.total(batch=2, positions=48) == 1000 + 10 * 50
    assert needed.floor_tokens_per_s(batch=2, positions=48, bytes_per_s=3000) == 4


def test_an_embedding_table_is_not_read_unless_it_is_the_output_too() -> None:
    model = load_model(ModelConfig(device="cpu"))
    config = model.config
    every = sum(item.numel() for item in model.parameters()) * 4
    table = config.vocab_size * config.hidden_size * 4
    assert step_bytes(model).weights == every - table
    model.get_output_embeddings().weight = model.get_input_embeddings().weight
    assert step_bytes(model).weights == every - table  # one table, read once as the output


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


def test_a_position_holds_keys_and_values_of_the_key_heads_in_every_layer() -> None:
    # random:tiny: 2 layers, 2 key heads of 16, float32
    assert step_bytes(load_model(ModelConfig(device="cpu"))).position == 2 * 2 * 2 * 16 * 4


def test_bandwidth_is_measured_and_its_best_is_the_floor() -> None:
    rates = measure_bandwidth(torch.device("cpu"), torch.float32, tensor_bytes=4 << 20, repeats=3)
    assert min(rates.values()) > 1e6
    assert rates["best"] == max(rates["copy"], rates["sum"], rates["matvec"])
