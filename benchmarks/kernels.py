"""Where a decode step's time goes: by kernel on a GPU, by operator on a processor, as torch's profiler tells."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.inprocess import InProcess, Line
from benchmarks.measure import NothingMeasuredError
from benchmarks.traffic import Request

if TYPE_CHECKING:
    from torch.autograd.profiler_util import FunctionEventAvg

_WARM_TURNS = 8  # of the engine loop once all prompts are read, before the profiler starts
_STEPS = 32
_SHOWN = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """What one kernel takes of a decode step."""

    name: str
    calls: float  # a step
    us: float  # a step


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """`steps` decode steps of one batch, each `step_us` long under the profiler; kernels by time, longest first."""

    steps: int
    step_us: float
    kernels: tuple[Kernel, ...]

    @property
    def busy_us(self) -> float:
        """What all kernels take of a step. The rest of the step the device waited for a launch."""
        return sum(kernel.us for kernel in self.kernels)

    @property
    def longest(self) -> list[Kernel]:
        """The kernels that take most, and all others as one."""
        others = self.kernels[_SHOWN:]
        if not others:
            return list(self.kernels)
        rest = Kernel(
            name=f"{len(others)} others",
            calls=sum(kernel.calls for kernel in others),
            us=sum(kernel.us for kernel in others),
        )
        return [*self.kernels[:_SHOWN], rest]


def profile_decode(target: InProcess, requests: Sequence[Request]) -> Profile:
    """Some decode steps in which all `requests` take part. Raises NothingMeasuredError where they end before that."""
    from torch import profiler

    on_gpu = target.runner.device.type == "cuda"
    watch = profiler.profile(
        activities=[profiler.ProfilerActivity.CUDA if on_gpu else profiler.ProfilerActivity.CPU], acc_events=True
    )
    first = 2 * len(requests) + _WARM_TURNS  # a prompt takes a turn, and rows that wait for it may take one between
    turns = 0
    times: list[float] = []

    def settle() -> None:
        if on_gpu:
            import torch

            torch.cuda.synchronize(target.runner.device)

    def feed(line: Line) -> bool:
        nonlocal turns
        if turns == 0:
            for request in requests:
                line.send(request)
        elif turns == first:
            settle()
            watch.start()
            times.append(time.perf_counter())
        elif turns == first + _STEPS and len(line.live) == len(requests):
            settle()
            times.append(time.perf_counter())
            watch.stop()
        turns += 1
        return False

    target.run(feed)
    if len(times) < 2:
        if times:
            watch.stop()
        raise NothingMeasuredError(f"the answers ended within {first + _STEPS} steps: ask for more new tokens")
    return Profile(
        steps=_STEPS,
        step_us=(times[1] - times[0]) * 1e6 / _STEPS,
        kernels=tuple(_kernels(watch.key_averages(), on_gpu=on_gpu)),
    )


def _kernels(rows: Sequence[FunctionEventAvg], *, on_gpu: bool) -> list[Kernel]:
    taken = [(row, row.self_device_time_total if on_gpu else row.self_cpu_time_total) for row in rows]
    kernels = [Kernel(name=str(row.key), calls=row.count / _STEPS, us=us / _STEPS) for row, us in taken if us > 0]
    return sorted(kernels, key=lambda kernel: -kernel.us)
