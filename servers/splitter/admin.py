"""A running split, through Envoy's admin interface: its replicas and log, what it counted, and its shares."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import time
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tailgate.servers.address import host_port, joined
from tailgate.servers.complaint import ConfigError
from tailgate.servers.splitter.bootstrap import LISTENER, SHADOW_KEYS, WEIGHT_KEYS
from tailgate.servers.splitter.envoy_config import check_shadow, check_weight, fraction

# Envoy states its age in whole seconds: two readings of one start are closer than this.
SAME_START_S: Final = 5.0


class SplitterError(RuntimeError):
    """Envoy did not start, died or did not answer. The message is one line and names the log."""


@dataclass(frozen=True, slots=True)
class Admin:
    """The admin interface at `address`: "host:port", or the path of a Unix socket."""

    address: str

    @contextlib.contextmanager
    def reading(self, path: str, what: str) -> Iterator[Any]:
        """Yield the JSON document at `path`. Raises SplitterError where it is not `what` of a split, as the block finds
        it."""
        text = self.answer("GET", path)
        try:
            yield json.loads(text)
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise SplitterError(
                f"{self.address} answered no {what} ({type(error).__name__}): is it a split's admin port?"
            ) from None

    def stats(self, *names: str) -> dict[str, int]:
        """Return Envoy's counters and gauges of these `names`, all of which it has. Raises SplitterError."""
        query = urllib.parse.urlencode({"format": "json", "filter": f"^({'|'.join(map(re.escape, names))})$"})
        with self.reading(f"/stats?{query}", "statistics of a split") as document:
            counted = {item["name"]: int(item["value"]) for item in document["stats"]}
            return {name: counted[name] for name in names}

    def fetch(self, method: str, path: str, *, timeout_s: float = 2.0) -> tuple[int, str]:
        """Return (HTTP status, body). Raises OSError or HTTPException when there is no answer.

        A ramp asks again, and must not wait long for an Envoy that hangs.
        """
        # http.client, not urllib: a proxy from the environment must not stand in between.
        if self.address.startswith("/"):
            connection: http.client.HTTPConnection = _SocketConnection(self.address, timeout_s)
        else:
            connection = http.client.HTTPConnection(*host_port(self.address), timeout=timeout_s)
        try:
            connection.request(method, path)
            response = connection.getresponse()
            return response.status, response.read().decode(errors="replace")
        finally:
            connection.close()

    def answer(self, method: str, path: str) -> str:
        """Return the answer to a question or a change. Raises SplitterError."""
        try:
            status, body = self.fetch(method, path)
        except (OSError, http.client.HTTPException) as error:
            raise SplitterError(
                f"no split answers at {self.address} ({error}): see its log, or give the address that it printed"
            ) from None
        if status != 200:
            excerpt = " ".join(body.split())[:200]
            raise SplitterError(
                f"{self.address} answered {status} to {path.partition('?')[0]} ({excerpt}): is it a split's admin port?"
            )
        return body


def admin_address(text: str, otherwise: str = "") -> str:
    """Return the address, "host:port" or an absolute path. Raises ConfigError(`otherwise`) for any other text."""
    if not text.startswith("/"):
        host_port(text, otherwise)
    elif not text.isprintable():
        raise ConfigError(otherwise or f"the path {text!r} is not printable: give another")
    return text


class _SocketConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """The weight of every arm, and the percentage of requests that each shadow gets copies of."""

    weights: Mapping[str, int]
    shadows: Mapping[str, float]


def replica_addresses(admin: Admin) -> dict[str, tuple[str, ...]]:
    """Return {arm: "host:port" of each replica}, as Envoy has resolved them. Raises SplitterError."""
    with admin.reading("/clusters?format=json", "replicas") as document:
        return {
            cluster["name"]: tuple(_address(host) for host in cluster.get("host_statuses", []))
            for cluster in document["cluster_statuses"]
        }


def _address(host: dict[str, dict[str, dict[str, str | int]]]) -> str:
    place = host["address"]["socket_address"]
    return joined(str(place["address"]), int(place["port_value"]))


def log_path(admin: Admin) -> str:
    """Return the file that the split writes its request log to, "" where it writes none. Raises SplitterError."""
    with admin.reading("/config_dump", "configuration") as document:
        for table in _tables(document):
            form = table.get("log_format")
            if isinstance(form, dict) and form.get("json_format", {}).keys() >= {"event", "connection", "figures"}:
                return str(table.get("path", ""))
    return ""


def ended_requests(admin: Admin) -> tuple[int, float]:
    """Return how many requests have ended since Envoy started, and when that was on the monotonic clock.

    Copies to a shadow are not counted. The number may be off by the requests of this instant. Raises SplitterError.
    """
    names = f"http.{LISTENER}.downstream_rq_total", f"http.{LISTENER}.downstream_rq_active", "server.uptime"
    counted, read_s = admin.stats(*names), time.monotonic()
    total, active, age = (counted[name] for name in names)
    return total - active, read_s - age


def configured_shares(admin: Admin) -> Shares:
    """Return the shares that the split has whenever it starts. Raises SplitterError."""
    with admin.reading("/config_dump", "configuration") as document:
        for table in _tables(document):
            if clusters := table.get("weighted_clusters", {}).get("clusters"):
                policies = table.get("request_mirror_policies", [])
                return Shares(
                    weights={row["name"]: int(row.get("weight", 0)) for row in clusters},
                    shadows={row["cluster"]: _percent(row["runtime_fraction"]["default_value"]) for row in policies},
                )
    raise SplitterError(f"{admin.address} is an Envoy but splits nothing by weight: give the admin port of a split")


def live_shares(admin: Admin) -> Shares:
    """Return the shares in force. Raises SplitterError."""
    known = configured_shares(admin)
    with admin.reading("/runtime", "shares of arms") as document:
        entries = document.get("entries", {})
        live = {key: entry["final_value"] for key, entry in entries.items() if entry.get("final_value")}
        weights = {arm: int(live.get(f"{WEIGHT_KEYS}.{arm}", weight)) for arm, weight in known.weights.items()}
        shadows = {arm: known.shadows.get(arm, 0.0) for arm in weights}
        shadows |= {arm: _percent(json.loads(live[key])) for arm in weights if (key := f"{SHADOW_KEYS}.{arm}") in live}
        return Shares(weights=weights, shadows={arm: percent for arm, percent in shadows.items() if percent})


def _percent(share: Mapping[str, Any] | float) -> float:
    """Return the percentage of a share: tailgate's fraction of a million, or a whole percentage set by hand."""
    return min(float(share), 100.0) if isinstance(share, (int, float)) else share.get("numerator", 0) / 10_000


def reweight(admin: Admin, weights: Mapping[str, int], shadows: Mapping[str, float] | None = None) -> Shares:
    """Have new requests follow `weights`, and be copied to the arms of `shadows` (percentages; 0 ends the copies).

    All of it changes in one step; streams in flight stay, and so do arms that are not named. Fewest sessions change
    their arm at a constant sum of weights. Returns the shares from now on. Raises ConfigError or SplitterError.
    """
    current = live_shares(admin)
    new = Shares(weights={**current.weights, **weights}, shadows={**current.shadows, **(shadows or {})})
    for name in (*new.weights, *new.shadows):
        if name not in current.weights:
            known = ", ".join(current.weights)
            raise ConfigError(f'arm "{name}" is unknown to the split at {admin.address}: use one of {known}')
        check_weight(name, new.weights[name])
        check_shadow(name, new.shadows.get(name, 0.0), new.weights[name])
    if not any(new.weights.values()):
        raise ConfigError("every arm would have weight 0: give at least one arm a weight of 1 or more")
    # One request for all of them, so that no call is routed by half of the change.
    changes = {f"{WEIGHT_KEYS}.{name}": str(weight) for name, weight in new.weights.items()}
    for name, percent in new.shadows.items():
        # Without spaces, which Envoy would read as "+".
        changes[f"{SHADOW_KEYS}.{name}"] = json.dumps(fraction(percent), separators=(",", ":"))
    admin.answer("POST", f"/runtime_modify?{urllib.parse.urlencode(changes)}")
    return Shares(weights=new.weights, shadows={arm: percent for arm, percent in new.shadows.items() if percent})


def _tables(document: Iterable[Any]) -> Iterator[dict[str, Any]]:
    if isinstance(document, dict):
        yield document
        document = document.values()
    elif not isinstance(document, list):
        return
    for item in document:
        yield from _tables(item)
