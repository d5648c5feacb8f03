from __future__ import annotations

import pytest
import torch
from transformers.integrations.sdpa_attention import repeat_kv

from servers.attention import grouped_attention


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
