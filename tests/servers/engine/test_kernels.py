"""Attention, sampling and the cache of keys and values."""

from __future__ import annotations

import pytest
import torch
from transformers.integrations.sdpa_attention import repeat_kv

from tailgate.servers.engine import attention, sampling
from tailgate.servers.engine.attention import grouped_attention
from tailgate.servers.engine.kv_cache import SlotCache
from tailgate.servers.engine.scheduler import Job


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


def job(seed: int = 0, *, launched: int = 1, **settings: float) -> Job:
    return Job(request_id="x", prompt=[1], max_tokens=1, recv_ns=0, launched=launched, seed=seed, **settings)  # type: ignore[arg-type]


def draw(logits: torch.Tensor, jobs: list[Job], rows: list[int] | None = None) -> list[int]:
    rows = rows if rows is not None else list(range(len(jobs)))
    draws = torch.tensor(sampling.draw_table(jobs, rows, logits.shape[0]))
    tokens = sampling.choose(logits, logits.argmax(-1), draws).tolist()
    return [tokens[row] for row in rows]


def test_temperature_zero_takes_the_largest_logit() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    jobs = [job(), job(5, temperature=1.0), job()]
    assert draw(logits, jobs)[::2] == logits.argmax(-1).tolist()[::2]
    assert sampling.is_greedy([job()])
    assert not sampling.is_greedy(jobs)


def test_draws_follow_the_distribution_of_the_tokens() -> None:
    logits = torch.log(torch.tensor([[0.7, 0.2, 0.1]])).expand(2000, -1)
    tokens = draw(logits, [job(3, launched=n, temperature=1.0) for n in range(2000)])
    assert abs(tokens.count(0) / 2000 - 0.7) < 0.04
    assert abs(tokens.count(2) / 2000 - 0.1) < 0.03


def test_uniform_numbers_are_spread_over_the_unit_interval_and_repeat_for_seed_and_index() -> None:
    numbers = [sampling.uniform(7, index) for index in range(4000)]
    assert all(0 <= number < 1 for number in numbers)
    assert abs(sum(numbers) / 4000 - 0.5) < 0.02
    assert sampling.uniform(7, 1) == numbers[1] != sampling.uniform(8, 1)
    assert 0 <= sampling.uniform(2**64 - 1, 0) < 1


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
