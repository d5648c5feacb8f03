"""The compile policy: what torch.compile is asked for.

What of it is private to torch stands in internals.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from servers.compiler import internals
from servers.config import GRAPH_TREE_MODES, CompileConfig
from servers.fields import ConfigError

UnprovenBounds = internals.UnprovenBounds


def configure_compiler(policy: CompileConfig, *, planned_shapes: int, closed: bool, layers: int) -> None:
    """Set the process-wide compiler options that the policy needs. Raises ConfigError for what torch does not know.

    The shapes that a warm-up visits are `planned_shapes`; where they are `closed`, no other one can come.
    """
    if not policy.enabled:
        return
    known_backends = internals.known_backends()
    if policy.backend not in known_backends:
        raise ConfigError(
            f'compile.backend is "{policy.backend}": torch knows {", ".join(known_backends)}; '
            "install the package that brings it"
        )
    for name, value in policy.options.items() if policy.backend == "inductor" else ():
        internals.set_inductor_option(name, value)
    # blocks of one kind share their graphs, and the kinds (windowed or not) are few; a model that shares none has
    # one for each layer
    known = 2 * planned_shapes * (layers if policy.regional else 1)
    # a bucket is a graph; the limit guards against unplanned shapes, not against the ladder
    limit = policy.recompile_limit or (max(8, known) if closed else None)
    internals.set_recompile_limits(limit, max(256, known, policy.recompile_limit))
    if policy.join_projections and policy.backend == "inductor":
        internals.use_graph_pass(_JoinLinears())
    if policy.mark_dynamic:
        internals.keep_equal_sizes_apart()


def join_linears(graph: torch.fx.Graph) -> None:
    """Products of one input with weights that stand side by side in memory (model.join_weights) become one product.

    Weights count as neighbours when the tracer sees them in one storage, each beginning where the last one ends. A
    single row is left alone: the compiler turns its products into reductions, which it fuses better one by one.
    """
    groups: dict[tuple[Any, int], list[tuple[int, Any]]] = {}
    for node in graph.nodes:
        if node.target is not nn.functional.linear or node.kwargs or any(node.args[2:]):
            continue
        operands: list[Any] = list(node.args[:2])
        source, weight = (item.meta.get("example_value") for item in operands)
        if source is None or weight is None or not weight.is_contiguous():
            continue
        if source.numel() != weight.shape[1]:
            groups.setdefault((node.args[0], weight.untyped_storage()._cdata), []).append(
                (weight.storage_offset(), node)
            )
    for (source, _), group in groups.items():
        nodes = [node for _, node in sorted(group, key=lambda item: item[0])]
        weights = [node.args[1].meta["example_value"] for node in nodes]
        ends = [weight.storage_offset() + weight.numel() for weight in weights]
        if len(nodes) < 2 or any(
            end != weight.storage_offset() for end, weight in zip(ends, weights[1:], strict=False)
        ):
            continue
        rows, columns = [weight.shape[0] for weight in weights], weights[0].shape[1]
        first = next(node for node in graph.nodes if node in nodes)
        with graph.inserting_before(first):
            shape = ((sum(rows), columns), (columns, 1), weights[0].storage_offset())
            joined = graph.call_function(torch.as_strided, (nodes[0].args[1], *shape))
            product = graph.call_function(nn.functional.linear, (source, joined))
            starts = itertools.accumulate(rows, initial=0)
            parts = [
                graph.call_function(torch.narrow, (product, -1, start, size))
                for start, size in zip(starts, rows, strict=False)
            ]
        for node, part in zip(nodes, parts, strict=True):
            part.meta = dict(node.meta)
            node.replace_all_uses_with(part)
            graph.erase_node(node)


class _JoinLinears(internals.GraphPass):  # type: ignore[misc]
    """`join_linears` as inductor takes it: with a name under which compiled code is kept."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        join_linears(graph)

    def uuid(self) -> str:
        return "tailgate-join-linears-1"


def _arguments(policy: CompileConfig) -> dict[str, Any]:
    # torch refuses any mode together with a backend other than inductor, as the configuration does any but the default
    mode = policy.mode if policy.mode != "default" else None
    return {"mode": mode, "dynamic": policy.dynamic, "fullgraph": policy.fullgraph, "backend": policy.backend}


def compile_step(step: nn.Module, policy: CompileConfig) -> Callable[..., Any]:
    """`step` as the policy wants it: itself when compiling is off, otherwise under torch.compile."""
    if not policy.enabled:
        return step
    compiled: Callable[..., Any] = torch.compile(step, **_arguments(policy))
    return compiled


def compile_blocks(model: nn.Module, cache: Any, policy: CompileConfig) -> None:
    """Every repeated block of `model` runs compiled when it is called with `cache`; the rest stays as it is.

    The blocks are the longest list of like modules. All have one code, so a shape costs one compile and not one for
    each layer.
    """
    blocks = max((item for item in model.modules() if isinstance(item, nn.ModuleList)), key=len, default=())
    for block, view in zip(blocks, cache.views(), strict=True):
        compiled = torch.compile(block.forward, **_arguments(policy))
        block._compiled_call_impl = _over_cache(block, compiled, cache, view)


def _over_cache(block: Any, compiled: Callable[..., Any], cache: object, view: object) -> Callable[..., Any]:
    def call(*args: Any, past_key_values: object = None, **kwargs: Any) -> Any:
        if past_key_values is not cache:  # somebody else's call of the model
            return block._call_impl(*args, past_key_values=past_key_values, **kwargs)
        return compiled(*args, past_key_values=view, **kwargs)

    return call


def mark_dimension(tensor: torch.Tensor, dimension: int, bounds: Sequence[int], *, promised: bool = True) -> None:
    """Tell the compiler that this dimension varies within `bounds` (low, high). One possible size stays static.

    A promised graph fits all of the bounds or the compiler raises UnprovenBounds; otherwise it may fit a part of them.
    """
    low, high = bounds
    if low >= high or tensor.shape[dimension] < low:
        return
    if promised:
        internals.mark_dynamic(tensor, dimension, low, high)
    else:
        internals.maybe_mark_dynamic(tensor, dimension)


def fix_address(tensor: torch.Tensor) -> None:
    """Tell the compiler that this memory stays where it is, so that graphs may change it in place."""
    internals.mark_static_address(tensor)


def begin_step(policy: CompileConfig) -> None:
    """CUDA-graph trees know that the outputs of the previous step are no longer read."""
    if policy.enabled and policy.mode in GRAPH_TREE_MODES:
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]


def settle(policy: CompileConfig) -> None:
    """The warm-up is over: from here on a guarded policy runs shapes that no graph fits as plain Python."""
    if policy.enabled and policy.guarded:
        torch.compiler.set_stance("eager_on_recompile")
