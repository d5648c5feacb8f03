"""How fast a device and its host are, by work that never changes: `python -m servers.reference --device cuda:0`.

Run before and after each trial by loadtests/trials/references.py. Four parts, so that a slow card can be told from a
slow host: a matrix product (the device computes), a read of memory (the device loads), many small launches (the host
issues), a piece of Python (the host interprets). Prints {"ready": true} once all is allocated and warm, measures when a
line comes on stdin, and prints one JSON object. Where nothing can be measured, "error" in it says why and the exit code
is 0 all the same.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from servers.clock import now_ns
from servers.complaint import named, one_line
from servers.engine.placement import device_name, resolve_device

LAUNCHES = 2000
ROUNDS = 5  # the parts take turns, so that a disturbance of a moment hits a fifth of each
_WARM_CALLS = 3
_LOOP = 50_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The fixed work: one product of two matrices [matrix, matrix], one read of `read_bytes` of float32."""

    matrix: int
    dtype: torch.dtype
    read_bytes: int

    @classmethod
    def of(cls, device: torch.device) -> Sizes:
        """What a device of this kind is given; the read is far larger than its caches.

        Where others hold the memory the read is halved until it fits. The row says how much it was.
        """
        if device.type != "cuda":
            return cls(matrix=1024, dtype=torch.float32, read_bytes=256 << 20)
        free, _ = torch.cuda.mem_get_info(device)
        read_bytes = 4 << 30
        while read_bytes > 256 << 20 and read_bytes > free // 2:
            read_bytes //= 2
        return cls(matrix=8192, dtype=torch.bfloat16, read_bytes=read_bytes)


class Reference:
    """The four parts on one device: allocated, filled with random data and warm. Zeros would draw less power."""

    def __init__(self, device: torch.device, sizes: Sizes) -> None:
        self._device = device
        self.sizes = sizes
        made = torch.Generator(device).manual_seed(0)
        shape = (sizes.matrix, sizes.matrix)
        self._left = torch.randn(shape, generator=made, device=device, dtype=sizes.dtype)
        self._right = torch.randn(shape, generator=made, device=device, dtype=sizes.dtype)
        self._product = torch.empty_like(self._left)
        self._read = torch.rand(sizes.read_bytes // 4, generator=made, device=device)
        self._small = torch.rand(1, generator=made, device=device)
        for part in (self._multiply, self._load):
            for _ in range(_WARM_CALLS):
                part()
        self._launch()
        _interpret()

    def measure(self, seconds: float) -> dict[str, float | int | str]:
        """Medians over all repetitions within about `seconds`; each part has a quarter of them."""
        share_s = seconds / (4 * ROUNDS)
        python: list[float] = []
        issued: list[float] = []
        launched: list[float] = []
        products: list[float] = []
        reads: list[float] = []
        began = time.perf_counter()
        for _ in range(ROUNDS):
            for _ in _turns(share_s):
                python.append(_timed(_interpret))
            for _ in _turns(share_s):
                issue_s, whole_s = self._launch()
                issued.append(issue_s)
                launched.append(whole_s)
            products += self._device_times(self._multiply, share_s)
            reads += self._device_times(self._load, share_s)
        sizes = self.sizes
        return {
            "device": device_name(self._device),
            "seconds": time.perf_counter() - began,
            "matmul_tflops": 2 * sizes.matrix**3 / median(products) / 1e12,
            "read_gb_per_s": sizes.read_bytes / median(reads) / 1e9,
            "launch_us": median(issued) / LAUNCHES * 1e6,
            "launched_ms": median(launched) * 1e3,
            "python_ms": median(python) * 1e3,
            "matrix": sizes.matrix,
            "dtype": str(sizes.dtype).removeprefix("torch."),
            "read_bytes": sizes.read_bytes,
            "launches": LAUNCHES,
            "threads": torch.get_num_threads(),
        }

    def _multiply(self) -> None:
        torch.mm(self._left, self._right, out=self._product)

    def _load(self) -> None:
        self._read.sum()

    def _launch(self) -> tuple[float, float]:
        """Seconds until all small operations were issued, and until the device had done them."""
        self._synchronize()
        small = self._small
        start = time.perf_counter()
        for _ in range(LAUNCHES):
            small.add_(1.0)
        issued = time.perf_counter()
        self._synchronize()
        return issued - start, time.perf_counter() - start

    def _device_times(self, part: Callable[[], None], seconds: float) -> list[float]:
        """Seconds of each call, on the device's own clock where it has one: the host's launch is not in them."""
        if self._device.type != "cuda":
            return [_timed(part) for _ in _turns(seconds)]
        part()  # brings the clocks up again after what the host did alone
        self._synchronize()
        calls = max(1, int(seconds / max(1e-6, self._rough_seconds(part))))
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]  # type: ignore[no-untyped-call]
        marks[0].record()
        for mark in marks[1:]:
            part()
            mark.record()
        self._synchronize()
        return [marks[index].elapsed_time(marks[index + 1]) / 1e3 for index in range(calls)]

    def _rough_seconds(self, part: Callable[[], None]) -> float:
        start = time.perf_counter()
        part()
        self._synchronize()
        return time.perf_counter() - start

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _interpret() -> int:
    """A fixed piece of Python: integers, a list, a dictionary and a branch, as an interpreter's time mostly goes."""
    value, seen, recent = 1, dict[int, int](), [0] * 64
    for step in range(_LOOP):
        value = (value * 1_103_515_245 + 12_345) & 0x7FFFFFFF
        if value & 0x8000:
            recent[step & 63] = value
        else:
            seen[value & 255] = step
    return len(seen) + recent[0]


def _timed(part: Callable[[], object]) -> float:
    start = time.perf_counter()
    part()
    return time.perf_counter() - start


def _turns(seconds: float) -> Iterator[None]:
    """One turn at least, and others until `seconds` have passed."""
    end = time.perf_counter() + seconds
    yield
    while time.perf_counter() < end:
        yield


def main(arguments: Sequence[str] | None = None) -> int:
    """The program: one JSON line when it could measure, one with what it measured or why it did not."""
    parser = argparse.ArgumentParser(prog="python -m servers.reference", description=__doc__)
    parser.add_argument("--device", required=True, help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--seconds", type=float, default=2.0)
    options = parser.parse_args(arguments)
    try:
        device = resolve_device(options.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        reference = Reference(device, Sizes.of(device))
        _say({"ready": True})
        if not sys.stdin.readline():
            return 1  # who would read it is gone
        _say({"at_ns": now_ns(), **reference.measure(options.seconds), "error": None})
    except Exception as error:  # a device that is taken, full or broken is a finding
        _say({"at_ns": now_ns(), "error": one_line(named(error))})
    return 0


def _say(message: dict[str, object]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    sys.exit(main())
