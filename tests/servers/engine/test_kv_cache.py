from __future__ import annotations

from typing import Literal

import torch

from servers.engine.kv_cache import SlotCache


def filled(slots: int = 3, max_length: int = 6) -> SlotCache:
    cache = SlotCache(layers=2, slots=slots, max_length=max_length)
    write(cache, rows=[0], positions=[[0]], value=0.0, reads="rows")
    return cache


def by_row(memory: torch.Tensor) -> torch.Tensor:
    return memory.unflatten(0, (3, -1))


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
    cache = filled()
    seen = write(cache, rows=[0, 1], positions=[[2], [3]], value=7.0, reads="slice")
    assert seen.shape == (2, 2, 4, 5)
    assert (seen[0, :, 2] == 7).all()
    assert (seen[1, :, 3] == 7).all()
    assert (seen[0, :, 3] == 0).all()
    assert (seen[1, :, 2] == 0).all()


def test_later_chunks_read_and_writes_the_rows_it_names() -> None:
    cache = filled()
    seen = write(cache, rows=[2], positions=[[0, 1]], value=5.0, reads="rows")
    assert seen.shape == (1, 2, 4, 5)
    assert (seen[0, :, :2] == 5).all()
    assert (by_row(cache.layers[0].keys)[0] == 0).all()


def test_padding_writes_where_no_context_reaches() -> None:
    cache = filled(max_length=4)
    seen = write(cache, rows=[1], positions=[[0, cache.max_length]], value=9.0, reads="rows")
    assert (seen[0, :, 1:] == 0).all()


def test_a_moved_row_is_copied_in_every_layer() -> None:
    cache = filled()
    write(cache, rows=[2], positions=[[1]], value=3.0, reads="rows")
    cache.move_row(2, 0, positions=2)
    for layer in cache.layers:
        keys, values = by_row(layer.keys), by_row(layer.values)
        assert torch.equal(keys[0, :2], keys[2, :2])
        assert torch.equal(values[0, :2], values[2, :2])
        assert (keys[0, 1] == 3).all()


def test_memory_is_counted_for_all_rows_and_layers() -> None:
    cache = filled(slots=3, max_length=6)
    assert cache.memory_bytes() == 2 * 2 * 3 * 2 * 7 * 5 * 4


def test_a_whole_prompt_attends_to_itself_and_is_kept_for_later() -> None:
    cache = filled()
    seen = write(cache, rows=[1], positions=[[0, 1, 2]], value=4.0, reads="fresh")
    assert seen.shape == (1, 2, 3, 5)
    assert (by_row(cache.layers[0].keys)[1, :3] == 4).all()
    assert (by_row(cache.layers[0].keys)[1, 3:] == 0).all()


def test_a_view_serves_its_own_layer_whatever_number_it_is_asked_for() -> None:
    cache = filled()
    states = torch.full((1, 2, 1, 5), 6.0)
    cache.window.rows, cache.window.index, cache.window.reads = torch.tensor([0]), torch.tensor([2]), "rows"
    cache.views()[1].update(states, states, 0)
    assert (by_row(cache.layers[1].keys)[0, 2] == 6).all()
    assert (by_row(cache.layers[0].keys)[0, 2] == 0).all()
