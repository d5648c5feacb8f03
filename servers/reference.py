"""How fast a device and its host are, by work that never changes: `python -m servers.reference --device cuda:0`.

Run before and after each trial by loadtests/trials/references.py. Four parts, so that a slow card can be told from a
slow host: a matrix product (the device computes), a read of memory (the device loads), many small launches (the host
issues), a piece of Python (the host interprets). Prints {"ready": true} once all is allocated and warm, measures when a
line comes on stdin, and prints one JSON object. Where nothing can be measured, "error" in it says why and the exit code
is 0 all the same.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median, quantiles

import torch

from servers.clock import now_ns
from servers.complaint import named, one_line
from servers.engine.placement import device_name, resolve_device

LAUNCHES = 2000
ROUNDS = 5  # the parts take turns, so that a disturbance of a moment hits a fifth of each
# Between two products on a GPU. Back to back they reach the card's power cap, and scatter by 4 to 5 % on an H200; with
# rests by 1 % at most.
REST_S = 0.02
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
        with _each_processor() as next_processor:
            for _ in range(ROUNDS):
                for _ in _turns(share_s):
                    next_processor()
                    python.append(_processor_time(_interpret))
                for _ in _turns(share_s):
                    next_processor()
                    issue_s, whole_s = self._launch()
                    issued.append(issue_s)
                    launched.append(whole_s)
                products += self._products(share_s)
                reads += self._device_times(self._load, share_s)
        sizes = self.sizes
        low_ms, high_ms = _deciles([1e3 * item for item in python])
        return {
            "device": device_name(self._device),
            "seconds": time.perf_counter() - began,
            "matmul_tflops": 2 * sizes.matrix**3 / median(products) / 1e12,
            "read_gb_per_s": sizes.read_bytes / median(reads) / 1e9,
            "launch_us": median(issued) / LAUNCHES * 1e6,
            "launched_ms": median(launched) * 1e3,
            "python_ms": median(python) * 1e3,
            "python_low_ms": low_ms,
            "python_high_ms": high_ms,
            "matrix": sizes.matrix,
            "dtype": str(sizes.dtype).removeprefix("torch."),
            "read_bytes": sizes.read_bytes,
            "launches": LAUNCHES,
            "rest_ms": 1e3 * REST_S if self._device.type == "cuda" else 0.0,
            "processors": len(_processors()),
            "threads": torch.get_num_threads(),
        }

    def _multiply(self) -> None:
        torch.mm(self._left, self._right, out=self._product)

    def _load(self) -> None:
        self._read.sum()

    def _launch(self) -> tuple[float, float]:
        """Seconds of this thread to issue all small operations, and seconds until the device had done them."""
        self._synchronize()
        start = time.perf_counter()
        issued = _processor_time(self._issue)
        self._synchronize()
        return issued, time.perf_counter() - start

    def _issue(self) -> None:
        small = self._small
        for _ in range(LAUNCHES):
            small.add_(1.0)

    def _products(self, seconds: float) -> list[float]:
        """Seconds of each product, with a rest after each on a GPU."""
        if self._device.type != "cuda":
            return self._device_times(self._multiply, seconds)
        times = []
        for _ in _turns(seconds):
            times += self._marked_times(self._multiply, 1)
            time.sleep(REST_S)
        return times

    def _device_times(self, part: Callable[[], None], seconds: float) -> list[float]:
        """Seconds of each call, on the device's own clock where it has one: the host's launch is not in them."""
        if self._device.type != "cuda":
            return [_timed(part) for _ in _turns(seconds)]
        part()  # brings the clocks up again after what the host did alone
        self._synchronize()
        return self._marked_times(part, max(1, int(seconds / max(1e-6, self._rough_seconds(part)))))

    def _marked_times(self, part: Callable[[], None], calls: int) -> list[float]:
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


def _processors() -> list[int]:
    """Those on which this process may run; empty where the system does not tell."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


@contextlib.contextmanager
def _each_processor() -> Iterator[Callable[[], None]]:
    """Each call moves this thread to another processor; afterwards it may run on all of them again.

    On a shared host some are half as fast as others, and which of them a process meets is luck: a figure of one would
    say nothing of the host.
    """
    processors = _processors()
    order = itertools.cycle(random.Random(0).sample(processors, len(processors)))

    def move() -> None:
        if processors:
            os.sched_setaffinity(0, {next(order)})

    try:
        yield move
    finally:
        if processors:
            os.sched_setaffinity(0, processors)


def _deciles(values: Sequence[float]) -> tuple[float, float]:
    """The first and the ninth decile."""
    cuts = quantiles(values, n=10, method="inclusive") if len(values) > 1 else [values[0]]
    return cuts[0], cuts[-1]


def _processor_time(part: Callable[[], object]) -> float:
    """Seconds that this thread had a processor: what others run beside it is not in them, as it is looked at elsewhere
    (the check "busy host")."""
    start = time.thread_time()
    part()
    return time.thread_time() - start


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
