"""What the engine process holds, as it says once a second."""

from __future__ import annotations

import torch

from servers.engine.memory import EVERY_NS, MemoryWatch, resident_bytes

CPU = torch.device("cpu")


def test_memory_is_read_at_once_and_then_once_a_second() -> None:
    times = iter([5, 6, EVERY_NS + 4, EVERY_NS + 5, EVERY_NS + 6])
    watch = MemoryWatch(CPU, clock=lambda: next(times))
    readings = [watch.due() for _ in range(5)]
    assert [reading.at_ns for reading in readings if reading is not None] == [5, EVERY_NS + 5]


def test_a_cpu_has_memory_of_the_process_and_no_allocator_to_ask() -> None:
    reading = MemoryWatch(CPU).due()
    assert reading is not None
    assert reading.memory_bytes is not None
    assert reading.memory_bytes > 50 << 20  # torch is loaded
    assert reading.allocated_bytes is reading.peak_bytes is reading.out_of_memory is None


def test_memory_of_the_process_grows_by_what_is_held() -> None:
    before = resident_bytes()
    size = 256 << 20  # too large for what an earlier test left free
    held = torch.ones(size, dtype=torch.uint8)
    after = resident_bytes()
    assert before is not None
    assert after is not None
    assert 0.9 * size < after - before < 1.3 * size
    assert held[-1] == 1
