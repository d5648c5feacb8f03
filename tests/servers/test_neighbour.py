"""What presses on a device and what measures it, on the CPU; a card runs the same code."""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Iterator
from unittest.mock import Mock

import pytest
import torch

from servers import neighbour, reference
from servers.reference import LAUNCHES, Reference, Sizes

CPU = torch.device("cpu")
GIB = 1 << 30


@pytest.fixture(autouse=True)
def as_it_is(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The test process keeps its threads, and its place among those that the kernel would end."""
    threads = torch.get_num_threads()
    monkeypatch.setattr(neighbour, "_be_the_first_to_go", lambda: None)
    yield
    torch.set_num_threads(threads)


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_neighbour_answers_and_ends_with_stdin(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(neighbour, "host_memory", lambda: (GIB, GIB))
    monkeypatch.setattr("sys.stdin", io.StringIO('{"memory_share": 0.01, "compute_share": 0.1}\n{}\n'))
    assert neighbour.main(["--device", "cpu"]) == 0
    ready, began, ended = lines(capsys)
    assert ready == {"ready": True, "device": "cpu"}
    assert (began["memory_bytes"], ended["memory_bytes"]) == (int(0.01 * GIB), 0)


SMALL = Sizes(matrix=64, dtype=torch.float32, read_bytes=1 << 20)
FIGURES = ("matmul_tflops", "read_gb_per_s", "launch_us", "launched_ms", "python_ms")


class FixedTimes(Reference):
    """Its clock says that each product and each read took `seconds`, and each turn of launches four times that."""

    seconds = 0.5

    def _device_times(self, part: object, seconds: float) -> list[float]:
        return [self.seconds, 1000.0, self.seconds]

    def _launch(self) -> tuple[float, float]:
        return self.seconds, 4 * self.seconds


def test_figures_follow_from_the_medians_of_the_times() -> None:
    measured = FixedTimes(CPU, SMALL).measure(0.0)
    assert measured["matmul_tflops"] == pytest.approx(2 * 64**3 / 0.5 / 1e12)
    assert measured["read_gb_per_s"] == pytest.approx((1 << 20) / 0.5 / 1e9)
    assert measured["launch_us"] == pytest.approx(0.5 / LAUNCHES * 1e6)
    assert measured["launched_ms"] == pytest.approx(2000.0)
    assert (measured["matrix"], measured["read_bytes"], measured["dtype"]) == (64, 1 << 20, "float32")


def test_every_part_is_measured_for_the_given_seconds_on_random_data() -> None:
    made = Reference(CPU, SMALL)
    measured = made.measure(0.4)
    assert all(measured[figure] > 0 for figure in FIGURES)  # type: ignore[operator]
    assert measured["seconds"] >= 0.4  # type: ignore[operator]
    low, middle, high = (measured[f"python_{name}ms"] for name in ("low_", "", "high_"))
    assert 0 < low <= middle <= high  # type: ignore[operator]
    for tensor in (made._left, made._right, made._read):
        assert len(torch.unique(tensor)) > tensor.numel() // 4


def test_the_host_is_measured_on_each_of_its_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [{3, 5, 8}]
    met: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: now[0])
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, processors: now.__setitem__(0, set(processors)))
    with reference._each_processor() as next_processor:
        for _ in range(6):
            next_processor()
            reference._processor_time(lambda: met.append(now[0]))
    assert sorted(map(tuple, met)) == [(3,), (3,), (5,), (5,), (8,), (8,)]
    assert now == [{3, 5, 8}]
    assert reference._processor_time(lambda: time.sleep(0.2)) < 0.1, "the time of others does not count"
    monkeypatch.delattr(os, "sched_getaffinity")
    measured = Reference(CPU, SMALL).measure(0.0)
    assert measured["processors"] == 0
    assert measured["python_ms"] > 0  # type: ignore[operator]


def test_a_card_whose_memory_others_hold_reads_less(monkeypatch: pytest.MonkeyPatch) -> None:
    for free_gib, expected_mib in ((100, 4096), (8, 4096), (7, 2048), (1, 512), (0, 256)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free_gib: (free << 30, 100 << 30))
        assert Sizes.of(torch.device("cuda:0")).read_bytes == expected_mib << 20


def test_it_measures_at_the_word_and_ends_with_its_stdin(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Sizes, "of", lambda _: SMALL)
    for stdin, code in (("go\n", 0), ("", 1)):
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        assert reference.main(["--device", "cpu", "--seconds", "0.01"]) == code
        ready, *measured = lines(capsys)
        assert ready == {"ready": True}
        assert [(item["error"], set(FIGURES) < set(item)) for item in measured] == [(None, True)] * (1 - code)
    for error in (torch.OutOfMemoryError("CUDA out of memory.\nTried"), MemoryError()):
        monkeypatch.setattr(Sizes, "of", Mock(side_effect=error))
        assert reference.main(["--device", "cpu"]) == 0
        (message,) = lines(capsys)
        assert message["error"] == f"{type(error).__name__}" + (": CUDA out of memory." if str(error) else "")
