"""Static KV memory in which every row has a position of its own; the model sees an ordinary `Cache`.

transformers' static cache advances all rows together.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.cache_utils import Cache, StaticLayer

from tailgate.servers.compiler.policy import fix_address
from tailgate.servers.compiler.recorder import EagerCanary

TILE = 64


@dataclass(slots=True, kw_only=True, eq=False)
class Window:
    """Where the current step writes and what it reads; set by the step before the model runs.

    index: [N] int64, where a prefill step writes each new token, as row · (max_length + 1) + position.
    positions: [B, T] int64. padding: the position at which padding tokens are written, past every one that is ever
    attended to.
    context: positions that a decode step attends to at most.
    tiles: [K, 4] int64, contiguous, the prompts of a prefill step in pieces of up to `TILE` tokens: (index of the first
    token in the step, tokens, position of the first, cache row); pieces without tokens are padding. None in a decode
    step, whose B rows are the first of the cache and whose attention writes the new tokens itself.
    decoding: [slots] int64, where row r decodes its position in a prefill step, else -1; its token has the index r.
    memory: keys and values of the layer at hand, which attention reads in place.
    canary: counts the layers that write new tokens as plain Python.
    """

    index: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    tiles: torch.Tensor | None = None
    decoding: torch.Tensor | None = None
    memory: tuple[torch.Tensor, torch.Tensor] | None = None
    context: int = 0
    padding: int = 0
    canary: EagerCanary = field(default_factory=EagerCanary)


class SlotLayer(StaticLayer):  # type: ignore[misc, no-untyped-call]
    """One layer's keys and values: [slots · (max_length + 1), kv_heads, head_dim] each.

    The extra position of each row holds what padding writes and attention never sees. The tensors are flat because the
    compiler writes in place only what it was given, not a view of it.
    """

    def __init__(self, *, slots: int, max_length: int, window: Window, static_address: bool) -> None:
        super().__init__(max_cache_len=max_length + 1)
        self.slots = slots
        self.window = window
        self.static_address = static_address

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate for `slots` rows, whatever the batch of the first call."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = self._allocate(key_states), self._allocate(value_states)
        self.is_initialized = True

    def _allocate(self, states: torch.Tensor) -> torch.Tensor:
        shape = (self.slots * self.max_cache_len, states.shape[1], states.shape[3])
        memory = torch.zeros(shape, dtype=states.dtype, device=states.device)
        if self.static_address:
            # CUDA-graph trees refuse a graph that changes memory without one; it also ties a graph to its layer
            fix_address(memory)
        return memory

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write what a prefill step brings, key_states, value_states [1, kv_heads, N, head_dim]; show attention the
        memory. Returns both as they are.

        The layer's number, which a block gives that is compiled separately, is not read: the compiler would make a
        graph for each."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        window = self.window
        if not torch.compiler.is_compiling():
            window.canary.steps += 1
        assert self.keys is not None
        assert self.values is not None
        window.memory = self.keys, self.values
        if window.index is not None:
            self.keys.index_copy_(0, window.index, key_states[0].transpose(0, 1))
            self.values.index_copy_(0, window.index, value_states[0].transpose(0, 1))
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Return 0: every step brings its own positions, so the model has nothing to count."""
        return 0


class SlotCache(Cache):  # type: ignore[misc]
    """The KV memory of one arm replica: `slots` rows of `max_length` positions in every layer."""

    def __init__(self, *, layers: int, slots: int, max_length: int, static_address: bool = False) -> None:
        self.window = Window(padding=max_length)
        sizes: dict[str, Any] = {"slots": slots, "max_length": max_length}
        made: list[Any] = [SlotLayer(**sizes, window=self.window, static_address=static_address) for _ in range(layers)]
        super().__init__(layers=made)

    def tensors(self) -> list[torch.Tensor]:
        layers: list[Any] = self.layers
        return [tensor for layer in layers if layer.is_initialized for tensor in (layer.keys, layer.values)]

    def move_row(self, source: int, target: int, positions: int) -> None:
        """Copy the first `positions` of row `source` over those of row `target` in every layer."""
        tensors = self.tensors()
        ends = [row * (self.window.padding + 1) for row in (source, target)]
        sources, targets = ([tensor[end : end + positions] for tensor in tensors] for end in ends)
        torch._foreach_copy_(targets, sources)

    def memory_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors())
