"""torchao's own weights on the CPU: what is held in fewer bits, what it costs, and that nothing recompiles for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchao.quantization
from torch import nn
from torchao.float8.inference import Float8MMConfig
from torchao.quantization import Float8Tensor, PerRow
from torchao.quantization.quantize_.common import KernelPreference
from torchao.quantization.quantize_.workflows.float8.float8_tensor import QuantizeTensorToFloat8Kwargs

from servers.compiler import policy as compiler_policy
from servers.compiler.recorder import CompileRecorder
from servers.config import CompileConfig, ModelConfig
from servers.engine.model import load_model
from servers.engine.quantisation import is_quantised, quantise, step_weight_bytes, stored_bytes, weight_bytes
from servers.fields import ConfigError
from tests.servers.engine.test_runner import recorder

__all__ = ["recorder"]

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
