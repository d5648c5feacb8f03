"""Which modules a policy's patterns name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from servers.compiler.regions import select_regions
from servers.config import CompileConfig
from servers.fields import ConfigError


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


def selected(*regions: str, eager: tuple[str, ...] = (), **policy: bool) -> tuple[list[str], list[str]]:
    config = CompileConfig(enabled=True, regions=regions, eager_regions=eager, **policy)  # type: ignore[arg-type]
    selection = select_regions(model(), config)
    return list(selection.compiled), list(selection.eager)


def test_regional_is_every_block_of_the_longest_list() -> None:
    assert selected(regional=True) == selected("body.layers.*") == (["body.layers.0", "body.layers.1"], [])
    with pytest.raises(ConfigError, match="the model repeats no block"):
        select_regions(nn.Sequential(nn.ReLU()), CompileConfig(enabled=True, regional=True))


@pytest.mark.parametrize(
    ("regions", "eager", "compiled", "left"),
    [
        ((), (), [], []),
        (("head",), (), ["head"], []),
        (("body.layers.*.mlp",), (), ["body.layers.0.mlp", "body.layers.1.mlp"], []),
        (("body.layers.*.m*", "head"), (), ["body.layers.0.mlp", "body.layers.1.mlp", "head"], []),
        # of regions inside each other the outermost
        (("body.layers.0", "body.layers.*.mlp"), (), ["body.layers.0", "body.layers.1.mlp"], []),
        # a region that is left eager, and one inside of it
        (("body.layers.*",), ("body.layers.0",), ["body.layers.1"], []),
        (("body.layers.*.mlp",), ("body.layers.1",), ["body.layers.0.mlp"], []),
        # inside a compiled region
        (("body.layers.*",), ("body.layers.1.mlp",), ["body.layers.0", "body.layers.1"], ["body.layers.1.mlp"]),
        ((), ("head",), [], ["head"]),
    ],
)
def test_patterns_name_what_is_compiled_and_what_stays_eager(
    regions: tuple[str, ...], eager: tuple[str, ...], compiled: list[str], left: list[str]
) -> None:
    assert selected(*regions, eager=eager) == (compiled, left)


@pytest.mark.parametrize(
    ("regions", "eager", "words"),
    [
        (
            ("body.layers.*.ffn",),
            (),
            'regions holds "body.layers.*.ffn", which matches no module of the model: it has ',
        ),
        (("layers.*",), (), "it has body, head, body.layers, body.extra, body.layers.*, body.extra.*"),
        (("body.*",), ("nose",), 'eager_regions holds "nose", which matches no module'),
        (("body.layers",), (), "body.layers only lists modules and is never called: write body.layers.*"),
        (("head",), ("head",), "leaves nothing of compile.regions ['head'] to compile"),
    ],
)
def test_patterns_that_can_do_nothing_are_refused_in_one_line(
    regions: tuple[str, ...], eager: tuple[str, ...], words: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        selected(*regions, eager=eager)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_full_graph_has_no_eager_module_inside() -> None:
    with pytest.raises(ConfigError, match=r"body\.layers\.0\.mlp, which is inside a compiled module, but .*fullgraph"):
        selected("body.layers.*", eager=("body.layers.0.mlp",), fullgraph=True)
    assert selected("body.layers.*.mlp", eager=("body.layers.0.attention",), fullgraph=True)[1] == []
