from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from servers.compiler.policy import join_linears
from servers.engine.model import join_weights


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
