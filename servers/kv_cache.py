"""Static KV memory in which every row stands at its own position.

transformers' static cache advances all rows together. A continuous batch needs each row at a position of its own, so
each layer here scatters new keys and values to (row, position) and hands attention the slice it may look at. The
model itself stays unchanged: it sees an ordinary `Cache`.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, StaticLayer


class Window:
    """Where the current step writes and what it reads; set by the step before the model runs.

    rows: [B] int64, cache row of each batch row. positions: [B, T] int64, where each new token is written.
    context: positions attended to. gather: read rows through `rows` (prefill) rather than as the first B rows (decode).
    """

    __slots__ = ("context", "gather", "positions", "rows")

    def __init__(self) -> None:
        self.rows: torch.Tensor | None = None
        self.positions: torch.Tensor | None = None
        self.context = 0
        self.gather = False


class SlotLayer(StaticLayer):  # type: ignore[misc, no-untyped-call]
    """One layer's keys and values: [slots, kv_heads, max_length + 1, head_dim] each.

    The extra position takes what padding writes; no mask ever lets attention see it.
    """

    def __init__(self, *, slots: int, max_length: int, window: Window) -> None:
        super().__init__(max_cache_len=max_length + 1)
        self.slots = slots
        self.window = window

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate for `slots` rows, whatever the batch of the first call."""
        super().lazy_initialization(
            key_states[:1].expand(self.slots, -1, -1, -1), value_states[:1].expand(self.slots, -1, -1, -1)
        )

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write key_states, value_states [B, kv_heads, T, head_dim]; returns what attention reads, length L instead."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        rows, positions, context = self.window.rows, self.window.positions, self.window.context
        keys, values = self.keys, self.values
        assert rows is not None
        assert positions is not None
        assert keys is not None
        assert values is not None
        where = (rows[:, None], slice(None), positions)
        # the two index tensors are split by a slice, so the indexed view is [B, T, kv_heads, head_dim]
        keys[where] = key_states.transpose(1, 2)
        values[where] = value_states.transpose(1, 2)
        if self.window.gather:
            return keys[rows, :, :context], values[rows, :, :context]
        batch = key_states.shape[0]
        return keys[:batch, :, :context], values[:batch, :, :context]


class SlotCache(Cache):  # type: ignore[misc]
    """The KV memory of one arm replica: `slots` rows of `max_length` positions in every layer."""

    def __init__(self, *, layers: int, slots: int, max_length: int) -> None:
        self.window = Window()
        self.max_length = max_length
        super().__init__(
            layers=[SlotLayer(slots=slots, max_length=max_length, window=self.window) for _ in range(layers)]
        )

    @property
    def padding_position(self) -> int:
        """Where padded tokens are written: past every position that is ever attended to."""
        return self.max_length

    def tensors(self) -> list[torch.Tensor]:
        """Keys and values of every layer that has been allocated."""
        layers: list[Any] = self.layers
        return [tensor for layer in layers if layer.is_initialized for tensor in (layer.keys, layer.values)]

    def move_row(self, source: int, target: int) -> None:
        """Copy row `source` over row `target` in every layer."""
        tensors = self.tensors()
        torch._foreach_copy_([tensor[target] for tensor in tensors], [tensor[source] for tensor in tensors])

    def memory_bytes(self) -> int:
        """Bytes held by keys and values."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors())
