"""What a policy compiles, and how it changes graphs."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor
from torch import nn
from torch._dynamo.backends import registry
from torchao import quantization
from torchao.float8.inference import Float8MMConfig
from torchao.quantization.quantize_.workflows import QuantizeTensorToFloat8Kwargs
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tailgate.servers.compiler import artifacts, policy, products, regions
from tailgate.servers.compiler.policy import graph_changes, load_backend
from tailgate.servers.compiler.products import (
    few_product,
    join_linears,
    multiply_rows,
    row_product,
    scale_products,
    scaled_product,
)
from tailgate.servers.compiler.recorder import EagerCanary
from tailgate.servers.compiler.regions import repeated_blocks
from tailgate.servers.complaint import ConfigError
from tailgate.servers.config import CompileConfig
from tailgate.servers.engine.model import join_weights
from tests.servers.compiler.test_recorder import reset_compiler
from tests.servers.test_config import refusal


def test_a_policy_chooses_the_changes_of_its_graphs() -> None:
    assert graph_changes(CompileConfig(enabled=True)) == (scale_products,)
    both = CompileConfig(enabled=True, join_projections=True, row_kernels=True)
    assert graph_changes(both) == (multiply_rows, scale_products, join_linears)


def test_the_key_of_compiled_code_holds_the_source_of_graph_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch may look for it by the graph as it was before them: code of other changes would be taken for theirs."""

    def name(*changes: policy.GraphChange) -> str:
        policy._source_digest.cache_clear()
        return policy._GraphPass(changes).uuid()

    before = name(join_linears)
    assert name(join_linears) == before
    assert name(scale_products) != before
    rewritten = tmp_path / "products.py"
    rewritten.write_text("# otherwise\n")
    with monkeypatch.context() as patched:
        patched.setattr(products, "__file__", str(rewritten))
        assert name(join_linears) != before
    assert name(join_linears) == before


@pytest.mark.parametrize(
    ("option", "value"), [("fastest", True), ("triton.fastest", True), ("triton", True), ("max_autotune", "x")]
)
def test_an_option_that_torch_does_not_have_or_of_another_type_is_refused(option: str, value: object) -> None:
    policy = CompileConfig(enabled=True, options={option: value})  # type: ignore[dict-item]
    refusal(load_backend, policy, words=(f"compile.options.{option}", repr(value), "torch._inductor.config"))


def test_a_backend_that_no_package_announces_or_that_cannot_be_loaded_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refusal(
        load_backend, CompileConfig(enabled=True, backend="tardy"), words=('compile.backend is "tardy"', "inductor")
    )
    registry.list_backends()  # type: ignore[no-untyped-call]
    monkeypatch.setattr(registry, "_BACKENDS", dict(registry._BACKENDS))
    registry._BACKENDS["promised"] = EntryPoint("promised", "nowhere_at_all:compile", "torch_dynamo_backends")
    with pytest.raises(ConfigError, match=r'compile\.backend is "promised".*ModuleNotFoundError'):
        load_backend(CompileConfig(enabled=True, backend="promised"))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.attention(x))


def model(layers: int = 2) -> nn.Module:
    body = nn.Module()
    body.layers, body.extra = nn.ModuleList(Layer() for _ in range(layers)), nn.ModuleList([nn.ReLU()])
    whole = nn.Module()
    whole.body, whole.head = body, nn.Linear(2, 2)
    return whole


def test_the_repeated_block_is_the_longest_list_of_modules() -> None:
    whole: Any = model()
    assert list(repeated_blocks(whole)) == list(whole.body.layers)
    with pytest.raises(ConfigError, match="the model repeats no block"):
        repeated_blocks(nn.Sequential(nn.ReLU()))


def test_tokens_that_a_block_writes_as_plain_python_count_and_those_of_others_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    window = SimpleNamespace(canary=EagerCanary())

    class Writing(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            window.canary.steps += 1
            return super().forward(x)

    # What is compiled begins in a graph, and a break within leaves the rest to Python.
    monkeypatch.setattr(regions, "compile_step", lambda function, policy: lambda module, x: module.forward(x))
    for inside, compiled in ((nn.Linear(2, 2), True), (Writing(2, 2), False)):
        whole = nn.Sequential(inside, Writing(2, 2))
        cache = SimpleNamespace(window=window, layers=())
        run = regions.CompiledBlocks([inside], CompileConfig(enabled=True), cache=cache)
        whole(torch.zeros(1, 2))
        assert run.ran_compiled() is compiled


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Weights and inputs are the same in every run."""
    torch.manual_seed(1)


class Attention(nn.Module):
    """Grouped projections of one input, and one that reads something else."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(8, 12, bias=False)
        self.k_proj = nn.Linear(8, 4, bias=False)
        self.v_proj = nn.Linear(8, 4, bias=False)
        self.o_proj = nn.Linear(12, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        k, q, v = self.k_proj(x), self.q_proj(x), self.v_proj(x)
        return self.o_proj(q * 2) + k.sum(-1, keepdim=True) + v.sum(-1, keepdim=True)


def compiled(
    module: nn.Module, counts: list[int], *, graph_pass: Callable[[torch.fx.Graph], None] = join_linears
) -> Callable[[torch.Tensor], torch.Tensor]:
    """`module` by a compiler that runs the pass, and counts what the pass is about in each graph."""
    counted: Any = {join_linears: [nn.functional.linear], scale_products: [scaled_product]}.get(
        graph_pass, [row_product, few_product]
    )

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        graph_pass(graph.graph)
        graph.graph.lint()
        graph.recompile()
        counts.append(sum(node.target in counted for node in graph.graph.nodes))
        return graph.forward

    torch._dynamo.reset()
    return torch.compile(module, backend=backend)


def storages(module: nn.Module) -> set[int]:
    weights = [item.weight for item in module.modules() if isinstance(item, nn.Linear)]
    return {getattr(weight, "qdata", weight).untyped_storage().data_ptr() for weight in weights}


@torch.no_grad()
def test_projections_that_lie_side_by_side_become_one_product() -> None:
    """But those with a bias, or whose weights are not adjacent stay as they are."""
    module, x = Attention(), torch.randn(3, 5, 8)
    expected = module(x)
    counts: list[int] = []
    torch.testing.assert_close(compiled(module, counts)(x), expected)
    join_weights(module)
    assert len(storages(module)) == 2
    torch.testing.assert_close(module(x), expected)
    torch.testing.assert_close(compiled(module, counts)(x), expected)
    assert counts == [4, 2]
    biased = Attention()
    biased.k_proj = nn.Linear(8, 4, bias=True)
    join_weights(biased)
    assert len(storages(biased)) == 4


class Gated(nn.Module):
    """Two products of one normalised input, and one of what is computed of both."""

    def __init__(self, columns: int = 8, rows: int = 12) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(columns)
        self.gate_proj = nn.Linear(columns, rows, bias=False)
        self.up_proj = nn.Linear(columns, rows, bias=False)
        self.down_proj = nn.Linear(rows, columns, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        return self.down_proj(nn.functional.silu(self.gate_proj(normed)) * self.up_proj(normed))


class Computed(nn.Linear):
    """Multiplies by a weight that is computed in each step."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight * 2)


class Block(nn.Module):
    """A gated block between a norm and a residual, as transformers' models write them."""

    def __init__(self, columns: int, rows: int) -> None:
        super().__init__()
        self.norm = LlamaRMSNorm(columns, eps=1e-5)
        self.mlp = Gated(columns, rows)
        self.mlp.norm = nn.Identity()
        nn.init.normal_(self.norm.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "rows", "made"),
    [("float32", 1, 2), ("int8", 1, 2), ("float8", 1, 2), ("bfloat16", 1, 2), ("bfloat16", 3, 2), ("float32", 3, 0)],
)
def test_products_of_few_rows_take_what_is_around_them(
    kind: str, rows: int, made: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gate, and for one row the norm and the residual: of three products two are left."""
    monkeypatch.setattr(products, "_DEVICES", ("cpu",))
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    module, x, counts = Block(256, 512).to(dtype), torch.randn(rows, 1, 256, dtype=dtype), []
    if kind == "int8":
        quantization.quantize_(module, quantization.Int8WeightOnlyConfig(version=2, set_inductor_config=False))
    elif kind == "float8":
        in_float8(module, scaled_inputs=False)
    join_weights(module)
    answer = compiled(module, counts, graph_pass=multiply_rows)(x)
    assert distance(answer, module(x)) < (0.01 if dtype == torch.bfloat16 else 1e-6)
    if kind == "float32":
        computed = compiled(Computed(256, 64), counts, graph_pass=multiply_rows)
        computed(x)
        assert counts.pop() == 0
    narrow = Gated(8, 12)  # no block of 256 columns
    compiled(narrow, counts, graph_pass=multiply_rows)(torch.randn(rows, 1, 8))
    alone = Block(256, 512).to(dtype)  # its weights are not adjacent
    compiled(alone, counts, graph_pass=multiply_rows)(x)
    assert counts == [made, 0, made and 3]


def in_float8(module: nn.Module, *, scaled_inputs: bool) -> None:
    """The layers' weights in float8 with a scale for each row, as torchao's configurations make them for a GPU; no row
    has the scale of another."""
    rows = quantization.PerRow()
    inputs = QuantizeTensorToFloat8Kwargs(granularity=rows) if scaled_inputs else None
    for layer in (item for item in module.modules() if isinstance(item, nn.Linear)):
        magnitudes = torch.linspace(0.1, 4.0, layer.out_features, dtype=layer.weight.dtype)
        held = quantization.Float8Tensor.from_hp(
            layer.weight.detach() * magnitudes[torch.randperm(layer.out_features), None],
            granularity=rows,
            mm_config=Float8MMConfig(use_fast_accum=True),
            act_quant_kwargs=inputs,
        )
        layer.weight = nn.Parameter(held, requires_grad=False)


def distance(answer: torch.Tensor, expected: torch.Tensor) -> float:
    """The length of the difference over the length of what is expected. Rows become float8 of numbers that differ by a
    rounding to bfloat16, so some come out a step apart: up to 0.06 in 100 tries, as far as either is from float32's."""
    return float((answer - expected).float().norm() / expected.float().norm())


@torch.no_grad()
@pytest.mark.parametrize("shape", [(1, 1, 64), (3, 5, 64)])
def test_scales_of_rows_are_multiplied_with_what_comes_of_a_product(shape: tuple[int, ...]) -> None:
    """To rounding: the products are of the same float8 numbers, joined where they stand side by side."""
    module, counts = Gated(64, 96).to(torch.bfloat16), []
    x = torch.randn(shape, dtype=torch.bfloat16)
    in_float8(module, scaled_inputs=True)
    expected = module(x)
    assert distance(compiled(module, counts, graph_pass=scale_products)(x), expected) < 0.08
    join_weights(module)
    assert len(storages(module)) == 2
    torch.testing.assert_close(module(x), expected)
    assert distance(compiled(module, counts, graph_pass=scale_products)(x), expected) < 0.08
    unscaled = Gated(64, 96).to(torch.bfloat16)
    in_float8(unscaled, scaled_inputs=False)
    compiled(unscaled, counts, graph_pass=scale_products)(x)
    assert counts == [3, 2, 0], "products without scaled inputs keep their scales"


def test_kernels_can_be_launched_from_a_folder_and_unknown_options_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (inductor.use_static_cuda_launcher, inductor.dynamic_scale_rblock) == (True, True), "as torch brings them"
    try:
        monkeypatch.setitem(artifacts._PORTABLE, "use_some_later_launcher", False)
        artifacts.compile_portably()
        assert not inductor.use_static_cuda_launcher
        assert not inductor.dynamic_scale_rblock
    finally:
        reset_compiler()
