"""Products of rows with weights, changed in the graph before the compiler reads it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch._inductor.inductor_prims import force_stride_order


def join_linears(graph: torch.fx.Graph) -> None:
    """Join products of one input with weights adjacent in memory (model.join_weights) into one product.

    A single row is left alone: the compiler turns its products into reductions, which it fuses better one by one.
    """
    for nodes in _groups(graph, lambda weight: weight if weight.is_contiguous() else None):
        source = nodes[0].args[0]
        weights = [_example(node.args[1]) for node in nodes]
        if len(nodes) < 2 or _example(source).numel() == weights[0].shape[1]:
            continue
        with graph.inserting_before(min(nodes)):
            joined = graph.call_function(torch.as_strided, (nodes[0].args[1], *_joined(weights)))
            product = graph.call_function(nn.functional.linear, (source, joined))
        _share(graph, product, nodes)


def _groups(graph: torch.fx.Graph, held: Callable[[Any], torch.Tensor | None]) -> Iterator[list[torch.fx.Node]]:
    """Yield products without a bias whose weights lie in a tensor that `held` gives, grouped by input, in memory order.
    Products whose weights are not adjacent in one storage form groups of their own."""
    groups: dict[tuple[Any, int], list[tuple[torch.Tensor, torch.fx.Node]]] = {}
    for node in graph.nodes:
        if node.target is not nn.functional.linear or node.kwargs or any(node.args[2:]):
            continue
        source, weight = (_example(item) for item in node.args[:2])
        if source is None or weight is None or (memory := held(weight)) is None:
            continue
        groups.setdefault((node.args[0], memory.untyped_storage()._cdata), []).append((memory, node))
    for group in groups.values():
        group.sort(key=lambda item: item[0].storage_offset())
        ends = [memory.storage_offset() + memory.numel() for memory, _ in group]
        nodes = [node for _, node in group]
        if all(end == memory.storage_offset() for end, (memory, _) in zip(ends, group[1:], strict=False)):
            yield nodes
        else:
            yield from ([node] for node in nodes)


def _example(node: Any) -> Any:
    return node.meta.get("example_value") if isinstance(node, torch.fx.Node) else None


def _joined(parts: Sequence[torch.Tensor]) -> tuple[tuple[int, int], tuple[int, int], int]:
    """Return (shape, strides, offset) of the matrix that adjacent matrices form."""
    columns = parts[0].shape[1]
    return (sum(part.shape[0] for part in parts), columns), (columns, 1), int(parts[0].storage_offset())


def _share(graph: torch.fx.Graph, product: torch.fx.Node, nodes: Sequence[torch.fx.Node]) -> None:
    """Replace each of `nodes` by its columns of `product`."""
    sizes = [_example(node.args[1]).shape[0] for node in nodes]
    after = product
    for node, start, size in zip(nodes, itertools.accumulate(sizes, initial=0), sizes, strict=False):
        with graph.inserting_after(after):
            part = after = graph.call_function(torch.narrow, (product, -1, start, size))
        part.meta = dict(node.meta)
        node.replace_all_uses_with(part)
        graph.erase_node(node)


def scale_products(graph: torch.fx.Graph) -> None:
    """Multiply the row scales of float8 products with the result instead of within the product.

    Scales within the product leave the library only one kernel, for 128 rows and columns, even for a step of a few
    rows.
    """
    for nodes in _groups(graph, lambda weight: weight.qdata if _is_scaled_by_rows(weight) else None):
        with graph.inserting_before(min(nodes)):
            weights = tuple(node.args[1] for node in nodes)
            product = graph.call_function(scaled_product, (nodes[0].args[0], weights))
        _share(graph, product, nodes)


def _is_scaled_by_rows(weight: Any) -> bool:
    """Return whether this is torchao's Float8Tensor with one scale a row, whose inputs are scaled by row too."""
    inputs = getattr(weight, "act_quant_kwargs", None)
    return hasattr(inputs, "float8_dtype") and weight.scale.shape == (weight.shape[0], 1)


def scaled_product(source: torch.Tensor, weights: Sequence[Any]) -> torch.Tensor:
    """Multiply `source` [..., columns] by adjacent float8 weights [rows, columns]: [..., all rows]."""
    first = weights[0]
    quantisation = first.act_quant_kwargs
    rows = type(first).from_hp(
        source.reshape(-1, source.shape[-1]),
        quantisation.float8_dtype,
        quantisation.granularity,
        quantisation.mm_config,
        quantisation.hp_value_lb,
        quantisation.hp_value_ub,
        quantisation.kernel_preference,
    )
    values, scales = first.qdata, first.scale
    if len(weights) > 1:
        values = torch.as_strided(values, *_joined([weight.qdata for weight in weights]))
        scales = torch.as_strided(scales, *_joined([weight.scale for weight in weights]))
    one = torch.ones((), device=rows.qdata.device)  # the scales follow below
    fast = first.mm_config.use_fast_accum
    product = torch._scaled_mm(rows.qdata, values.t(), one, one, out_dtype=source.dtype, use_fast_accum=fast)
    scaled: torch.Tensor = product * (rows.scale * scales.t())
    return scaled.to(source.dtype).reshape(*source.shape[:-1], -1)


# What memory does not hide while it brings a product's weights.
_ACTIVATIONS = frozenset({"silu", "gelu", "relu", "leaky_relu", "sigmoid", "tanh", "softplus", "mish"})


def store_single_rows(graph: torch.fx.Graph) -> None:
    """Store the input of a single-row product in memory, if it contains an activation or the weights are quantised.

    The compiler turns such a product into a reduction and fuses its input into it: each of thousands of columns
    computes the input again. A norm costs a few multiplications, which are free while plain weights are read.
    """
    stored: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in list(graph.nodes):
        if node.target is not nn.functional.linear or len(node.args) < 2:
            continue
        source, weight = node.args[:2]
        row = _example(source)
        if row is None or source.op == "placeholder" or not all(isinstance(size, int) for size in row.shape):
            continue
        widened = hasattr(_example(weight), "__tensor_flatten__")
        if row.numel() != row.shape[-1] or not (widened or _is_activation(source)):
            continue
        if source not in stored:
            with graph.inserting_before(node):
                # an operator of inductor that gives the same tensor, in memory
                stored[source] = graph.call_function(force_stride_order, (source, row.stride()))
            stored[source].meta = dict(source.meta)
        node.args = (stored[source], *node.args[1:])


def _is_activation(node: torch.fx.Node) -> bool:
    """Return whether `node` is an activation or is computed from one, as in silu(gate) * up."""
    return any(getattr(item.target, "__name__", "") in _ACTIVATIONS for item in (node, *node.all_input_nodes))
