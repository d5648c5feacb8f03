"""The same split for a Kubernetes gateway: a GRPCRoute with pins, the refusal, weights and shadows, and the patch that
changes the weights of one that is there. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from servers.fields import ConfigError
from servers.metadata import ARM_HEADER
from servers.splitter.envoy_config import SplitterConfig, check_shadow, check_weight, per_million

_PORT = 50051  # of every Service


def grpc_route_manifest(config: SplitterConfig) -> dict[str, Any]:
    """The Gateway API GRPCRoute (JSON-ready) with the same pins, refusal, weights and shadows, for an existing gateway.

    Arm "x" is the Service `service_name("x")`. Stickiness, health checks and the response header that names the arm are
    not portable in a GRPCRoute and left out. A shadow's share needs Gateway API 1.3 or newer. Raises ConfigError when
    two arms share a Service name.
    """
    services = [service_name(arm.name) for arm in config.arms]
    for arm, service in zip(config.arms, services, strict=True):
        if services.count(service) > 1:
            raise ConfigError(f'arm "{arm.name}" shares the Service name {service} with another: rename one')

    def backend(arm: str, **weight: int) -> dict[str, Any]:
        return {"name": service_name(arm), "port": _PORT, **weight}

    def match(kind: str, value: str) -> list[dict[str, Any]]:
        return [{"headers": [{"type": kind, "name": ARM_HEADER, "value": value}]}]

    weighted: dict[str, Any] = {"backendRefs": [backend(arm.name, weight=arm.weight) for arm in config.arms]}
    if config.shadows:
        weighted["filters"] = [
            {"type": "RequestMirror", "requestMirror": {"backendRef": backend(arm), **_fraction(percent)}}
            for arm, percent in config.shadows.items()
        ]
    return {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "GRPCRoute",
        "metadata": {"name": "tailgate"},
        "spec": {
            "parentRefs": [{"name": "tailgate"}],
            "rules": [
                *({"matches": match("Exact", arm.name), "backendRefs": [backend(arm.name)]} for arm in config.arms),
                # No backend: the gateway answers UNAVAILABLE to a pin that names no arm. Of rules with one header
                # each the first that matches wins, so the arms stay before it.
                {"matches": match("RegularExpression", ".+")},
                weighted,
            ],
        },
    }


def weights_patch(route: Mapping[str, Any], weights: Mapping[str, int]) -> list[dict[str, Any]]:
    """The JSON patch (RFC 6902) that gives the arms of an existing GRPCRoute these weights, and changes nothing else.

    The rules of an HTTPRoute hold them alike.

    An arm is the Service `service_name(arm)`, or the one of that very name. Weights are set in every rule that has
    several backends, where the arm is one of them; arms that are not named keep theirs. The patch names the
    resourceVersion of `route`, so that the API server refuses it with a conflict once somebody else has changed the
    route. Raises ConfigError for an arm that is not there, a bad weight, an arm that gets copies and would have a
    weight, and a rule that would have nothing but zeros.
    """
    present = route_weights(route)
    for arm, weight in weights.items():
        check_weight(arm, weight)
    named = {_service(arm, present, route): weight for arm, weight in weights.items()}
    patch: list[dict[str, Any]] = [
        {"op": "replace", "path": "/metadata/resourceVersion", "value": route["metadata"]["resourceVersion"]}
    ]
    for number, rule in _weighted_rules(route):
        merged = {item["name"]: named.get(item["name"], item.get("weight", 1)) for item in rule["backendRefs"]}
        if not any(merged.values()):
            raise ConfigError("every arm would have weight 0: give at least one arm a weight of 1 or more")
        for service, percent in _copies(rule).items():
            check_shadow(service, percent, merged.get(service, 0))
        patch += [
            {"op": "add", "path": f"/spec/rules/{number}/backendRefs/{place}/weight", "value": named[item["name"]]}
            for place, item in enumerate(rule["backendRefs"])
            if item["name"] in named
        ]
    return patch


def route_weights(route: Mapping[str, Any]) -> dict[str, int]:
    """The weight of each Service that an existing GRPCRoute or HTTPRoute splits over. Raises ConfigError where it
    splits nothing, or where two of its rules give a Service different weights."""
    name = _named(route)
    weights: dict[str, int] = {}
    for _, rule in _weighted_rules(route):
        for item in rule["backendRefs"]:
            weight = item.get("weight", 1)
            if weights.setdefault(item["name"], weight) != weight:
                raise ConfigError(
                    f"{name} gives {item['name']} weight {weights[item['name']]} in one rule and {weight} "
                    "in another: make them equal"
                )
    if not weights:
        raise ConfigError(f"{name} has no rule with several backends: give it one rule with every arm")
    return weights


def arm_weights(route: Mapping[str, Any], arms: Iterable[str]) -> dict[str, int]:
    """The weight of each of `arms` in an existing GRPCRoute. Raises ConfigError for one that is not there."""
    present = route_weights(route)
    return {arm: present[_service(arm, present, route)] for arm in arms}


def _named(route: Mapping[str, Any]) -> str:
    return f'{route.get("kind", "GRPCRoute")} "{route["metadata"]["name"]}"'


def _weighted_rules(route: Mapping[str, Any]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, rule in enumerate(route["spec"].get("rules", [])):
        if len(rule.get("backendRefs", [])) > 1:
            yield number, rule


def _service(arm: str, present: Mapping[str, int], route: Mapping[str, Any]) -> str:
    for name in (service_name(arm), arm):
        if name in present:
            return name
    raise ConfigError(
        f'arm "{arm}" has no Service {service_name(arm)} among the weighted backends of '
        f"{_named(route)}: use one of {', '.join(present)}"
    )


def _copies(rule: Mapping[str, Any]) -> dict[str, float]:
    """The percentage of requests that each Service gets copies of."""
    copies = {}
    for item in rule.get("filters", []):
        if item["type"] == "RequestMirror":
            mirror = item["requestMirror"]
            fraction = mirror.get("fraction", {"numerator": mirror.get("percent", 100)})
            copies[mirror["backendRef"]["name"]] = 100 * fraction["numerator"] / fraction.get("denominator", 100)
    return copies


def _fraction(percent: float) -> dict[str, Any]:
    # Without a fraction all requests are copied, which gateways understood before there were fractions.
    return {} if percent == 100 else {"fraction": {"numerator": per_million(percent), "denominator": 1_000_000}}


def service_name(arm: str) -> str:
    """The Kubernetes Service of an arm: "tailgate-" and the name in lower case, with "-" for what DNS does not take."""
    return "tailgate-" + re.sub(r"[^a-z0-9-]", "-", arm.lower()).strip("-")
