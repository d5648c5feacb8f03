"""The GRPCRoute of a split, and the manifests in deploy/."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from servers.config import ArmConfig
from servers.fields import ConfigError
from servers.splitter.envoy_config import ArmTarget, SplitterConfig
from servers.splitter.kubernetes import grpc_route_manifest, service_name

ROOT = Path(__file__).parents[3]


def two_services(weights: tuple[int, int]) -> SplitterConfig:
    return SplitterConfig(
        arms=tuple(
            ArmTarget(name=name, backends=(f"{service_name(name)}:50051",), weight=weight)
            for name, weight in zip(("eager", "compiled-padded"), weights, strict=True)
        )
    )


def test_gateway_route_says_what_envoy_is_told() -> None:
    rules = grpc_route_manifest(two_services((90, 10)))["spec"]["rules"]
    pins = {rule["matches"][0]["headers"][0]["value"]: rule.get("backendRefs", []) for rule in rules[:-1]}
    assert pins == {
        "eager": [{"name": "tailgate-eager", "port": 50051}],
        "compiled-padded": [{"name": "tailgate-compiled-padded", "port": 50051}],
        ".+": [],
    }
    shares = {backend["name"]: backend["weight"] for backend in rules[-1]["backendRefs"]}
    assert shares == {"tailgate-eager": 90, "tailgate-compiled-padded": 10}


def test_arms_that_share_a_service_name_have_no_gateway_route() -> None:
    arms = tuple(ArmTarget(name=name, backends=("h:1",)) for name in ("a.b", "a-b"))
    with pytest.raises(
        ConfigError, match=r'^arm "a\.b" shares the Service name tailgate-a-b with another: rename one$'
    ):
        grpc_route_manifest(SplitterConfig(arms=arms))


def test_gateway_route_copies_the_same_share_to_each_shadow() -> None:
    shares = {"eager": 0.0, "dark": 12.5, "darker": 100.0}
    arms = tuple(
        ArmTarget(name=name, backends=("h:1",), weight=int(not percent), shadow_percent=percent)
        for name, percent in shares.items()
    )
    *pinned, weighted = grpc_route_manifest(SplitterConfig(arms=arms))["spec"]["rules"]
    assert not any("filters" in rule for rule in pinned)
    assert [backend["weight"] for backend in weighted["backendRefs"]] == [1, 0, 0]
    assert [(item["type"], item["requestMirror"]) for item in weighted["filters"]] == [
        (
            "RequestMirror",
            {
                "backendRef": {"name": "tailgate-dark", "port": 50051},
                "fraction": {"numerator": 125_000, "denominator": 1_000_000},
            },
        ),
        # All of them without a fraction: gateways older than 1.3 know none.
        ("RequestMirror", {"backendRef": {"name": "tailgate-darker", "port": 50051}}),
    ]


def deployed(kind: str) -> dict[str, dict[str, Any]]:
    """The manifests of `kind` in deploy/kubernetes by name."""
    documents = [
        document
        for path in sorted((ROOT / "deploy/kubernetes").glob("*.yaml"))
        for document in yaml.safe_load_all(path.read_text())
    ]
    return {document["metadata"]["name"]: document for document in documents if document["kind"] == kind}


def test_deployed_route_is_the_generated_one_and_finds_its_services() -> None:
    route = deployed("GRPCRoute")["tailgate"]
    assert route == grpc_route_manifest(two_services((50, 50)))
    services = deployed("Service")
    for backend in route["spec"]["rules"][-1]["backendRefs"]:
        service = services[backend["name"]]["spec"]
        pod = deployed("Deployment")[backend["name"]]["spec"]["template"]
        assert service["selector"].items() <= pod["metadata"]["labels"].items()
        assert [port["port"] for port in service["ports"]] == [backend["port"]]
        assert backend["port"] in [port["containerPort"] for port in pod["spec"]["containers"][0]["ports"]]


def test_deployed_arms_are_their_presets_on_one_model() -> None:
    tables = [json.loads(text) for text in deployed("ConfigMap")["tailgate-arms"]["data"].values()]
    arms = [ArmConfig.from_dict(table) for table in tables]
    assert [arm.name for arm in arms] == ["eager", "compiled-padded"]
    for arm in arms:
        assert arm == ArmConfig.from_preset(arm.preset, model=arms[0].model, engine=arms[0].engine)
