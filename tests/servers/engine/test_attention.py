"""torchao's own weights on the CPU: what is held in fewer bits, what it costs, and that nothing recompiles for it."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
import torchao.quantization
from torch import nn
from torchao.float8.inference import Float8MMConfig
from torchao.quantization import Float8Tensor, PerRow
from torchao.quantization.quantize_.common import KernelPreference
from torchao.quantization.quantize_.workflows.float8.float8_tensor import QuantizeTensorToFloat8Kwargs
from transformers.integrations.sdpa_attention import repeat_kv

from servers.compiler import policy as compiler_policy
from servers.compiler.recorder import CompileRecorder
from servers.config import CompileConfig, ModelConfig
from servers.engine import attention, sampling
from servers.engine.attention import grouped_attention
from servers.engine.kv_cache import SlotCache, Window
from servers.engine.model import load_model
from servers.engine.quantisation import is_quantised, quantise, step_weight_bytes, stored_bytes, weight_bytes
from servers.engine.scheduler import Job
from servers.fields import ConfigError
from tests.fakes.flash import varlen_flash
from tests.servers.engine.test_runner import recorder

__all__ = ["recorder"]


class Module(torch.nn.Module):
    num_key_value_groups = 4
    is_causal = True


@pytest.mark.parametrize("length", [1, 5])
def test_packed_heads_give_what_repeated_keys_give(length: int) -> None:
    generator = torch.Generator().manual_seed(length)
    query = torch.randn(3, 8, length, 16, generator=generator)
    key, value = (torch.randn(3, 2, 11, 16, generator=generator) for _ in range(2))
    mask = torch.rand(3, 1, length, 11, generator=generator) > 0.3
    mask[..., 0] = True
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, repeat_kv(key, 4), repeat_kv(value, 4), attn_mask=mask, scale=0.3
    ).transpose(1, 2)
    output, _ = grouped_attention(Module(), query, key, value, mask, scaling=0.3)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)


def test_a_mask_of_its_own_for_each_head_is_respected() -> None:
    generator = torch.Generator().manual_seed(9)
    query = torch.randn(2, 8, 1, 16, generator=generator)
    key, value = (torch.randn(2, 2, 7, 16, generator=generator) for _ in range(2))
    mask = torch.rand(2, 8, 1, 7, generator=generator) > 0.4
    mask[..., 0] = True
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, repeat_kv(key, 4), repeat_kv(value, 4), attn_mask=mask
    ).transpose(1, 2)
    output, _ = grouped_attention(Module(), query, key, value, mask)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("padded", [6, 8])
def test_chunks_in_place_see_exactly_what_precedes_each_token(padded: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "flash", varlen_flash)
    generator = torch.Generator().manual_seed(padded)
    limit, rows, starts, real = 20, torch.tensor([2, 0, 1]), (12, 6, 0), (6, 3, 6)
    keys, values = (torch.randn(3 * (limit + 1) + padded, 2, 16, generator=generator) for _ in range(2))
    query = torch.randn(3, 8, padded, 16, generator=generator)
    positions = torch.full((3, padded), limit)
    for row, (start, count) in enumerate(zip(starts, real, strict=True)):
        positions[row, :count] = torch.arange(start, start + count)
    window = Window(padding=limit)
    window.in_place, window.context, window.memory = True, 18, (keys, values)
    window.segments = attention.segments(positions, rows, limit)
    output, _ = grouped_attention(Module(), query, query, query, None, window, scaling=0.3)
    assert window.memory is None
    for row, (start, count) in enumerate(zip(starts, real, strict=True)):
        first = int(rows[row]) * (limit + 1)
        for token in range(count):
            seen = slice(first, first + start + token + 1)
            expected = torch.nn.functional.scaled_dot_product_attention(
                query[row, :, token, None],
                keys[seen].transpose(0, 1).repeat_interleave(4, 0),
                values[seen].transpose(0, 1).repeat_interleave(4, 0),
                scale=0.3,
            )
            torch.testing.assert_close(output[row, token], expected[:, 0], rtol=1e-5, atol=1e-6)


def test_a_padding_row_reads_nothing_beyond_the_memory() -> None:
    positions = torch.full((2, 4), 20)
    positions[0] = torch.arange(16, 20)
    queries, keys, seen = attention.segments(positions, torch.tensor([2, 2]), 20)
    assert (queries.tolist(), keys.tolist(), seen.tolist()) == ([0, 4, 8], [42, 42, 42], [20, 4])


def filled(slots: int = 3, max_length: int = 6) -> SlotCache:
    cache = SlotCache(layers=2, slots=slots, max_length=max_length)
    write(cache, rows=[0], positions=[[0]], value=0.0, reads="rows")
    return cache


def by_row(memory: torch.Tensor) -> torch.Tensor:
    return memory.unflatten(0, (3, -1))


def write(
    cache: SlotCache,
    *,
    rows: list[int],
    positions: list[list[int]],
    value: float,
    reads: Literal["fresh", "rows", "slice"],
) -> torch.Tensor:
    window = cache.window
    window.rows = torch.tensor(rows)
    window.index = (window.rows[:, None] * (cache.max_length + 1) + torch.tensor(positions)).flatten()
    window.context, window.reads = 4, reads
    states = torch.full((len(rows), 2, len(positions[0]), 5), value)
    for layer in range(2):
        keys, values = cache.update(states, -states, layer)
        assert torch.equal(keys, -values)
    return keys


def test_each_row_is_written_at_its_own_position() -> None:
    cache = filled()
    seen = write(cache, rows=[0, 1], positions=[[2], [3]], value=7.0, reads="slice")
    assert seen.shape == (2, 2, 4, 5)
    assert (seen[0, :, 2] == 7).all()
    assert (seen[1, :, 3] == 7).all()
    assert (seen[0, :, 3] == 0).all()
    assert (seen[1, :, 2] == 0).all()


def test_later_chunks_read_and_writes_the_rows_it_names() -> None:
    cache = filled()
    seen = write(cache, rows=[2], positions=[[0, 1]], value=5.0, reads="rows")
    assert seen.shape == (1, 2, 4, 5)
    assert (seen[0, :, :2] == 5).all()
    assert (by_row(cache.layers[0].keys)[0] == 0).all()


def test_padding_writes_where_no_context_reaches() -> None:
    cache = filled(max_length=4)
    seen = write(cache, rows=[1], positions=[[0, cache.max_length]], value=9.0, reads="rows")
    assert (seen[0, :, 1:] == 0).all()


def test_a_moved_row_is_copied_in_every_layer() -> None:
    cache = filled()
    write(cache, rows=[2], positions=[[1]], value=3.0, reads="rows")
    cache.move_row(2, 0, positions=2)
    for layer in cache.layers:
        keys, values = by_row(layer.keys), by_row(layer.values)
        assert torch.equal(keys[0, :2], keys[2, :2])
        assert torch.equal(values[0, :2], values[2, :2])
        assert (keys[0, 1] == 3).all()


def test_memory_is_counted_for_all_rows_and_layers() -> None:
    cache = filled(slots=3, max_length=6)
    assert cache.memory_bytes() == 2 * 2 * 3 * 2 * 7 * 5 * 4


def test_a_whole_prompt_attends_to_itself_and_is_kept_for_later() -> None:
    cache = filled()
    seen = write(cache, rows=[1], positions=[[0, 1, 2]], value=4.0, reads="fresh")
    assert seen.shape == (1, 2, 3, 5)
    assert (by_row(cache.layers[0].keys)[1, :3] == 4).all()
    assert (by_row(cache.layers[0].keys)[1, 3:] == 0).all()


def test_a_view_serves_its_own_layer_whatever_number_it_is_asked_for() -> None:
    cache = filled()
    states = torch.full((1, 2, 1, 5), 6.0)
    cache.window.rows, cache.window.index, cache.window.reads = torch.tensor([0]), torch.tensor([2]), "rows"
    cache.views()[1].update(states, states, 0)
    assert (by_row(cache.layers[1].keys)[0, 2] == 6).all()
    assert (by_row(cache.layers[0].keys)[0, 2] == 0).all()


def job(seed: int = 0, *, launched: int = 1, **settings: float) -> Job:
    return Job(request_id="x", prompt=[1], max_tokens=1, recv_ns=0, launched=launched, seed=seed, **settings)  # type: ignore[arg-type]


def draw(logits: torch.Tensor, jobs: list[Job], rows: list[int] | None = None) -> list[int]:
    rows = rows if rows is not None else list(range(len(jobs)))
    draws = torch.tensor(sampling.draw_table(jobs, rows, logits.shape[0]))
    ranked = any(item.top_k or item.top_p for item in jobs)
    tokens = sampling.choose(logits, logits.argmax(-1), draws, ranked=ranked).tolist()
    return [tokens[row] for row in rows]


def test_temperature_zero_takes_the_largest_logit() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    jobs = [job(), job(5, temperature=1.0), job()]
    assert draw(logits, jobs)[0] == int(logits[0].argmax())
    assert draw(logits, jobs)[2] == int(logits[2].argmax())
    assert sampling.is_greedy([job()])
    assert not sampling.is_greedy(jobs)


def allowed(logits: torch.Tensor, *, top_k: float, top_p: float) -> list[int]:
    ordered, order = logits[None].sort(descending=True)
    kept = sampling.allowed_probabilities(ordered, top_k=torch.tensor([top_k]), top_p=torch.tensor([top_p]))
    return sorted(order[kept > 0].tolist())


def test_top_k_keeps_only_the_largest() -> None:
    assert allowed(torch.tensor([1.0, 3.0, 2.0, 0.0]), top_k=2, top_p=0) == [1, 2]
    assert allowed(torch.tensor([1.0, 3.0, 2.0, 0.0]), top_k=0, top_p=0) == [0, 1, 2, 3]


def test_top_p_keeps_the_smallest_set_that_holds_the_mass() -> None:
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    assert allowed(logits, top_k=0, top_p=0.7) == [0, 1]
    assert allowed(logits, top_k=0, top_p=0.01) == [0]
    assert allowed(logits, top_k=0, top_p=1.0) == [0, 1, 2, 3]


def test_a_seeded_answer_does_not_depend_on_its_neighbours_or_its_row() -> None:
    logits = torch.randn(1, 200, generator=torch.Generator().manual_seed(2)).expand(4, -1)
    alone = [draw(logits, [job(11, launched=n, temperature=1.0, top_k=50)], [0]) for n in range(1, 6)]
    crowd = [job(launched=3, seed=i, temperature=2.0) for i in range(3)]
    together = [draw(logits, [*crowd, job(11, launched=n, temperature=1.0, top_k=50)])[3:] for n in range(1, 6)]
    assert alone == together
    assert len({token for tokens in alone for token in tokens}) > 1


def test_draws_follow_the_distribution_with_and_without_ranking() -> None:
    logits = torch.log(torch.tensor([[0.7, 0.2, 0.1]])).expand(2000, -1)
    for settings in ({}, {"top_k": 3}):
        jobs = [job(3, launched=n, temperature=1.0, **settings) for n in range(2000)]
        tokens = draw(logits, jobs)
        assert abs(tokens.count(0) / 2000 - 0.7) < 0.04
        assert abs(tokens.count(2) / 2000 - 0.1) < 0.03


def test_a_token_that_is_not_allowed_is_never_drawn() -> None:
    logits = torch.log(torch.tensor([[0.6, 0.3, 0.1]])).expand(500, -1)
    assert set(draw(logits, [job(n, temperature=1.0, top_k=2) for n in range(500)])) == {0, 1}
    assert set(draw(logits, [job(n, temperature=1.0, top_p=0.5) for n in range(500)])) == {0}


def test_uniform_numbers_are_spread_over_the_unit_interval_and_repeat_for_seed_and_index() -> None:
    numbers = [sampling.uniform(7, index) for index in range(4000)]
    assert all(0 <= number < 1 for number in numbers)
    assert abs(sum(numbers) / 4000 - 0.5) < 0.02
    assert sampling.uniform(7, 1) == numbers[1] != sampling.uniform(8, 1)
    assert 0 <= sampling.uniform(2**64 - 1, 0) < 1


PLAIN = ModelConfig(device="cpu")
INT8 = ModelConfig(device="cpu", quantisation="int8-weight-only")
FLOAT8 = ModelConfig(device="cpu", quantisation="float8-weight-only")


def refusal(settings: ModelConfig, model: nn.Module | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        quantise(model or load_model(PLAIN), settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_linear_layers_of_the_blocks_are_quantised_and_nothing_else() -> None:
    model: Any = load_model(INT8)
    held = {name for name, item in model.named_parameters() if is_quantised(item)}
    parts = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert {name.split(".")[-2] for name in held} == set(parts)
    assert len(held) == len(parts) * 2
    assert not is_quantised(model.get_output_embeddings().weight)
    assert not is_quantised(model.get_input_embeddings().weight)


def test_bytes_are_those_that_are_stored() -> None:
    """An integer a weight; for each row a scale in the model's dtype, and a zero point of one byte."""
    weight: Any = load_model(INT8).get_submodule("model.layers.0.mlp.down_proj").weight
    assert stored_bytes(weight) == 64 * 176 + 5 * 64
    plain, quantised = load_model(PLAIN), load_model(INT8)
    every, fewer = weight_bytes(quantised)
    assert weight_bytes(plain) == (sum(item.numel() * 4 for item in plain.parameters()), 0)
    linear = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 176)
    rows = 2 * (64 + 64 + 32 + 32 + 176 + 176 + 64)
    assert fewer == linear + 5 * rows
    assert every == weight_bytes(plain)[0] - 4 * linear + fewer


@pytest.mark.parametrize(("settings", "most"), [(INT8, 0.05), (FLOAT8, 0.2)])
def test_the_quantised_model_computes_nearly_the_same(settings: ModelConfig, most: float) -> None:
    """float8 keeps 3 bits of a weight beside its exponent, int8 up to 7."""
    ids = torch.arange(3, 43)[None]
    with torch.no_grad():
        due, own = (load_model(held)(ids).logits.log_softmax(-1) for held in (PLAIN, settings))
    divergence = (due.exp() * (due - own)).sum(-1).mean()
    assert 1e-6 < divergence < most


def test_float8_weights_take_a_byte_each_and_a_scale_a_row() -> None:
    weight: Any = load_model(FLOAT8).get_submodule("model.layers.0.mlp.down_proj").weight
    assert stored_bytes(weight) == 64 * 176 + 4 * 64


def test_a_layer_that_stays_as_it_was_is_no_quantised_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchao passes over what it cannot hold, and says so in a log at most."""
    monkeypatch.setattr(torchao.quantization, "quantize_", lambda *_, **__: None)
    assert (
        "14 of 14 linear layers of the blocks cannot be held so, first model.layers.0.self_attn.q_proj (64 × 64)"
        in (refusal(INT8))
    )


def test_what_torchao_refuses_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("no such kernel\nand more")

    monkeypatch.setattr(torchao.quantization, "quantize_", refuse)
    assert "torchao cannot do it here (no such kernel): use another" in refusal(INT8)


def test_files_that_are_quantised_already_are_refused() -> None:
    model: Any = load_model(PLAIN)
    model.config.quantization_config = {"quant_method": "gptq"}
    assert "the files of random:tiny are quantised already: leave it out" in refusal(INT8, model)


@pytest.mark.parametrize("kind", ["float8-per-row", "int4-weight-only"])
def test_a_cpu_that_was_found_and_not_named_is_refused_too(kind: Any) -> None:
    known = "the model runs on the CPU, which only knows float8-weight-only and int8-weight-only: use one"
    assert known in refusal(ModelConfig(quantisation=kind))


def test_a_gpu_too_old_for_float8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(PLAIN)
    monkeypatch.setattr(nn.Module, "parameters", lambda _: iter([torch.empty(0, device="meta")]))
    monkeypatch.setattr("servers.engine.quantisation.check_quantisation", lambda *_, **__: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "an older card")
    assert "an older card has compute capability 8.0, and float8 is known from 8.9 on" in refusal(
        ModelConfig(quantisation="float8-per-row"), model
    )


class Block(nn.Module):
    """A layer as float8 arms have it, with weights of a size of its own."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
        torch.manual_seed(0)
        weight = size * torch.randn(64, 64, dtype=torch.bfloat16)
        activations = QuantizeTensorToFloat8Kwargs(granularity=PerRow(), kernel_preference=KernelPreference.TORCH)
        held = Float8Tensor.from_hp(
            weight,
            granularity=PerRow(),
            mm_config=Float8MMConfig(use_fast_accum=True),
            kernel_preference=KernelPreference.TORCH,
            act_quant_kwargs=activations,
        )
        self.layer.weight = nn.Parameter(held, requires_grad=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, 64] to [rows, 64]."""
        return hidden + self.layer(hidden)


def test_a_guard_on_float8_s_scales_does_not_recompile(recorder: CompileRecorder) -> None:
    """Scales of weights are tensors, and those of activations are computed in the graph: neither is a guarded value."""
    policy = CompileConfig(enabled=True, backend="aot_eager", dynamic=False, fullgraph=True)
    blocks = [Block(size) for size in (1.0, 3.7, 0.1)]
    compiled = [compiler_policy.compile_step(block, policy) for block in blocks]
    with torch.no_grad():
        for size in (1.0, 17.3, 0.01):
            hidden = size * torch.randn(4, 64, dtype=torch.bfloat16)
            for block, call in zip(blocks, compiled, strict=True):
                torch.testing.assert_close(call(hidden), block(hidden), rtol=0.1, atol=0.1 * size)
    assert [event.kind for event in recorder.drain() if event.kind in ("compile", "recompile")] == ["compile"]


def test_a_decode_step_reads_all_weights_but_a_table_of_which_it_needs_a_row() -> None:
    model = load_model(PLAIN)
    every, _ = weight_bytes(model)
    table = stored_bytes(model.get_input_embeddings().weight)
    assert step_weight_bytes(model) == every - table
    model.set_output_embeddings(torch.nn.Linear(1, 1))
    model.get_output_embeddings().weight = model.get_input_embeddings().weight
    assert step_weight_bytes(model) == weight_bytes(model)[0], "one table, read whole as the output"
