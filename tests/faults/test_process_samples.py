from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.faults.process_samples import Sample, growth, kilobytes, name_of, sample, table, tree


def series(*values: int, files: int = 9) -> list[Sample]:
    """A sample a second from second 0 on."""
    return [
        Sample(at_s=float(at), rss=value, pss=value, own=value, files=files, threads=3)
        for at, value in enumerate(values)
    ]


def test_what_grows_in_the_warm_up_alone_does_not_grow() -> None:
    samples = series(*range(10), *([100] * 91))
    found = growth(samples, "rss", start_s=0.0, end_s=100.0)
    assert found is not None
    assert (found.first, found.last, found.growth) == (100, 100, 0.0)


def test_a_leak_of_three_percent_is_seen_under_noise_and_spikes() -> None:
    values = [1000 + round(30 * at / 100) + (5 if at % 2 else -5) + (4000 if at % 25 == 3 else 0) for at in range(101)]
    found = growth(series(*values), "own", start_s=0.0, end_s=100.0)
    assert found is not None
    assert found.growth == pytest.approx(0.026, abs=0.006)


def test_a_step_at_the_end_counts_although_the_line_is_flat() -> None:
    found = growth(series(*([1000] * 91), *([1100] * 10)), "rss", start_s=0.0, end_s=100.0)
    assert found is not None
    assert found.line == 0.0
    assert found.growth == pytest.approx(0.1)


def test_many_samples_are_thinned_and_say_the_same() -> None:
    found = growth(series(*range(10_000, 15_000)), "rss", start_s=0.0, end_s=4999.0)
    assert found is not None
    assert found.line == pytest.approx(4500 / 10_724, rel=0.01)


def test_a_process_that_was_not_there_all_the_time_has_no_row() -> None:
    kept = {"whole": series(*([100] * 101)), "late": series(*([100] * 101))[60:], "early": series(*([100] * 50))}
    assert [row["process"] for row in table(kept, start_s=0.0, end_s=100.0)] == ["whole"]


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["python", "-P", "-m", "loadtests.page", "/run"], "loadtests.page"),
        (["python", "-m", "tests.faults.quick_arm", "--replica", "eager-0"], "arm eager-0"),
        (["/opt/envoy", "--config-path", "envoy.json"], "envoy"),
        (["python", "-c", "import sys"], "tailgate run"),
        ([], "gone"),
    ],
)
def test_a_process_has_the_name_of_what_it_runs(command: list[str], name: str) -> None:
    assert name_of(command) == name


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_own_memory_of_a_process_is_what_lies_in_no_file(tmp_path: Path) -> None:
    here = psutil.Process()
    before = sample(here, time.time())
    held = bytearray(os.urandom(1 << 20) * 32)
    after = sample(here, time.time())
    assert before is not None
    assert after is not None
    assert after.own - before.own == pytest.approx(len(held), rel=0.2)
    assert after.rss >= after.own > 0
    (tmp_path / "page").write_text("Rss:    12 kB\nVmFlags: rd\nAnonymous:   4 kB\n")
    assert kilobytes(tmp_path / "page") == {"Rss": 12, "Anonymous": 4}


def test_a_process_that_is_gone_has_neither_samples_nor_a_tree() -> None:
    child = psutil.Popen([sys.executable, "-c", ""])
    child.wait()
    assert tree(child.pid) == []
    assert sample(child, time.time()) is None
