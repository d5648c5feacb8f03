"""Flash attention over rows of unequal length, as the GPU's kernel defines it, for a processor."""

from __future__ import annotations

from typing import Any

import torch


def varlen_flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_starts: torch.Tensor,
    key_starts: torch.Tensor,
    max_query: int,
    max_key: int,
    dropout: float,
    is_causal: bool,
    debug: bool,
    *,
    scale: float | None,
    seqused_k: torch.Tensor,
) -> tuple[torch.Tensor, Any]:
    """Attend as [total, heads, D] over keys and values [anything, kv_heads, D].

    Row i has its queries from query_starts[i] to query_starts[i + 1] and seqused_k[i] keys from key_starts[i] on; its
    last query sees all of them.
    """
    assert is_causal
    groups = query.shape[1] // key.shape[1]
    output = torch.empty_like(query)
    for row, seen in enumerate(seqused_k.tolist()):
        first, last = query_starts[row : row + 2].tolist()
        start = int(key_starts[row])
        assert start + seen <= len(key), "keys beyond the memory"
        assert seen <= max_key
        assert last - first <= max_query
        mask = torch.ones(last - first, seen, dtype=torch.bool).tril(seen - (last - first))
        k, v = (item[start : start + seen].transpose(0, 1).repeat_interleave(groups, 0) for item in (key, value))
        output[first:last] = torch.nn.functional.scaled_dot_product_attention(
            query[first:last].transpose(0, 1), k, v, attn_mask=mask, scale=scale
        ).transpose(0, 1)
    return output, None
