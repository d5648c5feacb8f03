from __future__ import annotations

import pytest

from benchmarks.startup import Start, summary


def test_a_summary_divides_cold_by_warm_and_accounts_for_every_second() -> None:
    def start(ready_s: float, decode_s: float) -> Start:
        items = {"process": 1.0, "load": 2.0, "decode batch 1": decode_s, "decode batch 2": decode_s}
        return Start(ready_s=ready_s, items_s=items)

    cold, warm = [start(30, 10), start(40, 15), start(34, 12)], [start(8, 2), start(9, 2.5), start(10, 3)]
    found = summary({"cold": cold, "warm": warm})
    assert found["cold_over_warm"] == pytest.approx(34 / 9)
    assert found["cold_over_warm_shapes"] == pytest.approx(24 / 5)
    assert found["cold_decode_s"] == 24
    assert found["warm_rest_s"] == pytest.approx(1.0)
    assert found["items_s"]["decode batch 1"] == {"cold": 12, "warm": 2.5}
