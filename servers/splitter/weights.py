"""Live weights: what share of the traffic each arm of a running split has, and how it changes."""

from __future__ import annotations

import json
import urllib.parse
from collections.abc import Mapping
from typing import Any

from servers.fields import ConfigError
from servers.splitter.admin import Admin, SplitterError
from servers.splitter.bootstrap import WEIGHT_KEYS
from servers.splitter.envoy_config import check_mirrored, check_weight


def reweight(admin: Admin, weights: Mapping[str, int]) -> dict[str, int]:
    """New requests follow `weights`; streams in flight are not touched. Returns the weight of every arm from now on.

    Arms that are not named keep theirs. The fewest sessions change their arm when the sum of all weights stays the
    same. Raises ConfigError for an unknown arm, a bad weight, a weight for the arm that takes mirrored copies or
    nothing but zeros, and SplitterError when no split answers.
    """
    route = _route(admin)
    current = _weights(admin, route)
    for name, weight in weights.items():
        if name not in current:
            raise ConfigError(
                f'arm "{name}" is unknown to the split at {admin.address}: use one of {", ".join(current)}'
            )
        check_weight(name, weight)
    merged = {**current, **weights}
    if not any(merged.values()):
        raise ConfigError("every arm would have weight 0: give at least one arm a weight of 1 or more")
    for mirror in route.get("request_mirror_policies", []):
        check_mirrored(mirror["cluster"], merged)
    # One request for all of them, so that no call is routed by half of the change.
    query = urllib.parse.urlencode({f"{WEIGHT_KEYS}.{name}": weight for name, weight in merged.items()})
    admin.post(f"/runtime_modify?{query}")
    return merged


def _weights(admin: Admin, route: Mapping[str, Any]) -> dict[str, int]:
    entries = json.loads(admin.get("/runtime")).get("entries", {})
    weights = {}
    for cluster in route["weighted_clusters"]["clusters"]:
        name = cluster["name"]
        live = entries.get(f"{WEIGHT_KEYS}.{name}", {}).get("final_value")
        weights[name] = int(live) if live else int(cluster.get("weight", 0))
    return weights


def _route(admin: Admin) -> Mapping[str, Any]:
    route = _weighted_route(json.loads(admin.get("/config_dump")))
    if route is None:
        raise SplitterError(f"{admin.address} is an Envoy but splits nothing by weight: give the admin port of a split")
    return route


def _weighted_route(document: Any) -> Mapping[str, Any] | None:
    """The first action anywhere in Envoy's dump that chooses an arm by weight."""
    if isinstance(document, dict):
        if document.get("weighted_clusters", {}).get("clusters"):
            return document
        document = list(document.values())
    if isinstance(document, list):
        for item in document:
            if (route := _weighted_route(item)) is not None:
                return route
    return None
