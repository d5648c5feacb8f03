from __future__ import annotations

import pytest

from tests.faults.process_samples import Sample, growth


def series(*values: int, files: int = 9) -> list[Sample]:
    """A sample a second from second 0 on."""
    return [
        Sample(at_s=float(at), rss=value, pss=value, own=value, files=files, threads=3)
        for at, value in enumerate(values)
    ]


def test_a_leak_of_three_percent_is_seen_under_noise_and_spikes() -> None:
    values = [1000 + round(30 * at / 100) + (5 if at % 2 else -5) + (4000 if at % 25 == 3 else 0) for at in range(101)]
    found = growth(series(*values), "own", start_s=0.0, end_s=100.0)
    assert found is not None
    assert found.growth == pytest.approx(0.026, abs=0.006)
