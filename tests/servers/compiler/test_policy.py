from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from torch import _inductor as inductor
from torch import nn
from torch._dynamo.backends import registry
from torch._inductor.utils import run_and_get_code

from servers.compiler import internals
from servers.compiler.policy import (
    compile_step,
    configure_compiler,
    graph_changes,
    join_linears,
    load_backend,
    store_single_rows,
)
from servers.config import CompileConfig
from servers.engine.model import join_weights
from servers.fields import ConfigError
from tests.servers.compiler.reset import reset_compiler


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
    """`module` by a compiler that runs the pass, and counts the products or the stored rows of each graph."""

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        graph_pass(graph.graph)
        graph.graph.lint()
        graph.recompile()
        counted = nn.functional.linear if graph_pass is join_linears else internals.store()
        counts.append(sum(node.target is counted for node in graph.graph.nodes))
        return graph.forward

    torch._dynamo.reset()
    return torch.compile(module, backend=backend)


def storages(module: nn.Module) -> set[int]:
    """The memory of the projections' weights."""
    linears = [item for item in module.modules() if isinstance(item, nn.Linear)]
    return {item.weight.untyped_storage().data_ptr() for item in linears}


@torch.no_grad()
def test_projections_that_lie_side_by_side_become_one_product() -> None:
    module, x = Attention(), torch.randn(3, 5, 8)
    expected = module(x)
    join_weights(module)
    assert len(storages(module)) == 2
    torch.testing.assert_close(module(x), expected)
    counts: list[int] = []
    torch.testing.assert_close(compiled(module, counts)(x), expected)
    assert counts == [2]


@torch.no_grad()
def test_weights_that_lie_apart_and_single_rows_stay_as_they_are() -> None:
    module, x = Attention(), torch.randn(3, 5, 8)
    counts: list[int] = []
    torch.testing.assert_close(compiled(module, counts)(x), module(x))
    join_weights(module)
    torch.testing.assert_close(compiled(module, counts)(x[:1, :1]), module(x[:1, :1]))
    assert counts == [4, 4]


def test_projections_with_a_bias_or_other_widths_are_not_joined() -> None:
    module = Attention()
    module.k_proj = nn.Linear(8, 4, bias=True)
    join_weights(module)
    assert len(storages(module)) == 4


class Gated(nn.Module):
    """Two products of one normalised input, and one of what is computed of both."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(8)
        self.gate = nn.Linear(8, 12, bias=False)
        self.up = nn.Linear(8, 12, bias=False)
        self.down = nn.Linear(12, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        return self.down(nn.functional.silu(self.gate(normed)) * self.up(normed))


@torch.no_grad()
def test_an_activation_of_a_single_row_is_computed_once() -> None:
    module, x, counts = Gated(), torch.randn(1, 1, 8), []
    stored = compiled(module, counts, graph_pass=store_single_rows)
    torch.testing.assert_close(stored(x), module(x))
    assert counts == [1]  # what both products give; the norm is left to them


@torch.no_grad()
def test_all_that_quantised_weights_multiply_is_computed_once() -> None:
    module, x, counts = Gated(), torch.randn(1, 1, 8), []
    quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(module, quantization.Int8WeightOnlyConfig(version=2, set_inductor_config=False))
    stored = compiled(module, counts, graph_pass=store_single_rows)
    torch.testing.assert_close(stored(x), module(x))
    assert counts == [2]  # the normalised input too, once for the two products that read it


class ByName(nn.Linear):
    """A product that names its weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(nn.functional.gelu(x), weight=self.weight)


@torch.no_grad()
def test_inputs_of_several_rows_and_those_of_the_graph_are_not_stored() -> None:
    counts: list[int] = []
    stored = compiled(Gated(), counts, graph_pass=store_single_rows)
    stored(torch.randn(3, 1, 8))
    compiled(nn.Linear(8, 4), counts, graph_pass=store_single_rows)(torch.randn(1, 8))
    dynamic = torch.randn(5, 1, 8)
    torch._dynamo.mark_dynamic(dynamic, 0)
    stored(dynamic)
    compiled(ByName(8, 4, bias=False), counts, graph_pass=store_single_rows)(torch.randn(1, 8))
    assert counts == [0, 0, 0, 0]


def test_rows_are_stored_where_the_compiler_makes_reductions_of_products() -> None:
    searching = {"coordinate_descent_tuning": True}
    for join, options, changes in (
        (True, searching, (join_linears, store_single_rows)),
        (False, searching, (store_single_rows,)),
        (True, {}, (join_linears,)),
        (False, {"coordinate_descent_tuning": False}, ()),
    ):
        assert graph_changes(CompileConfig(enabled=True, join_projections=join, options=options)) == changes


@torch.no_grad()
def test_inductor_knows_the_operator_that_stores_a_row() -> None:
    """On a CPU, where the product is a call all the same: its code names the operator, and the answers are the same."""
    policy = CompileConfig(enabled=True, dynamic=False, options={"coordinate_descent_tuning": True})
    module, x = Gated(), torch.randn(1, 1, 8)
    configure_compiler(policy, planned_shapes=1, closed=True, regions=1)
    try:
        with inductor.config.patch(force_disable_caches=True):
            answer, code = run_and_get_code(compile_step(module, policy), x)
        torch.testing.assert_close(answer, module(x))
        assert "force_stride_order" in code[0]
    finally:
        reset_compiler()


TARDY = """
from torch._dynamo import register_backend

@register_backend(name="tardy")
def compile_graph(graph, inputs):
    return graph.forward
"""


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where packages are installed; what they register is forgotten afterwards."""
    registry.list_backends()  # type: ignore[no-untyped-call]
    monkeypatch.setattr(registry, "_BACKENDS", dict(registry._BACKENDS))
    monkeypatch.setattr(registry, "_COMPILER_FNS", dict(registry._COMPILER_FNS))
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def complaint(**policy: str) -> str:
    with pytest.raises(ConfigError) as refused:
        load_backend(CompileConfig(enabled=True, **policy))  # type: ignore[arg-type]
    message = str(refused.value)
    assert "\n" not in message
    return message


def test_a_backend_that_registers_when_its_module_is_imported_is_there_once_the_module_is_named(
    packages: Path,
) -> None:
    (packages / "tardy_torch").mkdir()
    (packages / "tardy_torch" / "compiler.py").write_text(TARDY)
    without = complaint(backend="tardy")
    assert 'compile.backend is "tardy": torch knows ' in without
    assert "name in compile.backend_module what registers it" in without
    load_backend(CompileConfig(enabled=True, backend="tardy", backend_module="tardy_torch.compiler"))
    assert torch.compile(lambda x: x + 1, backend="tardy")(torch.ones(1)) == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be imported (ModuleNotFoundError: No module named 'broken')"),
        (
            "raise OSError('libbroken.so is missing\\nsecond line')",
            "cannot be imported (OSError: libbroken.so is missing)",
        ),
        ("raise SystemExit(3)", "cannot be imported (SystemExit: 3)"),
        ("", 'compile.backend is "tardy", which importing broken does not register'),
    ],
)
def test_a_module_that_brings_no_backend_is_named_in_one_line(packages: Path, text: str | None, words: str) -> None:
    if text is not None:
        (packages / "broken.py").write_text(text)
    assert words in complaint(backend="tardy", backend_module="broken")


def test_an_entry_point_that_cannot_be_loaded_is_named_in_one_line(packages: Path) -> None:
    registry._BACKENDS["promised"] = EntryPoint("promised", "nowhere_at_all:compile", "torch_dynamo_backends")
    message = complaint(backend="promised")
    assert 'compile.backend is "promised" and cannot be loaded (ModuleNotFoundError' in message
