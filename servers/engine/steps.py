"""The model over the slot cache, as the three steps that are compiled: prefill, extend, decode."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tailgate.servers.engine import attention
from tailgate.servers.engine.kv_cache import SlotCache, Window

_ALIGNED = 8  # elements, 16 bytes of the smallest dtype
_PARTS = 64

Outputs = tuple[torch.Tensor, torch.Tensor]  # logits [B, vocab], their argmax [B]


class _ModelStep(nn.Module):
    """The model over the slot cache. Inputs are int64 on the device: input_ids, positions [B, T]; rows [B].

    widest: no step attends to more positions.
    """

    def __init__(self, model: nn.Module, cache: SlotCache, widest: int) -> None:
        super().__init__()
        self.model = model
        self.cache = cache
        self.widest = widest
        config: Any = model.config
        self.layer_types = frozenset(getattr(config, "layer_types", None) or ())
        self.sliding_window = getattr(config, "sliding_window", None) or 0
        self.takes_window = attention.is_ours(model)
        self.reads_in_place = attention.reads_in_place(model)
        weight = next(model.parameters())
        self.shown, self.hidden = weight.new_zeros(()), weight.new_full((), torch.finfo(weight.dtype).min)
        # given where no attention reads a mask: without any, the model would make one of its own
        self.no_mask = weight.new_zeros((1, 1, 1, 1))

    def answer(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        width: int,
        last: torch.Tensor | None = None,
    ) -> Outputs:
        """Answer for each row's token at index `last` [B], of several; the cache holds the new tokens afterwards.

        width: how many positions are attended to. `cache.window.reads` is set by the step.
        """
        window = self.cache.window
        window.rows, window.positions, window.context, window.last = rows, positions, width, last
        window.is_causal = not self.sliding_window
        on_gpu = self.takes_window and input_ids.is_cuda
        window.in_kernel = on_gpu and window.reads == "slice"
        window.in_place = self.reads_in_place and window.is_causal and window.reads == "rows"
        needs_mask = not (window.in_place or (on_gpu and window.is_causal and window.reads != "rows"))
        if window.in_place:
            window.segments = attention.segments(positions, rows, self.cache.max_length)
        if not window.in_kernel:
            window.index = (rows[:, None] * (self.cache.max_length + 1) + positions).flatten()
        output = self.model(
            input_ids=input_ids,
            position_ids=positions,
            attention_mask=self._mask(positions, width) if needs_mask else self.no_mask,
            past_key_values=self.cache,
            use_cache=True,
            **({"window": window} if self.takes_window else {}),
        )
        window.index = window.rows = window.positions = window.segments = window.last = None
        window.context = 0
        logits: torch.Tensor = output.logits
        if last is not None and logits.shape[1] > 1:  # the output matrix was not called as `gather_last` expects
            logits = _at(logits, last)
        newest = logits[:, -1]
        return newest, largest(newest)

    def _mask(self, positions: torch.Tensor, width: int) -> torch.Tensor | dict[str, torch.Tensor]:
        """Return [B, 1, T, width]: the cache positions that each token sees; one for each layer type if layers differ.

        It is boolean for the decode kernel, otherwise the term to add to the scores. A GPU's attention needs the rows
        of that term aligned; cut from rows of one aligned length, they need no copy in every layer, and a dynamic width
        leaves the compiler no question about their layout.
        """
        reach = -(-self.widest // _ALIGNED) * _ALIGNED
        distance = positions[:, None, :, None] - torch.arange(reach, device=positions.device)
        causal = distance >= 0
        if not self.sliding_window:
            return self._shown(causal, width)
        sliding = self._shown(causal & (distance < self.sliding_window), width)
        if not self.layer_types:
            return sliding
        full = self._shown(causal, width)
        return {kind: sliding if kind == "sliding_attention" else full for kind in sorted(self.layer_types)}

    def _shown(self, seen: torch.Tensor, width: int) -> torch.Tensor:
        if not self.cache.window.in_kernel:
            seen = torch.where(seen, self.shown, self.hidden)
        return seen[..., :width]


def largest(logits: torch.Tensor) -> torch.Tensor:
    """Return the index [B] of the largest of each row's logits [B, vocab], the first of equals.

    On few long rows a GPU's argmax uses few processors; two stages take a fifth of the time.
    """
    batch, size = logits.shape
    if not logits.is_cuda or size % _PARTS:
        return logits.argmax(dim=-1)
    highest, place = logits.reshape(batch, _PARTS, size // _PARTS).max(dim=-1)
    part = highest.argmax(dim=-1, keepdim=True)
    index: torch.Tensor = part * (size // _PARTS) + place.gather(-1, part)
    return index[:, 0]


def gather_last(model: Any, window: Window) -> None:
    """Have the model's output matrix compute logits for `window.last` alone, where a step sets it.

    `logits_to_keep` takes one list of positions for all rows, which makes B × B positions of B rows. The model scales
    and caps its logits afterwards as it always does.
    """
    head = model.get_output_embeddings()
    if head is None:
        return
    project = head.forward

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        if window.last is not None and hidden.dim() == 3:
            hidden, window.last = _at(hidden, window.last), None
        logits: torch.Tensor = project(hidden)
        return logits

    head.forward = forward


def _at(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return [B, 1, n] of values [B, T, n]: each row's at its own index [B]."""
    return values.gather(1, index[:, None, None].expand(-1, 1, values.shape[-1]))


class PrefillStep(_ModelStep):
    """Prompts, or their first chunks, into their rows; answers for each row's token at index `last` [B]."""

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, last: torch.Tensor
    ) -> Outputs:
        self.cache.window.reads = "fresh"
        return self.answer(input_ids, positions, rows, input_ids.shape[1], last)


class ExtendStep(_ModelStep):
    """Later chunks of prompts: attend to what their rows hold already; answers as PrefillStep. context: [L]."""

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        last: torch.Tensor,
        context: torch.Tensor,
    ) -> Outputs:
        self.cache.window.reads = "rows"
        return self.answer(input_ids, positions, rows, context.shape[0], last)


class DecodeStep(_ModelStep):
    """One token on the first B rows; answers for each. rows: [B] = 0 … B-1. context: [L]."""

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, context: torch.Tensor
    ) -> Outputs:
        self.cache.window.reads = "slice"
        return self.answer(input_ids, positions, rows, context.shape[0])
