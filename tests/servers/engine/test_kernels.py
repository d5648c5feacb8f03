"""Attention and the cache of keys and values."""

from __future__ import annotations

import pytest
import torch
from transformers.integrations.sdpa_attention import repeat_kv

from tailgate.servers.engine.attention import grouped_attention, prefill_attention
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
        k, v = (memory[seen].transpose(0, 1).repeat_interleave(2, 0) for memory in (keys, values))
        expected = torch.nn.functional.scaled_dot_product_attention(query[0, :, token : token + 1], k, v, scale=0.25)
        torch.testing.assert_close(output[0, token], expected[:, 0])


def test_a_moved_row_is_copied_in_every_layer() -> None:
    cache = SlotCache(layers=2, slots=3, max_length=6)
    window = cache.window
    window.index, window.context = torch.tensor([2 * 7 + 1]), 4
    states = torch.full((1, 2, 1, 5), 3.0)
    for view in cache.views():
        view.update(states, -states, 0)
    cache.move_row(2, 0, positions=2)
    for held in cache.layers:
        assert torch.equal(held.keys, -held.values)
        assert (held.keys.unflatten(0, (3, -1))[0, 1] == 3).all()
    assert cache.memory_bytes() == 2 * 2 * 3 * 2 * 7 * 5 * 4
