"""Measure how fast a device and its host are: `python -m servers.reference --device cuda:0`.

The work never changes; loadtests/trials/references.py has it done before and after each trial. Four parts tell a slow
card from a slow host: a matrix product (the device computes), a read of memory (the device loads), many small launches
(the host issues), a loop of Python (the host interprets). Prints {"ready": true} once all is allocated and warm,
measures when a line comes on stdin, and prints one JSON object. Where nothing can be measured, "error" in it says why
and the exit code is 0.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median

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
_READ_BYTES = {"cpu": 256 << 20, "cuda": 4 << 30}  # far larger than caches


class Reference:
    """The four parts on one device: allocated, filled with random data and warm. Zeros would draw less power."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._read_bytes = _READ_BYTES[device.type]
        if self._on_gpu:
            free, _ = torch.cuda.mem_get_info(device)
            # where others hold the memory; figures of unequal sizes are not compared
            while self._read_bytes > _READ_BYTES["cpu"] and self._read_bytes > free // 2:
                self._read_bytes //= 2
        self._matrix, dtype = (8192, torch.bfloat16) if self._on_gpu else (1024, torch.float32)
        made = torch.Generator(device).manual_seed(0)
        left, right = (
            torch.randn((self._matrix, self._matrix), generator=made, device=device, dtype=dtype) for _ in range(2)
        )
        product = torch.empty_like(left)
        read = torch.rand(self._read_bytes // 4, generator=made, device=device)
        self._dtype = dtype
        self._small = torch.rand(1, generator=made, device=device)
        self._multiply: Callable[[], object] = lambda: torch.mm(left, right, out=product)
        self._load: Callable[[], object] = read.sum
        for part in (self._multiply, self._load):
            for _ in range(_WARM_CALLS):
                part()
        self._launch()
        self._synchronize()
        interpret()

    def measure(self, seconds: float) -> dict[str, float | int | str]:
        """Return medians over all repetitions within about `seconds`; each part has a quarter of them."""
        share_s = seconds / (4 * ROUNDS)
        python: list[float] = []
        launched: list[float] = []
        products: list[float] = []
        reads: list[float] = []
        began = time.perf_counter()
        allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        # On a shared host some processors are half as fast as others: the loop and the launches visit all of them.
        order = itertools.cycle(random.Random(0).sample(allowed, len(allowed)))
        try:
            for _ in range(ROUNDS):
                for part, times in ((interpret, python), (self._launch, launched)):
                    for _ in turns(share_s):
                        if allowed:
                            os.sched_setaffinity(0, {next(order)})
                        self._synchronize()
                        times.append(processor_time(part))
                products += self._products(share_s)
                reads += self._device_times(self._load, share_s)
        finally:
            if allowed:
                os.sched_setaffinity(0, allowed)
        return {
            "device": device_name(self._device),
            "seconds": time.perf_counter() - began,
            "matmul_tflops": 2 * self._matrix**3 / median(products) / 1e12,
            "read_gb_per_s": self._read_bytes / median(reads) / 1e9,
            "launch_us": median(launched) / LAUNCHES * 1e6,
            "python_ms": median(python) * 1e3,
            "matrix": self._matrix,
            "dtype": str(self._dtype).removeprefix("torch."),
            "read_bytes": self._read_bytes,
            "launches": LAUNCHES,
            "rest_ms": 1e3 * REST_S if self._on_gpu else 0.0,
            "processors": len(allowed),
        }

    def _launch(self) -> None:
        small = self._small
        for _ in range(LAUNCHES):
            small.add_(1.0)

    def _products(self, seconds: float) -> list[float]:
        """Return the seconds of each product, with a rest after each on a GPU."""
        if not self._on_gpu:
            return self._device_times(self._multiply, seconds)
        times = []
        for _ in turns(seconds):
            times += self._marked_times(self._multiply, 1)
            time.sleep(REST_S)
        return times

    def _device_times(self, part: Callable[[], object], seconds: float) -> list[float]:
        """Return the seconds of each call, on the device's own clock where it has one: without the host's launch."""
        if not self._on_gpu:
            return [elapsed(part) for _ in turns(seconds)]
        part()  # brings the clocks up again after what the host did alone
        self._synchronize()
        (rough_s,) = self._marked_times(part, 1)
        return self._marked_times(part, max(1, int(seconds / max(1e-6, rough_s))))

    def _marked_times(self, part: Callable[[], object], calls: int) -> list[float]:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]  # type: ignore[no-untyped-call]
        marks[0].record()
        for mark in marks[1:]:
            part()
            mark.record()
        self._synchronize()
        return [first.elapsed_time(second) / 1e3 for first, second in itertools.pairwise(marks)]

    def _synchronize(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize(self._device)


def interpret() -> int:
    """Run a fixed piece of Python of typical operations: integers, a list, a dictionary and a branch."""
    value, seen, recent = 1, dict[int, int](), [0] * 64
    for step in range(_LOOP):
        value = (value * 1_103_515_245 + 12_345) & 0x7FFFFFFF
        if value & 0x8000:
            recent[step & 63] = value
        else:
            seen[value & 255] = step
    return len(seen) + recent[0]


def processor_time(part: Callable[[], object]) -> float:
    """Return the seconds that this thread had a processor; the check "busy host" judges what others took of it."""
    start = time.thread_time()
    part()
    return time.thread_time() - start


def elapsed(part: Callable[[], object]) -> float:
    """Return the seconds that `part` took."""
    start = time.perf_counter()
    part()
    return time.perf_counter() - start


def turns(seconds: float) -> Iterator[None]:
    """Yield once at least, and again until `seconds` have passed."""
    end = time.perf_counter() + seconds
    yield
    while time.perf_counter() < end:
        yield


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one JSON line when it can measure, and one with what it measured or why it did not."""
    parser = argparse.ArgumentParser(prog="python -m servers.reference", description=__doc__)
    parser.add_argument("--device", required=True, help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--seconds", type=float, default=2.0)
    options = parser.parse_args(arguments)
    try:
        device = resolve_device(options.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        reference = Reference(device)
        print(json.dumps({"ready": True}), flush=True)
        if not sys.stdin.readline():
            return 1  # the reader is gone
        answer = {"at_ns": now_ns(), **reference.measure(options.seconds), "error": None}
    except Exception as error:  # a device that is taken, full or broken is a finding
        answer = {"at_ns": now_ns(), "error": one_line(named(error))}
    print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
