from __future__ import annotations

import os
import subprocess
import sys

from servers.clock import now_ns
from servers.engine.startup import itemised, memory_peaks, process_started_ns


def test_a_process_is_as_old_as_it_is() -> None:
    before_ns = now_ns()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        started_ns = process_started_ns(child.pid)
    assert before_ns - 20_000_000 <= started_ns <= now_ns()
    assert process_started_ns(os.getpid()) < before_ns


def test_a_process_that_is_gone_has_started_now_at_the_earliest() -> None:
    before_ns = now_ns()
    assert process_started_ns(2**22 + 1) >= before_ns


def test_the_items_of_a_start_leave_no_gap() -> None:
    items = itemised({"load": 40, "decode": 20}, started_ns=100, entered_ns=130, imported_ns=145, ready_ns=210)
    assert items == {"process": 30, "import": 15, "load": 40, "decode": 20, "other": 5}
    assert sum(items.values()) == 210 - 100


def test_memory_of_cuda_graphs_is_what_lies_in_pools_of_their_own() -> None:
    segments = [
        {"total_size": 100, "segment_pool_id": (0, 0)},
        {"total_size": 30, "segment_pool_id": (0, 1)},
        {"total_size": 4, "segment_pool_id": (2, 0)},
        {"total_size": 1},
    ]
    assert memory_peaks(segments)["graph_pools"] == 34
    peaks = memory_peaks([])
    assert set(peaks) == {"process_peak"}
    assert peaks["process_peak"] > 1 << 20
