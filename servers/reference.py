"""Measure how fast a device and its host are: `python -m tailgate.servers.reference --device cuda:0`.

The work never changes. Four parts tell a slow card from a slow host: a matrix product (the device computes), a read of
memory (the device loads), many small launches (the host issues), a loop of Python (the host interprets). Says `Ready`
once all is allocated and warm, measures when a line comes on stdin, and says `Measured`, also where it could not.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median

import torch

from tailgate.servers.clock import now_ns
from tailgate.servers.complaint import named, one_line
from tailgate.servers.engine.placement import device_name, resolve_device
from tailgate.servers.processes import Measured, Ready, say

LAUNCHES = 2000
ROUNDS = 5  # the parts take turns, so that a disturbance of a moment hits a fifth of each
# Between two products on a GPU. Back to back they reach the card's power cap, and scatter by 4 to 5 % on an H200; with
# rests by 1 % at most.
REST_S = 0.02
READS = 64  # at once on a GPU, so that the host's launches are not in their time
_WARM_CALLS = 3
_LOOP = 50_000
_READ_BYTES = {"cpu": 256 << 20, "cuda": 4 << 30}  # far larger than caches

Work = Callable[[], object]


def measure(device: torch.device, seconds: float, begin: Callable[[], None] = lambda: None) -> dict[str, object]:
    """Return medians over all repetitions within about `seconds`; each part has a quarter of them.

    `begin` is called once all is allocated, filled with random data (zeros would draw less power) and warm.
    """
    on_gpu = device.type == "cuda"
    size, dtype = (8192, torch.bfloat16) if on_gpu else (1024, torch.float32)
    read_bytes = _READ_BYTES[device.type]
    # where others hold the memory; figures of unequal sizes are not compared
    while on_gpu and read_bytes > max(_READ_BYTES["cpu"], torch.cuda.mem_get_info(device)[0] // 2):
        read_bytes //= 2
    made = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn((size, size), generator=made, device=device, dtype=dtype) for _ in range(2))
    product = torch.empty_like(left)
    numbers = torch.rand(read_bytes // 4, generator=made, device=device)
    one = torch.rand(1, generator=made, device=device)

    def multiply() -> None:
        torch.mm(left, right, out=product)

    def launch() -> None:
        for _ in range(LAUNCHES):
            one.add_(1.0)

    for work in (multiply, numbers.sum, launch, interpret):
        for _ in range(_WARM_CALLS):
            work()
    begin()
    python, launched, products, reads = (list[float]() for _ in range(4))
    began = time.perf_counter()
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    # On a shared host some processors are half as fast as others: the loop and the launches visit all of them.
    processors = itertools.cycle(random.Random(0).sample(allowed, len(allowed)))
    try:
        for _ in range(ROUNDS):
            for work, times in ((interpret, python), (launch, launched)):
                for _ in turns(seconds / (4 * ROUNDS)):
                    if allowed:
                        os.sched_setaffinity(0, {next(processors)})
                    if on_gpu:
                        torch.cuda.synchronize(device)
                    times.append(processor_time(work))
            for _ in turns(seconds / (4 * ROUNDS)):
                products += device_times(device, multiply, 1)
                time.sleep(REST_S if on_gpu else 0.0)
            for _ in turns(seconds / (4 * ROUNDS)):
                reads += device_times(device, numbers.sum, READS)
    finally:
        if allowed:
            os.sched_setaffinity(0, allowed)
    return {
        "device": device_name(device),
        "seconds": time.perf_counter() - began,
        "matmul_tflops": 2 * size**3 / median(products) / 1e12,
        "read_gb_per_s": read_bytes / median(reads) / 1e9,
        "launch_us": median(launched) / LAUNCHES * 1e6,
        "python_ms": median(python) * 1e3,
        "matrix": size,
        "dtype": str(dtype).removeprefix("torch."),
        "read_bytes": read_bytes,
        "launches": LAUNCHES,
        "rest_ms": 1e3 * REST_S if on_gpu else 0.0,
        "processors": len(allowed),
    }


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


def processor_time(work: Work) -> float:
    """Return the seconds that this thread had a processor; the check "busy host" judges what others took of it."""
    start = time.thread_time()
    work()
    return time.thread_time() - start


def device_times(device: torch.device, work: Work, calls: int) -> list[float]:
    """Return the seconds of each call on the device's own clock; of one call on the host's where it has none."""
    if device.type != "cuda":
        start = time.perf_counter()
        work()
        return [time.perf_counter() - start]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]  # type: ignore[no-untyped-call]
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    torch.cuda.synchronize(device)
    return [first.elapsed_time(second) / 1e3 for first, second in itertools.pairwise(marks)]


def turns(seconds: float) -> Iterator[None]:
    """Yield once at least, and again until `seconds` have passed."""
    end = time.perf_counter() + seconds
    yield
    while time.perf_counter() < end:
        yield


def _begin() -> None:
    say(Ready())
    if not sys.stdin.readline():
        sys.exit(1)  # the reader is gone


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tailgate.servers.reference")
    parser.add_argument("--device", required=True, help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--seconds", type=float, default=2.0)
    options = parser.parse_args(arguments)
    try:
        device = resolve_device(options.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        say(Measured(at_ns=now_ns(), values=measure(device, options.seconds, _begin)))
    except Exception as error:  # a device that is taken, full or broken is a finding
        say(Measured(at_ns=now_ns(), values={}, error=one_line(named(error))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
