"""Which traffic one trial sends: the `[traffic]` table of an experiment, checked. Nothing is drawn here."""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from tailgate.servers.address import host_port
from tailgate.servers.complaint import ConfigError
from tailgate.servers.fields import Listed, Settings, as_toml

Design = Literal["mirrored", "split", "switchback"]
Arrivals = Literal["poisson", "gamma", "trace", "piecewise", "saturation", "users"]
Workload = Literal["conversation", "sentences", "trace"]

FEWEST_STEPS = 3
_LISTED = ("piecewise", "saturation")


class UsedWith(NamedTuple):
    """The values of the setting `key` with which a setting has an effect. It is refused with others."""

    key: str
    values: tuple[str, ...]


Rate = Annotated[float, Field(ge=0, le=1e9)]
Scale = Annotated[float, Field(ge=1e-6, le=1e6)]


class TrafficConfig(Settings):
    """Which traffic one trial sends. Settings that contradict each other, or would have no effect, are refused."""

    design: Design = "mirrored"
    """How arms share the traffic: `mirrored` sends each request to every arm, `split` chooses an arm by weight,
    `switchback` lets arms take turns of `traffic.block_s`."""
    duration_s: float = Field(default=60.0, ge=0.001, le=1e7)
    """Length of a trial in s, ramp-up included."""
    rampup_s: float = Field(default=0.0, ge=0, le=1e7)
    """First seconds of a trial, in which the load rises linearly from zero. They are not judged. With a switchback a
    multiple of `traffic.block_s`."""
    arrivals: Arrivals = "poisson"
    """When requests start: a constant rate (`poisson`, `gamma`), a rate that changes (`piecewise`), the times of a
    trace, or steps of rising load (`saturation`). `users` sends nothing; a ramp of `[users]` sets it."""
    # No limit below: 0 is as good as none where others apply, and `_check_times` says what these arrivals need.
    rate: Annotated[
        float, Field(le=1e9, json_schema_extra={"minimum": 0}), UsedWith("arrivals", ("poisson", "gamma"))
    ] = 0.0
    """Requests/s: to each arm when mirrored, in all when split or switchback. Default: required for these arrivals."""
    burstiness: Annotated[float, Field(ge=0.001, le=1e6), UsedWith("arrivals", ("gamma", *_LISTED))] = 1.0
    """1 is a Poisson process, below 1 comes in bursts, above 1 is more even."""
    rates: Annotated[
        tuple[Rate | Annotated[tuple[float, float], Listed], ...], Listed, UsedWith("arrivals", _LISTED)
    ] = ()
    """For `piecewise` `[[0, 2], [60, 8]]`: start in s, requests/s. For `saturation` `[1, 32]`: lowest and highest
    requests/s."""
    step_s: Annotated[float, Field(ge=0.001, le=1e7), UsedWith("arrivals", ("saturation",))] = 30.0
    """Length of a step in s. `duration_s` less `rampup_s` is a whole number of steps, 3 or more."""
    settle_s: Annotated[float, Field(ge=0, le=1e7), UsedWith("arrivals", ("saturation",))] = 10.0
    """Time in s at the start of each step that is not judged."""
    workload: Workload = "conversation"
    """Lengths of prompts and answers: `conversation` (chat), `sentences` (texts for encoders), or those of the trace.
    Default: `conversation`, or `sentences` for encoders."""
    length_scale: Scale = 1.0
    """Factor on every length. Lengths are rounded and at least one token. 0.1 suits a small model on a CPU."""
    length_scales: Annotated[
        tuple[Annotated[tuple[float, Scale], Listed], ...],
        Listed,
        UsedWith("arrivals", ("poisson", "gamma", "piecewise")),
        UsedWith("workload", ("conversation", "sentences")),
    ] = ()
    """Further factors on all lengths, each from its start in s on: `[[0, 0.2], [240, 1]]`."""
    trace: str = ""
    """Path of a trace (CSV or JSON Lines), for `arrivals = "trace"` or `workload = "trace"`."""
    prompts: Literal["ids", "text"] = "ids"
    """What a prompt is made of: random token ids, or text of exactly the planned number of tokens."""
    tokenizer: Annotated[str, UsedWith("prompts", ("text",))] = ""
    """Model folder or hub id whose tokenizer counts the tokens of a text. Default: the control's `model.id`."""
    trace_start_s: Annotated[float, Field(ge=0, le=1e9), UsedWith("arrivals", ("trace",))] = 0.0
    """Second of the trace at which the replay starts."""
    time_scale: Annotated[float, Field(ge=1e-6, le=1e6), UsedWith("arrivals", ("trace",))] = 1.0
    """Factor on the times of the trace: 0.5 replays twice as fast, 2 half as fast."""
    timeout_s: float = Field(default=60.0, ge=0.001, le=1e6)
    """Time in s after which a request has failed."""
    ignore_eos: bool = True
    """Answers have exactly the planned length. With false they may end earlier."""
    workers: int = Field(default=1, ge=0, le=1024)
    """Load-generating processes of this host."""
    remote_workers: int = Field(default=0, ge=0, le=1024)
    """Load-generating processes on other hosts, started there with `tailgate worker`. `workers` may then be 0. All
    hosts need the same secret in `TAILGATE_CHANNEL_TOKEN`."""
    master_bind: str = ""
    """Address of this host for remote workers, as HOST:PORT. The splitter listens on it too. Default: required with
    `remote_workers`."""
    block_s: float = Field(default=30.0, ge=0.001, le=1e7)
    """Length of a block in s: the unit of the statistics, and the turn of a switchback."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for key, field in type(self).model_fields.items():
            for used in field.metadata:
                if isinstance(used, UsedWith) and getattr(self, used.key) not in used.values:
                    others = ", ".join(f'"{value}"' for value in used.values)
                    why = f'traffic.{used.key} = "{getattr(self, used.key)}" does not use it'
                    self._leave_out(key, why, f"remove {key} or use {used.key} = {others}")
        self._check_times()
        if "trace" not in (self.arrivals, self.workload):
            self._leave_out("trace", 'neither arrivals nor workload is "trace"', "set one or remove trace")
        if self.length_scales:
            self._check_starts("length_scales", self.length_factors)
        if not self.load_processes:
            raise ValueError("workers is 0 and traffic.remote_workers too: give 1 or more of one of them")
        if self.remote_workers:
            _ = self.master
        else:
            self._leave_out("master_bind", "remote_workers is 0", "remove master_bind or set remote_workers")
        return self

    @property
    def saturation_steps(self) -> int:
        """How many steps of `step_s` fit behind the ramp-up."""
        return round((self.duration_s - self.rampup_s) / self.step_s)

    @property
    def piecewise_rates(self) -> tuple[tuple[float, float], ...]:
        """`rates` as (start_s, rate) pairs; for piecewise arrivals."""
        return tuple(item for item in self.rates if isinstance(item, tuple))

    @property
    def step_rates(self) -> tuple[float, ...]:
        """`rates` as plain numbers; for saturation arrivals."""
        return tuple(float(item) for item in self.rates if not isinstance(item, tuple))

    @property
    def length_factors(self) -> tuple[tuple[float, float], ...]:
        """The factors on all lengths as (start_s, factor) pairs, the first from 0 on."""
        pairs = self.length_scales or ((0.0, 1.0),)
        return tuple((float(start), self.length_scale * float(factor)) for start, factor in pairs)

    @property
    def load_processes(self) -> int:
        """Load-generating processes on all hosts together."""
        return self.workers + self.remote_workers

    @property
    def master(self) -> tuple[str, int]:
        """(host, port) of `master_bind`: where workers on other hosts find this one."""
        wrong = (
            f'master_bind is "{self.master_bind}": give an IP address of this host and a port, which workers and their '
            "requests come to, such as 10.0.0.5:5557"
        )
        host, port = host_port(self.master_bind, wrong, listens=True)
        with suppress(ValueError):
            if port and not ipaddress.ip_address(host).is_unspecified:
                return host, port
        raise ConfigError(wrong)

    def _leave_out(self, key: str, why: str, remedy: str) -> None:
        """Refuse a setting that differs from its default."""
        if (value := getattr(self, key)) != type(self).model_fields[key].default:
            raise ValueError(f"{key} is {as_toml(value)} but {why}: {remedy}")

    def _check_times(self) -> None:
        """Check that request times are given once and fit the trial."""
        if self.rampup_s >= self.duration_s:
            raise ValueError(
                f"rampup_s is {self.rampup_s} but the whole trial lasts duration_s = {self.duration_s}: "
                "lower rampup_s or raise duration_s"
            )
        if self.arrivals in ("poisson", "gamma") and self.rate <= 0:
            raise ValueError(f'rate is {self.rate}: give requests/s above 0 for arrivals = "{self.arrivals}"')
        if self.arrivals == "piecewise":
            rates = [rate for _, rate in self.piecewise_rates]
            if not rates or len(rates) < len(self.rates) or not all(0 <= rate <= 1e9 for rate in rates):
                raise ValueError(f"rates is {as_toml(self.rates)}: give [[0, rate], ...] up to 1e9 for piecewise")
            self._check_starts("rates", self.piecewise_rates)
        if self.arrivals == "saturation":
            self._check_saturation()
        if self.design == "switchback" and abs(math.remainder(self.rampup_s, self.block_s)) > 1e-9:
            why = f"a switchback has blocks of block_s = {self.block_s}"
            self._leave_out("rampup_s", why, "give a multiple of it, so that no block is part ramp-up")

    def _check_saturation(self) -> None:
        self._leave_out("design", "a saturation search sends each step to every arm", 'use design = "mirrored"')
        if len(self.rates) != 2 or self.piecewise_rates or not 0 < self.step_rates[0] < self.step_rates[1]:
            raise ValueError(
                f"rates is {as_toml(self.rates)}: give [lowest rate, highest rate] with 0 < lowest < highest for "
                "saturation"
            )
        if self.settle_s >= self.step_s:
            raise ValueError(f"settle_s is {self.settle_s} but a step lasts step_s = {self.step_s}: lower settle_s")
        left = abs(self.saturation_steps * self.step_s - (self.duration_s - self.rampup_s))
        if self.saturation_steps < FEWEST_STEPS or left > 1e-6 * self.duration_s:
            raise ValueError(
                f"duration_s is {self.duration_s} with rampup_s = {self.rampup_s}, which is no whole number of "
                f"{FEWEST_STEPS} or more steps of step_s = {self.step_s}: give "
                f"{self.rampup_s + max(FEWEST_STEPS, self.saturation_steps) * self.step_s:g}"
            )

    def _check_starts(self, key: str, pairs: Sequence[tuple[float, float]]) -> None:
        starts = [start for start, _ in pairs]
        rising = all(before < after for before, after in pairwise(starts))
        if not (starts[0] == 0 and rising and starts[-1] < self.duration_s):
            raise ValueError(
                f"{key} has segments from {starts} s: start the first at 0, let them rise, "
                f"and start the last before duration_s = {self.duration_s}"
            )
