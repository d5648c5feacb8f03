"""Attention and the cache of keys and values."""

from __future__ import annotations

import pytest
import torch

from tailgate.servers.engine.attention import decode, prefill_attention
from tailgate.servers.engine.kv_cache import SlotCache


def assert_attends(output: torch.Tensor, query: torch.Tensor, held: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Assert that `output` [heads, head_dim] of `query` is that over keys and values [L, kv_heads, head_dim]."""
    k, v = (memory.transpose(0, 1).repeat_interleave(2, 0) for memory in held)
    expected = torch.nn.functional.scaled_dot_product_attention(query[:, None], k, v, scale=0.25)
    torch.testing.assert_close(output, expected[:, 0])


@pytest.mark.parametrize("reach", [5, 100])
def test_a_decode_step_stores_its_tokens_and_sees_its_own_rows_up_to_them(reach: int) -> None:
    generator = torch.Generator().manual_seed(reach)
    padding, positions = 20, [7, 20, 0, 19]  # the second row is padding
    query, key, value = (torch.randn(4, heads, 1, 16, generator=generator) for heads in (4, 2, 2))
    memory = [torch.randn(5 * (padding + 1), 2, 16, generator=generator) for _ in range(2)]
    keys, values = expected = [tensor.clone() for tensor in memory]
    stand = torch.tensor(positions)
    output = decode(query, key, value, *memory, stand[:, None], padding, reach, padding, 0.25)
    for row, position in enumerate(positions):
        at = row * (padding + 1) + position
        keys[at], values[at] = key[row, :, 0], value[row, :, 0]
        if position < padding:
            seen = slice(at - min(position, reach - 1), at + 1)
            assert_attends(output[row, 0], query[row, :, 0], (keys[seen], values[seen]))
    assert output.isfinite().all()
    assert all(map(torch.equal, memory, expected))


@pytest.mark.parametrize("reach", [5, 100])
def test_the_parts_of_a_step_see_their_own_rows_up_to_themselves(reach: int) -> None:
    generator = torch.Generator().manual_seed(reach)
    padding, tokens = 20, 9
    query = torch.randn(1, 4, tokens, 16, generator=generator)
    keys, values = (torch.randn(3 * (padding + 1), 2, 16, generator=generator) for _ in range(2))
    # row 1 decodes position 7, row 2 begins a prompt, row 0 goes on with one; the first and last token are padding
    tiles = torch.tensor([(2, 3, 0, 2), (5, 3, 12, 0), (0, 0, 0, 0)])
    output = prefill_attention(query, keys, values, tiles, torch.tensor([-1, 7, -1]), padding, reach, 0.25)
    for token, row, position in ((1, 1, 7), (2, 2, 0), (3, 2, 1), (4, 2, 2), (5, 0, 12), (6, 0, 13), (7, 0, 14)):
        seen = slice(row * (padding + 1) + max(0, position - reach + 1), row * (padding + 1) + position + 1)
        assert_attends(output[0, token], query[0, :, token], (keys[seen], values[seen]))


def test_a_moved_row_is_copied_in_every_layer() -> None:
    cache = SlotCache(layers=2, slots=3, max_length=6)
    cache.window.index = torch.tensor([2 * 7 + 1])
    states = torch.full((1, 2, 1, 5), 3.0)
    for layer in cache.layers:
        layer.update(states, -states, 0)
    cache.move_row(2, 0, positions=2)
    for held in cache.layers:
        assert torch.equal(held.keys, -held.values)
        assert (held.keys.unflatten(0, (3, -1))[0, 1] == 3).all()
    assert cache.memory_bytes() == 2 * 2 * 3 * 2 * 7 * 5 * 4
