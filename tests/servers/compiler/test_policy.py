from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.backends import registry

from servers.compiler.policy import join_linears, load_backend
from servers.config import CompileConfig
from servers.engine.model import join_weights
from servers.fields import ConfigError


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


def compiled(module: nn.Module, counts: list[int]) -> Callable[[torch.Tensor], torch.Tensor]:
    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        join_linears(graph.graph)
        graph.graph.lint()
        graph.recompile()
        counts.append(sum(node.target is nn.functional.linear for node in graph.graph.nodes))
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
