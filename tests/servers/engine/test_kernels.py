"""Attention and the cache of keys and values."""

from __future__ import annotations

import pytest
import torch
from transformers.integrations.sdpa_attention import repeat_kv

from tailgate.servers.engine import attention
from tailgate.servers.engine.attention import grouped_attention
from tailgate.servers.engine.kv_cache import SlotCache


class Module(torch.nn.Module):
    num_key_value_groups = 4
    is_causal = True


@pytest.mark.parametrize(("length", "mask_heads"), [(1, 1), (5, 1), (1, 8)])
def test_packed_heads_give_what_repeated_keys_give(length: int, mask_heads: int) -> None:
    generator = torch.Generator().manual_seed(length)
    query = torch.randn(3, 8, length, 16, generator=generator)
    key, value = (torch.randn(3, 2, 11, 16, generator=generator) for _ in range(2))
    mask = torch.rand(3, mask_heads, length, 11, generator=generator) > 0.3
    mask[..., 0] = True
    for scale in (0.3, None):
        expected = torch.nn.functional.scaled_dot_product_attention(
            query, repeat_kv(key, 4), repeat_kv(value, 4), attn_mask=mask, scale=scale
        ).transpose(1, 2)
        output, _ = grouped_attention(Module(), query, key, value, mask, scaling=scale)
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)


def test_a_padding_row_reads_nothing_beyond_the_memory() -> None:
    positions = torch.full((2, 4), 20)
    positions[0] = torch.arange(16, 20)
    queries, keys, seen = attention.segments(positions, torch.tensor([2, 2]), 20)
    assert (queries.tolist(), keys.tolist(), seen.tolist()) == ([0, 4, 8], [42, 42, 42], [20, 4])


def test_a_moved_row_is_copied_in_every_layer() -> None:
    cache = SlotCache(layers=2, slots=3, max_length=6)
    window = cache.window
    window.rows, window.index, window.context, window.reads = torch.tensor([2]), torch.tensor([2 * 7 + 1]), 4, "rows"
    states = torch.full((1, 2, 1, 5), 3.0)
    for view in cache.views():
        view.update(states, -states, 0)
    cache.move_row(2, 0, positions=2)
    for held in cache.layers:
        assert torch.equal(held.keys, -held.values)
        assert (held.keys.unflatten(0, (3, -1))[0, 1] == 3).all()
    assert cache.memory_bytes() == 2 * 2 * 3 * 2 * 7 * 5 * 4
