from __future__ import annotations

import torch

from servers.kv_cache import SlotCache


def filled(slots: int = 3, max_length: int = 6) -> SlotCache:
    cache = SlotCache(layers=2, slots=slots, max_length=max_length)
    write(cache, rows=[0], positions=[[0]], value=0.0, gather=True)
    return cache


def write(cache: SlotCache, *, rows: list[int], positions: list[list[int]], value: float, gather: bool) -> torch.Tensor:
    window = cache.window
    window.rows, window.positions = torch.tensor(rows), torch.tensor(positions)
    window.context, window.gather = 4, gather
    states = torch.full((len(rows), 2, len(positions[0]), 5), value)
    for layer in range(2):
        keys, values = cache.update(states, -states, layer)
        assert torch.equal(keys, -values)
    return keys


def test_each_row_is_written_at_its_own_position() -> None:
    cache = filled()
    seen = write(cache, rows=[0, 1], positions=[[2], [3]], value=7.0, gather=False)
    assert seen.shape == (2, 2, 4, 5)
    assert (seen[0, :, 2] == 7).all()
    assert (seen[1, :, 3] == 7).all()
    assert (seen[0, :, 3] == 0).all()
    assert (seen[1, :, 2] == 0).all()


def test_prefill_reads_and_writes_the_rows_it_names() -> None:
    cache = filled()
    seen = write(cache, rows=[2], positions=[[0, 1]], value=5.0, gather=True)
    assert seen.shape == (1, 2, 4, 5)
    assert (seen[0, :, :2] == 5).all()
    assert (cache.layers[0].keys[0] == 0).all()


def test_padding_writes_where_no_context_reaches() -> None:
    cache = filled(max_length=4)
    seen = write(cache, rows=[1], positions=[[0, cache.padding_position]], value=9.0, gather=True)
    assert (seen[0, :, 1:] == 0).all()


def test_a_moved_row_is_copied_in_every_layer() -> None:
    cache = filled()
    write(cache, rows=[2], positions=[[1]], value=3.0, gather=True)
    cache.move_row(2, 0)
    for layer in cache.layers:
        assert torch.equal(layer.keys[0], layer.keys[2])
        assert torch.equal(layer.values[0], layer.values[2])
        assert (layer.keys[0, :, 1] == 3).all()


def test_memory_is_counted_for_all_rows_and_layers() -> None:
    cache = filled(slots=3, max_length=6)
    assert cache.memory_bytes() == 2 * 2 * 3 * 2 * 7 * 5 * 4
