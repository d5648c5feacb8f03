from __future__ import annotations

import pytest
import torch
from transformers.integrations.sdpa_attention import repeat_kv

from servers.engine import attention
from servers.engine.attention import grouped_attention
from servers.engine.kv_cache import Window
from tests.fakes.flash import varlen_flash


class Module(torch.nn.Module):
    num_key_value_groups = 4
    is_causal = True


@pytest.mark.parametrize("length", [1, 5])
def test_packed_heads_give_what_repeated_keys_give(length: int) -> None:
    generator = torch.Generator().manual_seed(length)
    query = torch.randn(3, 8, length, 16, generator=generator)
    key, value = (torch.randn(3, 2, 11, 16, generator=generator) for _ in range(2))
    mask = torch.rand(3, 1, length, 11, generator=generator) > 0.3
    mask[..., 0] = True
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, repeat_kv(key, 4), repeat_kv(value, 4), attn_mask=mask, scale=0.3
    ).transpose(1, 2)
    output, _ = grouped_attention(Module(), query, key, value, mask, scaling=0.3)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)


def test_a_mask_of_its_own_for_each_head_is_respected() -> None:
    generator = torch.Generator().manual_seed(9)
    query = torch.randn(2, 8, 1, 16, generator=generator)
    key, value = (torch.randn(2, 2, 7, 16, generator=generator) for _ in range(2))
    mask = torch.rand(2, 8, 1, 7, generator=generator) > 0.4
    mask[..., 0] = True
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, repeat_kv(key, 4), repeat_kv(value, 4), attn_mask=mask
    ).transpose(1, 2)
    output, _ = grouped_attention(Module(), query, key, value, mask)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("padded", [6, 8])
def test_chunks_in_place_see_exactly_what_precedes_each_token(padded: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "flash", varlen_flash)
    generator = torch.Generator().manual_seed(padded)
    limit, rows, starts, real = 20, torch.tensor([2, 0, 1]), (12, 6, 0), (6, 3, 6)
    keys, values = (torch.randn(3 * (limit + 1) + padded, 2, 16, generator=generator) for _ in range(2))
    query = torch.randn(3, 8, padded, 16, generator=generator)
    positions = torch.full((3, padded), limit)
    for row, (start, count) in enumerate(zip(starts, real, strict=True)):
        positions[row, :count] = torch.arange(start, start + count)
    window = Window(padding=limit)
    window.in_place, window.context, window.memory = True, 18, (keys, values)
    window.segments = attention.segments(positions, rows, limit)
    output, _ = grouped_attention(Module(), query, query, query, None, window, scaling=0.3)
    assert window.memory is None
    for row, (start, count) in enumerate(zip(starts, real, strict=True)):
        first = int(rows[row]) * (limit + 1)
        for token in range(count):
            seen = slice(first, first + start + token + 1)
            expected = torch.nn.functional.scaled_dot_product_attention(
                query[row, :, token, None],
                keys[seen].transpose(0, 1).repeat_interleave(4, 0),
                values[seen].transpose(0, 1).repeat_interleave(4, 0),
                scale=0.3,
            )
            torch.testing.assert_close(output[row, token], expected[:, 0], rtol=1e-5, atol=1e-6)


def test_a_padding_row_reads_nothing_beyond_the_memory() -> None:
    positions = torch.full((2, 4), 20)
    positions[0] = torch.arange(16, 20)
    queries, keys, seen = attention.segments(positions, torch.tensor([2, 2]), 20)
    assert (queries.tolist(), keys.tolist(), seen.tolist()) == ([0, 4, 8], [42, 42, 42], [20, 4])
