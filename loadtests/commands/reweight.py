"""New weights for a split that runs in another process, through Envoy's admin interface."""

from __future__ import annotations

import http.client
import json
import urllib.parse
from collections.abc import Mapping
from typing import Any

from servers.config import ConfigError
from servers.splitter.envoy import MAX_WEIGHT, SplitterError

# The runtime keys that servers/splitter/envoy.py gives to the weighted route.
WEIGHT_KEYS = "tailgate.weight"


def reweight(admin: str, weights: Mapping[str, int]) -> dict[str, int]:
    """New requests follow `weights`; streams in flight are not touched. Returns the weight of every arm from now on.

    `admin` is "host:port". Arms that are not named keep theirs. Raises ConfigError for an unknown arm, a bad weight or
    nothing but zeros, and SplitterError when no split answers.
    """
    host, port = _address(admin)
    current = _current_weights(host, port)
    for name, weight in weights.items():
        if name not in current:
            raise ConfigError(f'arm "{name}" is unknown to the split at {admin}: use one of {", ".join(current)}')
        if weight > MAX_WEIGHT:
            raise ConfigError(f'weight of arm "{name}" is {weight}: give a whole number from 0 to {MAX_WEIGHT}')
    merged = {**current, **weights}
    if not any(merged.values()):
        raise ConfigError("every arm would have weight 0: give at least one arm a weight of 1 or more")
    # One request for all of them, so that no call is routed by half of the change.
    query = urllib.parse.urlencode({f"{WEIGHT_KEYS}.{name}": weight for name, weight in merged.items()})
    _ask(host, port, "POST", f"/runtime_modify?{query}")
    return merged


def _current_weights(host: str, port: int) -> dict[str, int]:
    clusters = _weighted_clusters(json.loads(_ask(host, port, "GET", "/config_dump")))
    if not clusters:
        raise SplitterError(f"{host}:{port} is an Envoy but splits nothing by weight: give the admin port of a split")
    entries = json.loads(_ask(host, port, "GET", "/runtime")).get("entries", {})
    weights = {}
    for cluster in clusters:
        name = cluster["name"]
        live = entries.get(f"{WEIGHT_KEYS}.{name}", {}).get("final_value")
        weights[name] = int(live) if live else int(cluster.get("weight", 0))
    return weights


def _weighted_clusters(document: Any) -> list[dict[str, Any]]:
    """The clusters of the first weighted route anywhere in Envoy's dump, [] if there is none."""
    if isinstance(document, dict):
        route = document.get("weighted_clusters")
        if isinstance(route, dict):
            clusters: list[dict[str, Any]] = route.get("clusters", [])
            return clusters
        document = list(document.values())
    if isinstance(document, list):
        for item in document:
            if found := _weighted_clusters(item):
                return found
    return []


def _ask(host: str, port: int, method: str, path: str) -> str:
    # http.client, not urllib: a proxy from the environment must not stand between this process and Envoy.
    connection = http.client.HTTPConnection(host, port, timeout=10.0)
    what = f"{host}:{port}"
    try:
        connection.request(method, path)
        response = connection.getresponse()
        body = response.read().decode()
    except (OSError, http.client.HTTPException) as error:
        raise SplitterError(f"no split answers at {what} ({error}): give the admin address that it printed") from None
    finally:
        connection.close()
    if response.status != 200:
        raise SplitterError(
            f"{what} answered {response.status} to {path.partition('?')[0]}: is it a split's admin port?"
        )
    return body


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.removeprefix("http://").rstrip("/").rpartition(":")
    if not colon or not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise ConfigError(f'--admin "{text}" is not HOST:PORT: give the admin address that the split printed')
    return host.removeprefix("[").removesuffix("]"), int(port)
