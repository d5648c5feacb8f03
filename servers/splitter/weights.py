"""Live shares: what part of the traffic each arm of a running split has or gets copies of, and how it changes."""

from __future__ import annotations

import contextlib
import json
import urllib.parse
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from servers.fields import ConfigError
from servers.splitter.admin import Admin, SplitterError
from servers.splitter.bootstrap import SHADOW_KEYS, WEIGHT_KEYS
from servers.splitter.envoy_config import check_shadow, check_weight, per_million


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """The weight of every arm, and the percentage of requests that each shadow gets copies of."""

    weights: dict[str, int]
    shadows: dict[str, float]


def live_shares(admin: Admin) -> Shares:
    """The shares in force. Raises SplitterError when no split answers."""
    route = _route(admin)
    with admin.answering("shares of arms"):
        weights = _weights(route)
        fractions = [policy["runtime_fraction"] for policy in route.get("request_mirror_policies", [])]
        shadows = {
            fraction["runtime_key"].removeprefix(f"{SHADOW_KEYS}."): _percent("", fraction["default_value"])
            for fraction in fractions
        }
    return shares_since(admin, Shares(weights=weights, shadows=shadows))


def shares_since(admin: Admin, configured: Shares) -> Shares:
    """The shares in force at a split that was started with `configured`: 0.4 ms, where `live_shares` takes 25.

    Raises SplitterError when no split answers.
    """
    text = admin.get("/runtime")
    with admin.answering("shares of arms"):
        entries = json.loads(text).get("entries", {})

        def live(key: str, name: str) -> str:
            return str(entries.get(f"{key}.{name}", {}).get("final_value", ""))

        weights = {name: int(live(WEIGHT_KEYS, name) or weight) for name, weight in configured.weights.items()}
        shadows = {
            name: percent
            for name in weights
            if (percent := _percent(live(SHADOW_KEYS, name), configured.shadows.get(name, 0.0)))
        }
    return Shares(weights=weights, shadows=shadows)


def live_weights(admin: Admin) -> dict[str, int]:
    """The weight of every arm, as it is in force. Raises SplitterError when no split answers."""
    return live_shares(admin).weights


def configured_weights(admin: Admin) -> dict[str, int]:
    """The weights that the split behind `admin` has when it starts anew. Raises SplitterError when none answers."""
    route = _route(admin)
    with admin.answering("weights of arms"):
        return _weights(route)


def started_s_ago(admin: Admin) -> float:
    """How long ago it started, in whole seconds. Raises SplitterError when no split answers."""
    text = admin.get("/server_info")
    with admin.answering("time of its start"):
        return float(json.loads(text)["uptime_current_epoch"].removesuffix("s"))


def reweight(admin: Admin, weights: Mapping[str, int]) -> dict[str, int]:
    """New requests follow `weights`; streams in flight are not touched. Returns the weight of every arm from now on.

    Arms that are not named keep theirs. Raises as `reshare` does.
    """
    return reshare(admin, weights=weights).weights


def reshare(
    admin: Admin, *, weights: Mapping[str, int] | None = None, shadows: Mapping[str, float] | None = None
) -> Shares:
    """New requests follow `weights`, and are copied to the arms of `shadows` (percentages; 0 ends the copies).

    All of it changes in one step; streams in flight are not touched, copies neither. Arms that are not named keep
    theirs. The fewest sessions change their arm when the sum of all weights stays the same. Returns the shares from
    now on. Raises ConfigError for an unknown arm, a bad weight or percentage, an arm that would have both or nothing
    but zeros, and SplitterError when no split answers.
    """
    merged = shares_after(admin, weights=weights, shadows=shadows)
    changes = {f"{WEIGHT_KEYS}.{name}": str(weight) for name, weight in merged.weights.items()}
    for name, percent in merged.shadows.items():
        fraction = {"numerator": per_million(percent), "denominator": "MILLION"}
        changes[f"{SHADOW_KEYS}.{name}"] = json.dumps(fraction, separators=(",", ":"))
    # One request for all of them, so that no call is routed by half of the change.
    admin.post(f"/runtime_modify?{urllib.parse.urlencode(changes)}")
    return Shares(
        weights=merged.weights, shadows={name: percent for name, percent in merged.shadows.items() if percent}
    )


def shares_after(
    admin: Admin, *, weights: Mapping[str, int] | None = None, shadows: Mapping[str, float] | None = None
) -> Shares:
    """The shares that `reshare` would put in force, with those of shadows that end as 0. Raises as it does."""
    weights, shadows = weights or {}, shadows or {}
    current = live_shares(admin)
    _check_known([*weights, *shadows], current.weights, admin)
    for name, weight in weights.items():
        check_weight(name, weight)
    merged = Shares(weights={**current.weights, **weights}, shadows={**current.shadows, **shadows})
    if not any(merged.weights.values()):
        raise ConfigError("every arm would have weight 0: give at least one arm a weight of 1 or more")
    for name, percent in merged.shadows.items():
        check_shadow(name, percent, merged.weights[name])
    return merged


def _check_known(names: Iterable[str], arms: Mapping[str, int], admin: Admin) -> None:
    for name in names:
        if name not in arms:
            raise ConfigError(f'arm "{name}" is unknown to the split at {admin.address}: use one of {", ".join(arms)}')


def _percent(live: str, configured: Mapping[str, Any] | float) -> float:
    """The percentage of requests that Envoy copies: of the fraction that is live, otherwise the configured one.

    A live one is JSON, or the whole percentage that a person may have set by hand.
    """
    fraction = configured
    with contextlib.suppress(ValueError):
        document = json.loads(live)
        if isinstance(document, (int, float)):
            return float(min(int(document), 100))
        fraction = document
    if isinstance(fraction, (int, float)):
        return float(fraction)
    whole = {"HUNDRED": 100, "TEN_THOUSAND": 10_000, "MILLION": 1_000_000}[fraction.get("denominator", "HUNDRED")]
    percent: float = fraction.get("numerator", 0) * 100 / whole
    return percent


def _route(admin: Admin) -> Mapping[str, Any]:
    text = admin.get("/config_dump")
    with admin.answering("configuration"):
        route = _weighted_route(json.loads(text))
    if route is None:
        raise SplitterError(f"{admin.address} is an Envoy but splits nothing by weight: give the admin port of a split")
    return route


def _weights(route: Mapping[str, Any]) -> dict[str, int]:
    return {item["name"]: int(item.get("weight", 0)) for item in route["weighted_clusters"]["clusters"]}


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
