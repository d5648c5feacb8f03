"""Products of rows with weights, changed in the graph before the compiler reads it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn


def join_linears(graph: torch.fx.Graph) -> None:
    """Join products of one input with weights adjacent in memory (model.join_weights) into one product."""
    for nodes in _groups(graph, lambda weight: weight if weight.is_contiguous() else None):
        source = nodes[0].args[0]
        weights = [_example(node.args[1]) for node in nodes]
        if len(nodes) < 2:
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


# The product of one row: an operator of its own, opaque to the compiler. row_kernels.py adds its form on a GPU.
ROW_PRODUCT = "tailgate::row_product"
_DEVICES = ("cuda",)


def multiply_row(
    source: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    norm: torch.Tensor | None,
    epsilon: float,
    residual: torch.Tensor | None,
    gated: bool,
) -> torch.Tensor:
    """Return source [..., columns], a single row, times weight [rows, columns]: [..., rows].

    scale: [rows, 1], of quantised weights. norm: [columns], the weight of an RMS norm of `source` with `epsilon`.
    residual: [..., rows], added to the product. gated: return silu(first half) * second half of the product instead.
    """
    row = source if source.dtype == torch.float64 else source.float()
    if norm is not None:
        row = row * norm * torch.rsqrt((row * row).mean(-1, keepdim=True) + epsilon)
    product = row @ weight.to(row.dtype).t()
    if scale is not None:
        product = product * scale[:, 0]
    if gated:
        gate, up = product.chunk(2, -1)
        product = nn.functional.silu(gate) * up
    if residual is not None:
        product = product + residual
    return product.to(source.dtype)


torch.library.define(ROW_PRODUCT, torch.library.infer_schema(multiply_row, mutates_args=()))
torch.library.impl(ROW_PRODUCT, "cpu", multiply_row)


# The product of few rows, of plain weights.
FEW_PRODUCT = "tailgate::few_product"
FEW_ROWS = 64  # the library is as fast with more
FEW_TILE = 64  # outputs a program


def multiply_few(source: torch.Tensor, weight: torch.Tensor, gated: bool) -> torch.Tensor:
    """Return source [..., columns] times weight [rows, columns]: [..., rows].

    gated: return silu(first half) * second half of the product instead.
    """
    product = nn.functional.linear(source, weight)
    if not gated:
        return product
    gate, up = product.chunk(2, -1)
    return nn.functional.silu(gate) * up


torch.library.define(FEW_PRODUCT, torch.library.infer_schema(multiply_few, mutates_args=()))
torch.library.impl(FEW_PRODUCT, "cpu", multiply_few)


def _shape(source: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
    rows = weight.shape[0] // 2 if rest[-1] else weight.shape[0]
    return source.new_empty((*source.shape[:-1], rows))


torch.library.register_fake(ROW_PRODUCT, _shape)
torch.library.register_fake(FEW_PRODUCT, _shape)


def row_block(columns: int) -> int:
    """Return how many columns the kernel reads at once, a power of two that divides `columns`; 0 where none is long
    enough."""
    return next((block for block in (1024, 512, 256) if columns % block == 0), 0)


def multiply_rows(graph: torch.fx.Graph) -> None:
    """Compute products of a single row by `multiply_row`, together with the norm before them and the gate or the
    residual after them, and those of decode steps of more rows by `multiply_few`, together with the gate."""
    for nodes in _groups(graph, _held_by_rows):
        source, weight = (_example(item) for item in nodes[0].args[:2])
        rows, held = math.prod(source.shape[:-1]), getattr(weight, "qdata", weight)
        is_row = isinstance(rows, int) and rows == 1
        if held.device.type not in _DEVICES or not row_block(held.shape[1]):
            continue
        if not is_row and not _is_few(source, held, [_example(node.args[1]).shape[0] for node in nodes]):
            continue
        if held.device.type == "cuda":
            from tailgate.servers.compiler import row_kernels  # noqa: F401 (registers itself)
        gate, after = _gate(nodes), _residual(nodes) if is_row else None
        with graph.inserting_before(max(nodes)):
            weights = tuple(node.args[1] for node in nodes)
            if is_row:
                row, norm, epsilon = _norm(nodes[0].args[0])
                residual = after and next(item for item in after.args if item is not nodes[0])
                product = graph.call_function(row_product, (row, weights, norm, epsilon, residual, gate is not None))
            else:
                product = graph.call_function(few_product, (nodes[0].args[0], weights, gate is not None))
        if (last := gate or after) is None:
            _share(graph, product, nodes)
            continue
        product.meta = dict(last.meta)
        last.replace_all_uses_with(product)
        # users before what they use
        for node in (last, *(item for item in last.all_input_nodes if gate and item not in nodes), *nodes):
            graph.erase_node(node)


def _is_few(source: torch.Tensor, weight: torch.Tensor, rows: Sequence[int]) -> bool:
    """Return whether a step decodes rows, as many as come or few, and the kernel can multiply them."""
    if source.dim() != 3 or source.shape[1] != 1 or (isinstance(source.shape[0], int) and source.shape[0] > FEW_ROWS):
        return False
    is_plain = weight.dtype == source.dtype and weight.element_size() == 2
    return is_plain and all(size % FEW_TILE == 0 for size in rows)


def _held_by_rows(weight: Any) -> torch.Tensor | None:
    """Return the numbers of a weight that the kernel reads: plain ones, or quantised ones with one scale a row. Others
    than parameters may be written by the kernel in front, for which the kernel of a row does not wait."""
    if not isinstance(weight, nn.Parameter):
        return None
    held: Any = weight
    if not hasattr(held, "__tensor_flatten__"):
        return held if held.is_contiguous() else None
    scale = getattr(held, "scale", None)
    return held.qdata if scale is not None and scale.shape == (held.shape[0], 1) else None


def row_product(
    source: torch.Tensor,
    weights: Sequence[Any],
    norm: torch.Tensor | None,
    epsilon: float,
    residual: torch.Tensor | None,
    gated: bool,
) -> torch.Tensor:
    """Return `multiply_row` of weights that are adjacent in memory."""
    first = weights[0]
    values, scales = getattr(first, "qdata", first), getattr(first, "scale", None)
    if len(weights) > 1:
        values = torch.as_strided(values, *_joined([getattr(item, "qdata", item) for item in weights]))
        scales = None if scales is None else torch.as_strided(scales, *_joined([item.scale for item in weights]))
    product: torch.Tensor = torch.ops.tailgate.row_product(source, values, scales, norm, epsilon, residual, gated)
    return product


def few_product(source: torch.Tensor, weights: Sequence[torch.Tensor], gated: bool) -> torch.Tensor:
    """Return `multiply_few` of weights that are adjacent in memory."""
    weight = weights[0] if len(weights) == 1 else torch.as_strided(weights[0], *_joined(weights))
    product: torch.Tensor = torch.ops.tailgate.few_product(source, weight, gated)
    return product


def _only_user(node: torch.fx.Node, *names: str) -> torch.fx.Node | None:
    user = next(iter(node.users), None)
    return user if len(node.users) == 1 and getattr(user and user.target, "__name__", "") in names else None


def _gate(nodes: Sequence[torch.fx.Node]) -> torch.fx.Node | None:
    """Return silu(first) * second of two products, where nothing else reads them."""
    if len(nodes) != 2 or (silu := _only_user(nodes[0], "silu")) is None:
        return None
    gated = _only_user(silu, "mul")
    same_rows = _example(nodes[0].args[1]).shape == _example(nodes[1].args[1]).shape
    return gated if gated is not None and same_rows and _only_user(nodes[1], "mul") is gated else None


def _residual(nodes: Sequence[torch.fx.Node]) -> torch.fx.Node | None:
    """Return the sum of the product and what stood before it, where nothing else reads the product."""
    added = _only_user(nodes[0], "add") if len(nodes) == 1 else None
    if added is None or added.kwargs or len(added.args) != 2:
        return None
    other = next((item for item in added.args if item is not nodes[0]), None)
    if not isinstance(other, torch.fx.Node) or not other < nodes[0]:
        return None
    one, two = _example(other), _example(nodes[0])
    return added if one is not None and (one.shape, one.dtype) == (two.shape, two.dtype) else None


def _norm(source: Any) -> tuple[Any, Any, float]:
    """Return (input, weight, epsilon) of the RMS norm that gives `source`, written as transformers' models write it;
    (source, None, 0) of anything else."""
    try:
        weight, narrow = source.args
        wide, root = narrow.args[0].args
        mean, epsilon = root.args[0].args
        power = mean.args[0]
        chain = (source, narrow, narrow.args[0], wide, root, root.args[0], mean, power)
        names = [getattr(node.target, "__name__", node.target) for node in chain]
        is_norm = names == ["mul", "to", "mul", "to", "rsqrt", "add", "mean", "pow"]
        row, normed = _example(wide.args[0]), _example(source)
        is_same = row.dtype == normed.dtype and _example(weight).shape == normed.shape[-1:]
        if is_norm and is_same and power.args == (wide, 2) and mean.args[1:] == (-1,):
            return wide.args[0], weight, float(epsilon)
    except (AttributeError, IndexError, TypeError, ValueError):
        pass  # another shape of graph
    return source, None, 0.0
