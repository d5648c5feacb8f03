"""The model over the slot cache, as the two steps that are compiled: prefill, decode."""

from __future__ import annotations

import torch
from torch import nn

from tailgate.servers.engine.kv_cache import SlotCache

_PARTS = 64

Outputs = tuple[torch.Tensor, torch.Tensor]  # logits [B, vocab], their argmax [B]


class _ModelStep(nn.Module):
    """The model over the slot cache. Inputs are int64 on the device."""

    def __init__(self, model: nn.Module, cache: SlotCache) -> None:
        super().__init__()
        self.model = model
        self.cache = cache
        # no attention reads a mask; without any, the model would make one of its own
        self.no_mask = next(model.parameters()).new_zeros((1, 1, 1, 1))

    def call(self, input_ids: torch.Tensor, positions: torch.Tensor, last: torch.Tensor | int = 0) -> Outputs:
        """Run the model on input_ids [B, T]; the cache holds the new tokens afterwards. Logits are computed for the
        tokens `last` [R] of a single row, 0: for all."""
        window = self.cache.window
        window.positions = positions
        output = self.model(
            input_ids=input_ids,
            position_ids=positions,
            attention_mask=self.no_mask,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=last,
            window=window,
        )
        window.index = window.positions = window.tiles = window.decoding = None
        newest: torch.Tensor = output.logits.flatten(0, 1)
        return newest, largest(newest)


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


class PrefillStep(_ModelStep):
    """Tokens of prompts and of running answers, one after another; answers for each cache row, as far as one ends here.

    input_ids, positions: [1, N]. rows: [N], the cache row of each token. last: [R], the index of the token that each
    cache row answers for. tiles, decoding: `Window`.
    """

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        last: torch.Tensor,
        tiles: torch.Tensor,
        decoding: torch.Tensor,
    ) -> Outputs:
        window = self.cache.window
        window.tiles, window.decoding = tiles, decoding
        window.index = rows * (window.padding + 1) + positions[0]
        outputs = self.call(input_ids, positions, last)
        assert len(outputs[0]) == len(last), "this model computes logits for every token: give another model"
        return outputs


class DecodeStep(_ModelStep):
    """One token on the first B rows; answers for each. input_ids, positions: [B, 1]. context: [L]."""

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, context: torch.Tensor) -> Outputs:
        window = self.cache.window
        window.index = window.tiles = None  # a prefill step that failed midway leaves its own
        window.context = context.shape[0]
        return self.call(input_ids, positions)
