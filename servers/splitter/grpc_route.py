"""The GRPCRoute of a Kubernetes gateway that states a split. Pure."""

from __future__ import annotations

import re
from typing import Any, Final

from servers.complaint import ConfigError
from servers.metadata import ARM_HEADER
from servers.splitter.envoy_config import SplitterConfig, fraction

GROUP: Final = "gateway.networking.k8s.io"
_PORT: Final = 50051  # of every Service


def grpc_route_manifest(config: SplitterConfig) -> dict[str, Any]:
    """Return the Gateway API GRPCRoute (JSON-ready) with the same pins, refusal, weights and shadows.

    Arm "x" is the Service `service_name("x")`. Stickiness, health checks and the response header that names the arm are
    not portable in a GRPCRoute and left out. A shadow needs Gateway API 1.3 or newer. Raises ConfigError when
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
    for shadow, percent in config.shadows.items():
        mirror = {"backendRef": backend(shadow), "fraction": {**fraction(percent), "denominator": 1_000_000}}
        weighted.setdefault("filters", []).append({"type": "RequestMirror", "requestMirror": mirror})
    return {
        "apiVersion": f"{GROUP}/v1",
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


def service_name(arm: str) -> str:
    """Return the Service of an arm: "tailgate-" and the name in lower case, with "-" for what DNS does not take."""
    return "tailgate-" + re.sub(r"[^a-z0-9-]", "-", arm.lower()).strip("-")
