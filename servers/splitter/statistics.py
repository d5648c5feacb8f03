"""What Envoy itself counted of each arm: answers by gRPC status, losses, and how long requests took.

Envoy counts an answer's gRPC status where it comes: in trailers, or in headers alone (the filter grpc_stats, see
bootstrap.py). Copies to a shadow are counted like the requests of any other arm. Health checks are not counted.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import time
import urllib.parse
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

from servers.metadata import STATUS_NAMES
from servers.splitter.admin import Admin, SplitterError
from servers.splitter.envoy_config import stat_arm

# Where a bucket of latencies ends, in ms: whole ms up to 9, then the preferred numbers E24 of IEC 60063, each about
# 10 % above the one before, up to 10 minutes. Two digits, because Envoy's own histograms keep two: between their bins
# it would estimate. The last bucket takes all that is longer.
_E24: Final = (10, 11, 12, 13, 15, 16, 18, 20, 22, 24, 27, 30, 33, 36, 39, 43, 47, 51, 56, 62, 68, 75, 82, 91)
_LONGEST_MS: Final = 600_000
_ANY_MS: Final = 1e9
LATENCY_BOUNDS_MS: Final = (
    *range(1, 10),
    *(step * 10**decade for decade in range(5) for step in _E24 if step * 10**decade <= _LONGEST_MS),
    _LONGEST_MS,
    int(_ANY_MS),
)

# What Envoy counts as an error of the replica: the statuses whose HTTP counterpart is 500 or more.
_REPLICA_ERRORS: Final = frozenset(
    {"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"}
)
# One Envoy's start is read to within a second or two, by the age that it tells in whole seconds.
SAME_START_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantile:
    """A quantile of latencies: the bucket that holds it, and an estimate within."""

    lower_ms: float
    upper_ms: float
    estimate_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Latencies:
    """Requests by how long they took, from the last byte of the request to the last of the answer.

    `buckets` are (upper_ms, how many took less), in order of upper_ms; the last one is (inf, all). Answers are in, also
    those with an error status; requests that were lost or given up are not.
    """

    buckets: tuple[tuple[float, int], ...] = ()

    @property
    def count(self) -> int:
        """All of them."""
        return self.buckets[-1][1] if self.buckets else 0

    def quantile(self, q: float) -> Quantile | None:
        """Where the smallest latency lies that a share `q` of the requests does not exceed; None without requests.

        It is surely between lower_ms and upper_ms. The estimate is linear within the bucket, and lower_ms in the last
        one, which has no end.
        """
        if not 0 <= q <= 1:
            raise ValueError(f"quantile {q} is out of range: give a share from 0 to 1")
        if not self.count:
            return None
        rank = max(1, math.ceil(q * self.count - 1e-9))
        lower_ms, before = 0.0, 0
        for upper_ms, cumulative in self.buckets:
            if cumulative >= rank:
                break
            lower_ms, before = upper_ms, cumulative
        width_ms = upper_ms - lower_ms if math.isfinite(upper_ms) else 0.0
        share = (rank - before) / (cumulative - before)
        return Quantile(lower_ms=lower_ms, upper_ms=upper_ms, estimate_ms=lower_ms + share * width_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmStatistics:
    """What Envoy counted of one arm since it started, or in between two readings; and how the arm stands now.

    Counters are read one after the other while traffic flows: sums of them may be off by the requests of that instant.
    """

    # Requests that ended with a gRPC status, by its name. UNAVAILABLE holds those that no replica could take.
    statuses: Mapping[str, int]
    # Requests whose client gave up, or whose deadline passed at the client first.
    cancelled: int
    # Answers with an HTTP status of 500 or more, which no gRPC server gives: Envoy's own, or those of a proxy behind.
    http_5xx: int
    timeouts: int
    # Streams that a replica reset.
    resets: int
    # Connections to replicas that could not be made.
    connect_failures: int
    # Requests that came while no replica was healthy.
    without_replica: int
    # How often a replica that could not be reached was taken out.
    ejections: int
    # By address: requests that ended with a status that counts as the replica's error, or with none at all.
    replica_errors: Mapping[str, int]
    latencies: Latencies = field(default_factory=Latencies)
    # Now.
    active: int
    replicas: int
    healthy_replicas: int
    # On the monotonic clock of the host that read it, to within two seconds.
    envoy_start_s: float

    @property
    def lost(self) -> int:
        """Requests whose stream was cut after the answer had begun, as when a replica dies: they have no status."""
        errors = sum(self.replica_errors.values()) + self.without_replica
        return max(0, errors - sum(count for name, count in self.statuses.items() if name in _REPLICA_ERRORS))

    @property
    def completed(self) -> int:
        """Requests that ended with a status or were lost; those that their clients gave up are not among them."""
        return sum(self.statuses.values()) + self.lost

    @property
    def failed(self) -> int:
        """Completed requests without the status OK."""
        return self.completed - self.statuses.get("OK", 0)


def read_statistics(admin: Admin) -> Mapping[str, ArmStatistics]:
    """What Envoy counted of every arm. One call of the admin interface.

    Latencies are those of about a second ago: Envoy gathers them from its threads once a second. Raises SplitterError
    when no split answers.
    """
    query = urllib.parse.urlencode({"format": "json", "histogram_buckets": "cumulative", "filter": _FILTER})
    text = admin.get(f"/stats?{query}")
    try:
        return parse_statistics(json.loads(text), read_s=time.monotonic())
    except (ValueError, KeyError, TypeError) as error:
        raise SplitterError(
            f"{admin.address} answered no statistics of arms ({type(error).__name__}): is it a split's admin port?"
        ) from None


def between(earlier: Mapping[str, ArmStatistics], later: Mapping[str, ArmStatistics]) -> Mapping[str, ArmStatistics]:
    """What was counted of each arm from one reading to the other; what stands now is the later reading's.

    Replicas that are gone in the later reading are left out of `replica_errors`. Raises SplitterError when Envoy was
    started anew in between, or is another one.
    """
    if earlier.keys() != later.keys():
        raise SplitterError(
            f"Envoy splits over {', '.join(later)} and not over {', '.join(earlier)} as before: read it anew"
        )
    return {name: _since(name, earlier[name], later[name]) for name in later}


def parse_statistics(document: Mapping[str, Any], *, read_s: float) -> Mapping[str, ArmStatistics]:
    """The statistics of every arm in the answer that Envoy gave at `read_s` on the monotonic clock. Pure.

    Raises ValueError, KeyError or TypeError for a document that is no such answer.
    """
    numbers: dict[str, dict[str, int]] = {}
    latencies: dict[str, Latencies] = {}
    age_s = None
    for item in document["stats"]:
        for histogram in item.get("histograms", ()):
            if match := _LATENCIES.fullmatch(histogram["name"]):
                latencies[stat_arm(match[1])] = _latencies(histogram["buckets"])
        if match := _NUMBER.fullmatch(item.get("name", "")):
            numbers.setdefault(stat_arm(match[1]), {})[match[2]] = int(item["value"])
        elif item.get("name") == _AGE:
            age_s = int(item["value"])
    if age_s is None or not numbers:
        raise ValueError("no arm and no age among the statistics")
    return {
        name: _arm_statistics(values, latencies.get(name, Latencies()), start_s=read_s - age_s)
        for name, values in numbers.items()
    }


# What is read of each arm, by the names of Envoy's statistics. cancelled is two: before and after a connection was had.
_COUNTERS: Final = {
    "http_5xx": ("upstream_rq_5xx",),
    "timeouts": ("upstream_rq_timeout",),
    "cancelled": ("upstream_rq_tx_reset", "upstream_rq_cancelled"),
    "resets": ("upstream_rq_rx_reset",),
    "connect_failures": ("upstream_cx_connect_fail",),
    "without_replica": ("upstream_cx_none_healthy",),
    "ejections": ("outlier_detection.ejections_enforced_total",),
}
_GAUGES: Final = {
    "active": "upstream_rq_active",
    "replicas": "membership_total",
    "healthy_replicas": "membership_healthy",
}
_AGE: Final = "server.uptime"
_ARM: Final = r"^cluster\.([^.@]+)\."  # "@" is in the names of the ways that copies take
_NAMES: Final = "|".join(re.escape(name) for name in [*itertools.chain(*_COUNTERS.values()), *_GAUGES.values()])
_NUMBER: Final = re.compile(rf"{_ARM}({_NAMES}|grpc\.[0-9]+|endpoint\..+\.rq_error)$")
_LATENCIES: Final = re.compile(rf"{_ARM}upstream_rq_time$")
_FILTER: Final = f"{_NUMBER.pattern}|{_LATENCIES.pattern}|^{re.escape(_AGE)}$"
_STATUS: Final = re.compile(r"grpc\.([0-9]+)")
_REPLICA: Final = re.compile(r"endpoint\.(.+)\.rq_error")


def _arm_statistics(values: Mapping[str, int], latencies: Latencies, *, start_s: float) -> ArmStatistics:
    statuses: dict[str, int] = {}
    replica_errors = {}
    for name, value in values.items():
        if match := _STATUS.fullmatch(name):
            code = int(match[1])
            # A number that gRPC does not define is an UNKNOWN, for Envoy's clients too.
            status = STATUS_NAMES[code] if code < len(STATUS_NAMES) else "UNKNOWN"
            statuses[status] = statuses.get(status, 0) + value
        elif match := _REPLICA.fullmatch(name):
            replica_errors[match[1]] = value
    return ArmStatistics(
        statuses=statuses,
        replica_errors=replica_errors,
        latencies=latencies,
        envoy_start_s=start_s,
        **{key: sum(values.get(name, 0) for name in names) for key, names in _COUNTERS.items()},
        **{key: values.get(name, 0) for key, name in _GAUGES.items()},
    )


def _latencies(buckets: Iterable[Mapping[str, Any]]) -> Latencies:
    return Latencies(
        buckets=tuple(
            (math.inf if item["upper_bound"] >= _ANY_MS else float(item["upper_bound"]), int(item["cumulative"]))
            for item in buckets
        )
    )


def _since(name: str, earlier: ArmStatistics, later: ArmStatistics) -> ArmStatistics:
    if abs(later.envoy_start_s - earlier.envoy_start_s) > SAME_START_S:
        raise SplitterError(
            f'arm "{name}": Envoy was started anew between the readings, and counts from 0 again: read it twice more'
        )

    def grown(what: str, before: int, after: int) -> int:
        if after < before:
            raise SplitterError(
                f'arm "{name}": {what} fell from {before} to {after} between the readings, as when Envoy starts anew: '
                "read it twice more"
            )
        return after - before

    counters = {
        item.name: grown(item.name, getattr(earlier, item.name), getattr(later, item.name))
        for item in fields(ArmStatistics)
        if item.name in _COUNTERS
    }
    statuses = {
        status: grown(f"statuses {status}", earlier.statuses.get(status, 0), later.statuses.get(status, 0))
        for status in {**earlier.statuses, **later.statuses}
    }
    # A replica that came back under the same address counts from 0.
    errors = {
        address: count - (before if (before := earlier.replica_errors.get(address, 0)) <= count else 0)
        for address, count in later.replica_errors.items()
    }
    counted = dict(earlier.latencies.buckets)
    buckets = tuple(
        (upper_ms, grown("latencies", counted.get(upper_ms, 0), count)) for upper_ms, count in later.latencies.buckets
    )
    return replace(later, **counters, statuses=statuses, replica_errors=errors, latencies=Latencies(buckets=buckets))
