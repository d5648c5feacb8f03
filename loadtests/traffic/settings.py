"""Which traffic one trial sends: the `[traffic]` table of an experiment, checked. Nothing is drawn here."""

from __future__ import annotations

import ipaddress
import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal

from loadtests.traffic.limits import OverLimitPolicy
from loadtests.traffic.prompts import PromptKind
from servers.address import host_port
from servers.fields import ConfigError, Range, check_fields, check_range

Design = Literal["mirrored", "split", "switchback"]
Arrivals = Literal["poisson", "gamma", "trace", "piecewise", "ramp", "steps", "saturation", "closed"]
Workload = Literal["conversation", "code", "long-context", "trace", "conversations"]

FEWEST_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficConfig:
    """Which traffic one trial sends. Settings that contradict each other, or would have no effect, raise ConfigError.

    `rate` is in requests/s: to each arm when mirrored, in all when split or switchback. It is 0 (not given) when the
    times come from `rates` or a trace. A trial lasts `duration_s`; its first `rampup_s` carry a load that rises from
    nothing and are marked "rampup". `rates` is [[start_s, rate], ...] for piecewise, [first, last] for ramp,
    [rate, rate, ...] for steps, which share the duration equally, and [lowest, highest] for a saturation search, whose
    steps last `step_s` each. A closed loop keeps `concurrency` requests under way to each arm.
    """

    design: Design = "mirrored"
    duration_s: Annotated[float, Range(0.001, 1e7)] = 60.0
    rampup_s: Annotated[float, Range(0, 1e7)] = 0.0
    arrivals: Arrivals = "poisson"
    rate: Annotated[float, Range(0, 1e9)] = 0.0
    burstiness: Annotated[float, Range(0.001, 1e6)] = 1.0
    rates: tuple[float | tuple[float, ...], ...] = ()
    step_s: Annotated[float, Range(0.001, 1e7)] = 30.0
    settle_s: Annotated[float, Range(0, 1e7)] = 10.0
    concurrency: Annotated[int, Range(0, 100_000)] = 0
    pause_s: Annotated[float, Range(0, 1e6)] = 0.0
    num_prompts: Annotated[int, Range(0, 20_000_000)] = 0
    workload: Workload = "conversation"
    length_scale: Annotated[float, Range(1e-6, 1e6)] = 1.0
    over_limit: OverLimitPolicy = "clip"
    trace: str = ""
    conversations: str = ""
    prompts: PromptKind = "ids"
    tokenizer: str = ""
    trace_start_s: Annotated[float, Range(0, 1e9)] = 0.0
    time_scale: Annotated[float, Range(1e-6, 1e6)] = 1.0
    turns_mean: Annotated[float, Range(1, 1000)] = 1.0
    think_time_s: Annotated[float, Range(0.001, 1e6)] = 10.0
    timeout_s: Annotated[float, Range(0.001, 1e6)] = 60.0
    max_concurrency: Annotated[int, Range(0, 1_000_000)] = 0
    ignore_eos: bool = True
    direct: bool = False
    client: Literal["frames", "grpcio"] = "frames"
    workers: int = 1
    remote_workers: Annotated[int, Range(0, 1024)] = 0
    master_bind: str = ""
    block_s: Annotated[float, Range(0.001, 1e7)] = 30.0

    def __post_init__(self) -> None:
        check_fields(self, "traffic")
        check_range("traffic.workers", self.workers, Range(0 if self.remote_workers > 0 else 1, 1024))
        if self.rampup_s >= self.duration_s:
            raise ConfigError(
                f"traffic.rampup_s is {self.rampup_s} but the whole trial lasts duration_s = {self.duration_s}: "
                "lower rampup_s or raise duration_s"
            )
        self._check_rate()
        self._check_trace()
        self._check_prompts()
        self._check_saturation()
        self._check_closed()
        self._check_design()
        self._check_master()

    @property
    def open_loop(self) -> bool:
        """True when requests start at their scheduled time whatever is still under way."""
        return self.max_concurrency == 0 and self.arrivals != "closed"

    @property
    def saturation_steps(self) -> int:
        """How many steps of `step_s` fit behind the ramp-up."""
        return round((self.duration_s - self.rampup_s) / self.step_s)

    @property
    def piecewise_rates(self) -> tuple[tuple[float, float], ...]:
        """`rates` as (start_s, rate) pairs; for piecewise arrivals."""
        pairs = [item for item in self.rates if isinstance(item, tuple) and len(item) == 2]
        if not pairs or len(pairs) != len(self.rates):
            raise ConfigError(
                f"traffic.rates is {_plain(self.rates)}: give [[0, rate], [start_s, rate], ...] for piecewise"
            )
        return tuple((float(start), float(rate)) for start, rate in pairs)

    @property
    def step_rates(self) -> tuple[float, ...]:
        """`rates` as plain numbers; for ramp, steps and saturation arrivals."""
        numbers = [float(item) for item in self.rates if not isinstance(item, tuple)]
        wrong_count = not numbers or (self.arrivals in ("ramp", "saturation") and len(numbers) != 2)
        if wrong_count or len(numbers) != len(self.rates):
            forms = {"ramp": "[first rate, last rate]", "saturation": "[lowest rate, highest rate]"}
            form = forms.get(self.arrivals, "[rate, rate, ...]")
            raise ConfigError(f"traffic.rates is {_plain(self.rates)}: give {form} for {self.arrivals}")
        return tuple(numbers)

    def _check_rate(self) -> None:
        constant = self.arrivals in ("poisson", "gamma")
        listed = self.arrivals in ("piecewise", "ramp", "steps", "saturation")
        if constant and self.rate <= 0:
            raise ConfigError(f'traffic.rate is {self.rate}: give requests/s above 0 for arrivals = "{self.arrivals}"')
        if not constant and self.rate:
            source = {
                "trace": "the trace (set its pace with time_scale)",
                "closed": "the server: each answer brings the next request",
            }.get(self.arrivals, "traffic.rates")
            raise ConfigError(
                f'traffic.rate is {self.rate} but arrivals = "{self.arrivals}" takes its rate from {source}: '
                "remove rate"
            )
        if not listed and self.rates:
            raise ConfigError(
                f'traffic.rates is {_plain(self.rates)} but arrivals = "{self.arrivals}" does not use it: '
                'remove it or use arrivals = "piecewise", "ramp", "steps" or "saturation"'
            )
        if self.burstiness != 1 and self.arrivals in ("poisson", "trace", "closed"):
            raise ConfigError(
                f'traffic.burstiness is {self.burstiness} but arrivals = "{self.arrivals}" does not use it: '
                'remove it or use arrivals = "gamma"'
            )
        if listed:
            self._check_rates()

    def _check_rates(self) -> None:
        pairs = self.piecewise_rates if self.arrivals == "piecewise" else ()
        rates = [rate for _, rate in pairs] if pairs else list(self.step_rates)
        for rate in rates:
            check_range("traffic.rates", rate, Range(0, 1e9))
        if not any(rates):
            raise ConfigError(f"traffic.rates is {_plain(self.rates)}: give at least one rate above 0")
        starts = [start for start, _ in pairs]
        rising = all(before < after for before, after in pairwise(starts))
        if pairs and not (starts[0] == 0 and rising and starts[-1] < self.duration_s):
            raise ConfigError(
                f"traffic.rates has segments from {starts} s: start the first at 0, let them rise, "
                f"and start the last before duration_s = {self.duration_s}"
            )

    def _check_trace(self) -> None:
        uses = [key for key in ("arrivals", "workload") if getattr(self, key) == "trace"]
        if uses and not self.trace:
            raise ConfigError(f'traffic.{uses[0]} is "trace" but traffic.trace is empty: give the path of a trace')
        if self.trace and not uses:
            raise ConfigError(
                f'traffic.trace is "{self.trace}" but neither arrivals nor workload is "trace": set one or remove trace'
            )
        for key, value, unused in (("time_scale", self.time_scale, 1.0), ("trace_start_s", self.trace_start_s, 0.0)):
            if value != unused and self.arrivals != "trace":
                raise ConfigError(
                    f'traffic.{key} is {value} but arrivals = "{self.arrivals}" does not replay a trace: '
                    f'remove {key} or use arrivals = "trace"'
                )
        if self.turns_mean != 1 and self.arrivals == "trace":
            raise ConfigError(
                f'traffic.turns_mean is {self.turns_mean} but arrivals = "trace" holds every turn already: '
                "remove turns_mean or use other arrivals"
            )

        if self.workload == "conversations" and not self.conversations:
            raise ConfigError(
                'traffic.workload is "conversations" but traffic.conversations is empty: give the path of a ShareGPT '
                "JSON file"
            )
        if self.conversations and self.workload != "conversations":
            raise ConfigError(
                f'traffic.conversations is "{self.conversations}" but workload = "{self.workload}" does not use it: '
                'remove it or use workload = "conversations"'
            )
        if self.workload == "conversations" and (self.turns_mean != 1 or self.arrivals == "trace"):
            key = "turns_mean" if self.turns_mean != 1 else "arrivals"
            raise ConfigError(
                f'traffic.{key} is {getattr(self, key)!r} but workload = "conversations" brings its own turns: '
                f"remove {key}"
            )

    def _check_prompts(self) -> None:
        if self.tokenizer and self.prompts == "ids" and self.workload != "conversations":
            raise ConfigError(
                f'traffic.tokenizer is "{self.tokenizer}" but prompts = "ids" needs none: '
                'remove it or use prompts = "text" or "chat"'
            )
        if self.workload == "conversations" and self.prompts != "ids" and self.length_scale != 1:
            raise ConfigError(
                f"traffic.length_scale is {self.length_scale} but conversations are sent as they are written: "
                'remove it or use prompts = "ids"'
            )

    def _check_saturation(self) -> None:
        if self.arrivals != "saturation":
            for key, value, unused in (("step_s", self.step_s, 30.0), ("settle_s", self.settle_s, 10.0)):
                if value != unused:
                    raise ConfigError(
                        f'traffic.{key} is {value} but arrivals = "{self.arrivals}" has no such steps: '
                        f'remove {key} or use arrivals = "saturation"'
                    )
            return
        low, high = self.step_rates
        if not 0 < low < high:
            raise ConfigError(
                f"traffic.rates is {_plain(self.rates)}: give [lowest, highest] with 0 < lowest < highest"
            )
        if self.settle_s >= self.step_s:
            raise ConfigError(
                f"traffic.settle_s is {self.settle_s} but a step lasts step_s = {self.step_s}: lower settle_s"
            )
        left = abs(self.saturation_steps * self.step_s - (self.duration_s - self.rampup_s))
        if self.saturation_steps < FEWEST_STEPS or left > 1e-6 * self.duration_s:
            raise ConfigError(
                f"traffic.duration_s is {self.duration_s} with rampup_s = {self.rampup_s}, which is no whole number of "
                f"{FEWEST_STEPS} or more steps of step_s = {self.step_s}: give "
                f"{self.rampup_s + max(FEWEST_STEPS, self.saturation_steps) * self.step_s:g}"
            )
        if self.design != "mirrored":
            raise ConfigError(
                f'traffic.design is "{self.design}" but a saturation search sends each step to every arm: '
                'use design = "mirrored"'
            )
        for key, idle in (("max_concurrency", 0), ("num_prompts", 0)):
            if getattr(self, key) != idle:
                raise ConfigError(
                    f"traffic.{key} is {getattr(self, key)} but a saturation search must send every step in full: "
                    f"remove {key}"
                )

    def _check_closed(self) -> None:
        if self.arrivals != "closed":
            for key in ("concurrency", "pause_s"):
                if getattr(self, key):
                    raise ConfigError(
                        f'traffic.{key} is {getattr(self, key)} but arrivals = "{self.arrivals}" is no closed loop: '
                        f'remove {key} or use arrivals = "closed"'
                    )
            return
        if not self.concurrency:
            raise ConfigError('traffic.concurrency is 0: give the requests that arrivals = "closed" keeps under way')
        if self.design == "switchback":
            raise ConfigError(
                'traffic.design is "switchback" but a closed loop has no times to pin to blocks: '
                'use design = "mirrored" or "split"'
            )
        for key, idle in (("turns_mean", 1.0), ("max_concurrency", 0)):
            if getattr(self, key) != idle:
                raise ConfigError(
                    f'traffic.{key} is {getattr(self, key)} but arrivals = "closed" keeps concurrency = '
                    f"{self.concurrency} single requests under way: remove {key}"
                )
        if self.load_processes > self.concurrency:
            raise ConfigError(
                f"traffic.workers and remote_workers are {self.load_processes} but concurrency is {self.concurrency}: "
                "give each load process a request at least"
            )

    @property
    def load_processes(self) -> int:
        """Load-generating processes on all hosts together."""
        return self.workers + self.remote_workers

    @property
    def master(self) -> tuple[str, int]:
        """(host, port) of `master_bind`: where workers on other hosts find this one."""
        return host_port(
            self.master_bind,
            f'traffic.master_bind is "{self.master_bind}": give this host\'s address and a port, as workers on '
            "other hosts reach it, such as 10.0.0.5:5557",
        )

    def _check_master(self) -> None:
        if not self.remote_workers:
            if self.master_bind:
                raise ConfigError(
                    f'traffic.master_bind is "{self.master_bind}" but remote_workers is 0: '
                    "remove master_bind or say how many workers come from other hosts"
                )
            return
        host, _ = self.master
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            address = None
        if address is None or address.is_unspecified:
            raise ConfigError(
                f'traffic.master_bind is "{self.master_bind}": give an IP address of this host, which workers and '
                "their requests come to, such as 10.0.0.5:5557"
            )

    def _check_design(self) -> None:
        if self.direct and self.design == "split":
            raise ConfigError(
                'traffic.direct is true but design = "split" needs the splitter to choose the arm: '
                'remove direct or use design = "mirrored" or "switchback"'
            )
        if self.design == "switchback" and abs(math.remainder(self.rampup_s, self.block_s)) > 1e-9:
            raise ConfigError(
                f"traffic.rampup_s is {self.rampup_s} but a switchback has blocks of block_s = {self.block_s}: "
                "give a multiple of it, so that no block is part ramp-up"
            )


def _plain(value: object) -> object:
    """Tuples as lists, the way they are written in TOML."""
    return [_plain(item) for item in value] if isinstance(value, tuple) else value
