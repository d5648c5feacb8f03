"""Attention, sampling and the cache of keys and values."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from transformers.integrations.sdpa_attention import repeat_kv

from servers.engine import attention, sampling
from servers.engine.attention import grouped_attention
from servers.engine.kv_cache import SlotCache, Window
from servers.engine.scheduler import Job
from tests.fakes.kernels import varlen_flash


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


def job(seed: int = 0, *, launched: int = 1, **settings: float) -> Job:
    return Job(request_id="x", prompt=[1], max_tokens=1, recv_ns=0, launched=launched, seed=seed, **settings)  # type: ignore[arg-type]


def draw(logits: torch.Tensor, jobs: list[Job], rows: list[int] | None = None) -> list[int]:
    rows = rows if rows is not None else list(range(len(jobs)))
    draws = torch.tensor(sampling.draw_table(jobs, rows, logits.shape[0]))
    ranked = any(item.top_k or item.top_p for item in jobs)
    tokens = sampling.choose(logits, logits.argmax(-1), draws, ranked=ranked).tolist()
    return [tokens[row] for row in rows]


def test_temperature_zero_takes_the_largest_logit() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    jobs = [job(), job(5, temperature=1.0), job()]
    assert draw(logits, jobs)[::2] == logits.argmax(-1).tolist()[::2]
    assert sampling.is_greedy([job()])
    assert not sampling.is_greedy(jobs)


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (2, 0, [0, 1]),
        (0, 0, [0, 1, 2, 3]),
        (0, 0.7, [0, 1]),
        (0, 0.01, [0]),
        (0, 1.0, [0, 1, 2, 3]),
    ],
)
def test_top_k_and_top_p_keep_the_most_probable_tokens(top_k: float, top_p: float, kept: list[int]) -> None:
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    ordered, order = logits[None].sort(descending=True)
    allowed = sampling.allowed_probabilities(ordered, top_k=torch.tensor([top_k]), top_p=torch.tensor([top_p]))
    assert sorted(order[allowed > 0].tolist()) == kept


def test_draws_follow_the_distribution_of_the_allowed_tokens() -> None:
    logits = torch.log(torch.tensor([[0.7, 0.2, 0.1]])).expand(2000, -1)
    for settings in ({}, {"top_k": 3}):
        tokens = draw(logits, [job(3, launched=n, temperature=1.0, **settings) for n in range(2000)])
        assert abs(tokens.count(0) / 2000 - 0.7) < 0.04
        assert abs(tokens.count(2) / 2000 - 0.1) < 0.03
    for settings, met in (({"top_k": 2}, {0, 1}), ({"top_p": 0.5}, {0})):
        assert set(draw(logits, [job(n, temperature=1.0, **settings) for n in range(2000)])) == met


def test_uniform_numbers_are_spread_over_the_unit_interval_and_repeat_for_seed_and_index() -> None:
    numbers = [sampling.uniform(7, index) for index in range(4000)]
    assert all(0 <= number < 1 for number in numbers)
    assert abs(sum(numbers) / 4000 - 0.5) < 0.02
    assert sampling.uniform(7, 1) == numbers[1] != sampling.uniform(8, 1)
    assert 0 <= sampling.uniform(2**64 - 1, 0) < 1


def filled(max_length: int = 6) -> SlotCache:
    cache = SlotCache(layers=2, slots=3, max_length=max_length)
    write(cache, rows=[0], positions=[[0]], value=0.0, reads="rows")
    return cache


def rows_of(cache: SlotCache, layer: int = 0) -> torch.Tensor:
    return cache.layers[layer].keys.unflatten(0, (3, -1))


def write(
    cache: SlotCache,
    *,
    rows: list[int],
    positions: list[list[int]],
    value: float,
    reads: Literal["fresh", "rows", "slice"],
) -> torch.Tensor:
    window = cache.window
    window.rows = torch.tensor(rows)
    window.index = (window.rows[:, None] * (cache.max_length + 1) + torch.tensor(positions)).flatten()
    window.context, window.reads = 4, reads
    states = torch.full((len(rows), 2, len(positions[0]), 5), value)
    for layer in range(2):
        keys, values = cache.update(states, -states, layer)
        assert torch.equal(keys, -values)
    return keys


def test_each_row_is_written_at_its_own_position() -> None:
    seen = write(filled(), rows=[0, 1], positions=[[2], [3]], value=7.0, reads="slice")
    assert seen.shape == (2, 2, 4, 5)
    assert [(seen[row, :, place] == 7).all().item() for row in (0, 1) for place in (2, 3)] == [True, False, False, True]
    assert (seen[0, :, 3] == 0).all()
    assert (seen[1, :, 2] == 0).all()


def test_a_whole_prompt_reads_itself_and_is_kept_and_a_later_chunk_reads_its_row() -> None:
    cache = filled()
    seen = write(cache, rows=[1], positions=[[0, 1, 2]], value=4.0, reads="fresh")
    assert seen.shape == (1, 2, 3, 5)
    assert (rows_of(cache)[1, :3] == 4).all()
    assert (rows_of(cache)[1, 3:] == 0).all()
    seen = write(cache, rows=[1], positions=[[3]], value=5.0, reads="rows")
    assert seen[0, 0, :, 0].tolist() == [4, 4, 4, 5]
    assert (rows_of(cache)[0] == 0).all()


def test_padding_writes_where_no_context_reaches() -> None:
    cache = filled(max_length=4)
    seen = write(cache, rows=[1], positions=[[0, cache.max_length]], value=9.0, reads="rows")
    assert (seen[0, :, 1:] == 0).all()


def test_a_moved_row_is_copied_in_every_layer() -> None:
    cache = filled()
    write(cache, rows=[2], positions=[[1]], value=3.0, reads="rows")
    cache.move_row(2, 0, positions=2)
    for layer, held in enumerate(cache.layers):
        assert torch.equal(held.keys, -held.values)
        assert (rows_of(cache, layer)[0, 1] == 3).all()
    assert cache.memory_bytes() == 2 * 2 * 3 * 2 * 7 * 5 * 4


def test_a_view_serves_its_own_layer_for_any_number() -> None:
    cache = filled()
    states = torch.full((1, 2, 1, 5), 6.0)
    cache.window.rows, cache.window.index, cache.window.reads = torch.tensor([0]), torch.tensor([2]), "rows"
    cache.views()[1].update(states, states, 0)
    assert (rows_of(cache, 1)[0, 2] == 6).all()
    assert (rows_of(cache, 0)[0, 2] == 0).all()
