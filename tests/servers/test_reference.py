"""The reference's arithmetic and its protocol, on the CPU and with small sizes; a card is measured by the same code."""

import io
import json
import os
import time

import pytest
import torch

from servers import reference
from servers.reference import LAUNCHES, Reference, Sizes

CPU = torch.device("cpu")
SMALL = Sizes(matrix=64, dtype=torch.float32, read_bytes=1 << 20)
FIGURES = ("matmul_tflops", "read_gb_per_s", "launch_us", "launched_ms", "python_ms")


class FixedTimes(Reference):
    """Its clock says that each product and each read took `seconds`, and each turn of launches four times that."""

    seconds = 0.5

    def _device_times(self, part: object, seconds: float) -> list[float]:
        return [self.seconds, 1000.0, self.seconds]

    def _launch(self) -> tuple[float, float]:
        return self.seconds, 4 * self.seconds


def test_figures_are_what_the_medians_of_the_times_mean() -> None:
    measured = FixedTimes(CPU, SMALL).measure(0.0)
    assert measured["matmul_tflops"] == pytest.approx(2 * 64**3 / 0.5 / 1e12)
    assert measured["read_gb_per_s"] == pytest.approx((1 << 20) / 0.5 / 1e9)
    assert measured["launch_us"] == pytest.approx(0.5 / LAUNCHES * 1e6)
    assert measured["launched_ms"] == pytest.approx(2000.0)
    assert (measured["matrix"], measured["read_bytes"], measured["dtype"]) == (64, 1 << 20, "float32")


def test_every_part_is_measured_within_about_the_seconds_that_it_was_given() -> None:
    measured = Reference(CPU, SMALL).measure(0.4)
    assert all(measured[figure] > 0 for figure in FIGURES)  # type: ignore[operator]
    assert 0.4 <= measured["seconds"] < 30.0  # type: ignore[operator]


def test_the_host_is_measured_on_each_of_its_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [{3, 5, 8}]
    met: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: now[0])
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, processors: now.__setitem__(0, set(processors)))
    monkeypatch.setattr(reference, "_interpret", lambda: met.append(now[0]))
    with reference._each_processor() as next_processor:
        for _ in range(6):
            next_processor()
            reference._processor_time(reference._interpret)
    assert sorted(map(tuple, met)) == [(3,), (3,), (5,), (5,), (8,), (8,)]
    assert now == [{3, 5, 8}]


def test_where_the_system_names_no_processors_the_host_is_measured_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    measured = Reference(CPU, SMALL).measure(0.0)
    assert measured["processors"] == 0
    assert measured["python_ms"] > 0  # type: ignore[operator]


def test_python_is_timed_without_what_others_run_beside_it() -> None:
    measured = reference._processor_time(lambda: time.sleep(0.2))
    assert measured < 0.1


def test_the_range_over_processors_is_told() -> None:
    measured = Reference(CPU, SMALL).measure(0.1)
    low, middle, high = (measured[f"python_{name}ms"] for name in ("low_", "", "high_"))
    assert 0 < low <= middle <= high  # type: ignore[operator]


def test_a_device_computes_on_random_data() -> None:
    made = Reference(CPU, SMALL)
    for tensor in (made._left, made._right, made._read):
        assert len(torch.unique(tensor)) > tensor.numel() // 4


def test_a_card_whose_memory_others_hold_reads_less_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    card = torch.device("cuda:0")
    for free_gib, expected_mib in ((100, 4096), (8, 4096), (7, 2048), (1, 512), (0, 256)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free_gib: (free << 30, 100 << 30))
        assert Sizes.of(card).read_bytes == expected_mib << 20


def said(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_it_measures_when_it_is_told_to(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(Sizes, "of", lambda _: SMALL)
    monkeypatch.setattr("sys.stdin", io.StringIO("go\n"))
    assert reference.main(["--device", "cpu", "--seconds", "0.01"]) == 0
    ready, measured = said(capsys)
    assert ready == {"ready": True}
    assert measured["error"] is None
    assert set(FIGURES) < set(measured)


def test_it_measures_nothing_when_nobody_is_left_to_read_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Sizes, "of", lambda _: SMALL)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert reference.main(["--device", "cpu"]) == 1
    assert said(capsys) == [{"ready": True}]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory.\nTried"), MemoryError()])
def test_a_device_that_is_full_is_an_error_in_one_line(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(_: torch.device) -> Sizes:
        raise error

    monkeypatch.setattr(Sizes, "of", refuse)
    assert reference.main(["--device", "cpu"]) == 0
    (message,) = said(capsys)
    assert message["error"] == f"{type(error).__name__}" + (": CUDA out of memory." if str(error) else "")


def test_a_device_that_is_not_there_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert reference.main(["--device", "cuda:3"]) == 0
    (message,) = said(capsys)
    assert "torch sees no GPU" in str(message["error"])
