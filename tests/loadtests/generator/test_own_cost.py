from __future__ import annotations

import gc

from loadtests.generator.own_cost import GarbageWindow


def test_collector_is_off_in_the_window_and_sweeps_free_cycles() -> None:
    window = GarbageWindow()
    assert gc.isenabled()
    window.open()
    try:
        assert not gc.isenabled()
        assert gc.get_freeze_count() > 0
        window.sweep()
        assert window.spent_ms["count"] == 0  # nothing has gathered yet
        for _ in range(GarbageWindow.SWEEP_ABOVE + 1):
            cycle: list[object] = []
            cycle.append(cycle)
        window.sweep()
        assert window.spent_ms["count"] == 1
        assert gc.get_count()[0] < GarbageWindow.SWEEP_ABOVE
    finally:
        window.close()
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
