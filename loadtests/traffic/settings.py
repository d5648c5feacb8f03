"""Which traffic one trial sends: the `[traffic]` table of an experiment, checked. Nothing is drawn here."""

from __future__ import annotations

import ipaddress
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Annotated, Literal

from loadtests.traffic.limits import OverLimitPolicy
from loadtests.traffic.prompts import PromptKind
from loadtests.traffic.traces import TimeUnit
from servers.address import host_port
from servers.fields import ConfigError, Range, check_fields, check_range

Design = Literal["mirrored", "split", "switchback"]
Arrivals = Literal["poisson", "gamma", "trace", "piecewise", "ramp", "steps", "saturation", "closed", "users"]
Workload = Literal["conversation", "code", "long-context", "sentences", "trace"]

FEWEST_STEPS = 3
_OF_TRACE = ("trace", "trace_time_unit", "trace_block_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficConfig:
    """Which traffic one trial sends. Settings that contradict each other, or would have no effect, raise ConfigError.

    `rate` is in requests/s: to each arm when mirrored, in all when split or switchback. It is 0 (not given) when the
    times come from `rates` or a trace. A trial lasts `duration_s`; its first `rampup_s` carry a load that rises from
    nothing and are marked "rampup". `rates` is [[start_s, rate], ...] for piecewise, [first, last] for ramp,
    [rate, rate, ...] for steps, which share the duration equally, and [lowest, highest] for a saturation search, whose
    steps last `step_s` each. `length_scales` is [[start_s, factor], ...]: lengths are those of the workload times
    `length_scale` times the factor of the time at which a request is due. A closed loop keeps `concurrency` requests
    under way to each arm. Where arrivals are those of "users", nothing is sent.
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
    length_scales: tuple[tuple[float, ...], ...] = ()
    over_limit: OverLimitPolicy = "clip"
    trace: str = ""
    trace_time_unit: TimeUnit = ""
    trace_block_tokens: Annotated[int, Range(0, 1 << 20)] = 0
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
        if self._constant and self.rate <= 0:
            raise ConfigError(f'traffic.rate is {self.rate}: give requests/s above 0 for arrivals = "{self.arrivals}"')
        self._check_combinations()
        if self._listed:
            self._check_rates()
        if self.length_scales:
            self._check_length_scales()
        if self.arrivals == "saturation":
            self._check_saturation()
        if self.arrivals == "closed":
            self._check_closed()
        if 0 < self.max_concurrency < self.load_processes:
            raise ConfigError(
                f"traffic.max_concurrency is {self.max_concurrency} but traffic.workers and remote_workers are "
                f"{self.load_processes}: give each load process a request at least"
            )
        if self.remote_workers:
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
                f"traffic.rates is {json.dumps(self.rates)}: give [[0, rate], [start_s, rate], ...] for piecewise"
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
            raise ConfigError(f"traffic.rates is {json.dumps(self.rates)}: give {form} for {self.arrivals}")
        return tuple(numbers)

    @property
    def length_factors(self) -> tuple[tuple[float, float], ...]:
        """The factors on all lengths as (start_s, factor) pairs, the first from 0 on."""
        if any(len(item) != 2 for item in self.length_scales):
            raise ConfigError(
                f"traffic.length_scales is {json.dumps(self.length_scales)}: give [[0, factor], [start_s, factor], ...]"
            )
        pairs = self.length_scales or ((0.0, 1.0),)
        return tuple((float(start), self.length_scale * float(factor)) for start, factor in pairs)

    @property
    def _constant(self) -> bool:
        return self.arrivals in ("poisson", "gamma")

    @property
    def _listed(self) -> bool:
        return self.arrivals in ("piecewise", "ramp", "steps", "saturation")

    def _leave_out(self, when: bool, why: str, remedy: str, *names: str) -> None:
        """The settings `names` have their defaults `when` others have no use for them. Remedies name theirs {key}."""
        for item in fields(self):
            if when and item.name in names and (value := getattr(self, item.name)) != item.default:
                raise ConfigError(
                    f"traffic.{item.name} is {json.dumps(value)} but {why}: {remedy.format(key=item.name)}"
                )

    def _check_combinations(self) -> None:
        leave_out = self._leave_out
        arrivals = f'arrivals = "{self.arrivals}"'
        replayed, saturation, closed = (self.arrivals == kind for kind in ("trace", "saturation", "closed"))

        rate_source = {
            "trace": "the trace (set its pace with time_scale)",
            "closed": "the server: each answer brings the next request",
            "users": "users, who send the requests",
        }.get(self.arrivals, "traffic.rates")
        leave_out(not self._constant, f"{arrivals} takes its rate from {rate_source}", "remove {key}", "rate")
        unused = f"{arrivals} does not use it"
        profiles = 'remove {key} or use arrivals = "piecewise", "ramp", "steps" or "saturation"'
        leave_out(not self._listed, unused, profiles, "rates")
        even = self.arrivals in ("poisson", "trace", "closed", "users")
        leave_out(even, unused, 'remove {key} or use arrivals = "gamma"', "burstiness")

        of_trace = [key for key in ("arrivals", "workload") if getattr(self, key) == "trace"]
        leave_out(not self.trace, "traffic.trace is empty", "give the path of a trace", *of_trace[:1])
        leave_out(not of_trace, 'neither arrivals nor workload is "trace"', "set one or remove {key}", *_OF_TRACE)
        replay = 'remove {key} or use arrivals = "trace"'
        leave_out(not replayed, f"{arrivals} does not replay a trace", replay, "time_scale", "trace_start_s")
        leave_out(replayed, f"{arrivals} holds every turn already", "remove {key} or use other arrivals", "turns_mean")

        texts = 'remove {key} or use prompts = "text" or "chat"'
        leave_out(self.prompts == "ids", 'prompts = "ids" needs none', texts, "tokenizer")
        leave_out(bool(of_trace), "a trace has lengths of its own", "remove {key} or the trace", "length_scales")
        timeless = self.arrivals in ("closed", "users", "saturation")
        leave_out(timeless, f"{arrivals} has no times to change lengths at", "remove {key}", "length_scales")

        steps = 'remove {key} or use arrivals = "saturation"'
        leave_out(not saturation, f"{arrivals} has no such steps", steps, "step_s", "settle_s")
        leave_out(saturation, "a saturation search sends each step to every arm", 'use design = "mirrored"', "design")
        in_full = "a saturation search must send every step in full"
        leave_out(saturation, in_full, "remove {key}", "max_concurrency", "num_prompts")

        loop = 'remove {key} or use arrivals = "closed"'
        leave_out(not closed, f"{arrivals} is no closed loop", loop, "concurrency", "pause_s")
        no_times = "a closed loop has no times to pin to blocks"
        pinned = closed and self.design == "switchback"
        leave_out(pinned, no_times, 'use design = "mirrored" or "split"', "design")
        singles = f"{arrivals} keeps concurrency = {self.concurrency} single requests under way"
        leave_out(closed, singles, "remove {key}", "turns_mean", "max_concurrency")

        pinning = 'remove {key} or use design = "mirrored" or "switchback"'
        leave_out(self.design == "split", 'design = "split" needs the splitter to choose the arm', pinning, "direct")
        partly = self.design == "switchback" and abs(math.remainder(self.rampup_s, self.block_s)) > 1e-9
        whole = "give a multiple of it, so that no block is part ramp-up"
        leave_out(partly, f"a switchback has blocks of block_s = {self.block_s}", whole, "rampup_s")
        remote = "remove {key} or say how many workers come from other hosts"
        leave_out(not self.remote_workers, "remote_workers is 0", remote, "master_bind")

    def _check_rates(self) -> None:
        pairs = self.piecewise_rates if self.arrivals == "piecewise" else ()
        rates = [rate for _, rate in pairs] if pairs else list(self.step_rates)
        for rate in rates:
            check_range("traffic.rates", rate, Range(0, 1e9))
        if not any(rates):
            raise ConfigError(f"traffic.rates is {json.dumps(self.rates)}: give at least one rate above 0")
        if pairs:
            self._check_starts("rates", [start for start, _ in pairs])

    def _check_length_scales(self) -> None:
        for _, factor in self.length_factors:
            check_range("traffic.length_scales times length_scale", factor, Range(1e-6, 1e6))
        self._check_starts("length_scales", [start for start, _ in self.length_factors])

    def _check_starts(self, name: str, starts: Sequence[float]) -> None:
        rising = all(before < after for before, after in pairwise(starts))
        if not (starts[0] == 0 and rising and starts[-1] < self.duration_s):
            raise ConfigError(
                f"traffic.{name} has segments from {list(starts)} s: start the first at 0, let them rise, "
                f"and start the last before duration_s = {self.duration_s}"
            )

    def _check_saturation(self) -> None:
        low, high = self.step_rates
        if not 0 < low < high:
            raise ConfigError(
                f"traffic.rates is {json.dumps(self.rates)}: give [lowest, highest] with 0 < lowest < highest"
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

    def _check_closed(self) -> None:
        if not self.concurrency:
            raise ConfigError('traffic.concurrency is 0: give the requests that arrivals = "closed" keeps under way')
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
