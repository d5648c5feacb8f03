"""What Envoy itself counted of each arm: how many requests ended, by gRPC status, lost or given up, since when.

Envoy counts an answer's gRPC status where it comes: in trailers, or in headers alone (the filter grpc_stats, see
bootstrap.py). Copies to a shadow are counted like the requests of any other arm. Health checks are not counted.
"""

from __future__ import annotations

import json
import re
import time
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from servers.metadata import STATUS_NAMES
from servers.splitter.admin import Admin
from servers.splitter.envoy_config import stat_arm

# What Envoy counts as an error of the replica: the statuses whose HTTP counterpart is 500 or more.
_REPLICA_ERRORS: Final = frozenset(
    {"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"}
)
# One Envoy's start is read to within a second or two, by the age that it tells in whole seconds.
SAME_START_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmStatistics:
    """What Envoy counted of one arm since it started.

    Counters are read one after the other while traffic flows: sums of them may be off by the requests of that instant.
    """

    # Requests that ended with a gRPC status, by its name. UNAVAILABLE holds those that no replica could take.
    statuses: Mapping[str, int]
    # Requests whose client gave up, or whose deadline passed at the client first.
    cancelled: int
    # Requests that ended with a status that counts as a replica's error, or with none at all.
    replica_errors: int
    # Requests that came while no replica was healthy.
    without_replica: int
    # Now.
    active: int
    # On the monotonic clock of the host that read it, to within two seconds.
    envoy_start_s: float

    @property
    def lost(self) -> int:
        """Requests whose stream was cut after the answer had begun, as when a replica dies: they have no status."""
        errors = self.replica_errors + self.without_replica
        return max(0, errors - sum(count for name, count in self.statuses.items() if name in _REPLICA_ERRORS))

    @property
    def ended(self) -> int:
        """All that ended: with a status, lost, or given up by their clients."""
        return sum(self.statuses.values()) + self.lost + self.cancelled


def read_statistics(admin: Admin) -> Mapping[str, ArmStatistics]:
    """What Envoy counted of every arm. One call of the admin interface. Raises SplitterError when no split answers."""
    query = urllib.parse.urlencode({"format": "json", "filter": _FILTER})
    text = admin.get(f"/stats?{query}")
    with admin.answering("statistics of arms"):
        return parse_statistics(json.loads(text), read_s=time.monotonic())


def parse_statistics(document: Mapping[str, Any], *, read_s: float) -> Mapping[str, ArmStatistics]:
    """The statistics of every arm in the answer that Envoy gave at `read_s` on the monotonic clock. Pure.

    Raises what `Admin.answering` takes for a document that is no such answer.
    """
    numbers: dict[str, dict[str, int]] = {}
    age_s = None
    for item in document["stats"]:
        if match := _NUMBER.fullmatch(item.get("name", "")):
            numbers.setdefault(stat_arm(match[1]), {})[match[2]] = int(item["value"])
        elif item.get("name") == _AGE:
            age_s = int(item["value"])
    if age_s is None or not numbers:
        raise ValueError("no arm and no age among the statistics")
    return {name: _arm_statistics(values, start_s=read_s - age_s) for name, values in numbers.items()}


# Before and after a connection was had.
_CANCELLED: Final = ("upstream_rq_tx_reset", "upstream_rq_cancelled")
_WITHOUT: Final = "upstream_cx_none_healthy"
_ACTIVE: Final = "upstream_rq_active"
_AGE: Final = "server.uptime"
_NAMES: Final = "|".join(map(re.escape, (*_CANCELLED, _WITHOUT, _ACTIVE)))
# "@" is in the names of the ways that copies take
_NUMBER: Final = re.compile(rf"^cluster\.([^.@]+)\.({_NAMES}|grpc\.[0-9]+|endpoint\..+\.rq_error)$")
_FILTER: Final = f"{_NUMBER.pattern}|^{re.escape(_AGE)}$"
_STATUS: Final = re.compile(r"grpc\.([0-9]+)")


def _arm_statistics(values: Mapping[str, int], *, start_s: float) -> ArmStatistics:
    statuses: dict[str, int] = {}
    for name, value in values.items():
        if match := _STATUS.fullmatch(name):
            code = int(match[1])
            # A number that gRPC does not define is an UNKNOWN, for Envoy's clients too.
            status = STATUS_NAMES[code] if code < len(STATUS_NAMES) else "UNKNOWN"
            statuses[status] = statuses.get(status, 0) + value
    return ArmStatistics(
        statuses=statuses,
        cancelled=sum(values.get(name, 0) for name in _CANCELLED),
        replica_errors=sum(value for name, value in values.items() if name.startswith("endpoint.")),
        without_replica=values.get(_WITHOUT, 0),
        active=values.get(_ACTIVE, 0),
        envoy_start_s=start_s,
    )
