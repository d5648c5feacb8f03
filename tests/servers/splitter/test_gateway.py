"""The weights of a route, and the client that sets them over real HTTP and TLS."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes.config import incluster_config

from tailgate.servers.complaint import ConfigError
from tailgate.servers.config import ArmConfig
from tailgate.servers.metadata import ARM_HEADER
from tailgate.servers.splitter import kubernetes
from tailgate.servers.splitter.admin import Shares, SplitterError
from tailgate.servers.splitter.kubernetes import Gateway, route_weights, weights_patch
from tests.fakes.credentials import make_certificates
from tests.fakes.kubernetes import FakeCluster, route_of, served
from tests.servers.test_config import arm_from, refusal

ROOT = Path(__file__).parents[3]
ARMS = ("eager", "Compiled_2.13")


def manifest() -> dict[str, Any]:
    """The route as a cluster holds it."""
    route = route_of(dict(zip(ARMS, (90, 10), strict=True)))
    route["metadata"]["resourceVersion"] = "100"
    return route


def deployed(kind: str) -> dict[str, dict[str, Any]]:
    documents = [
        document
        for path in sorted((ROOT / "deploy/kubernetes").glob("*.yaml"))
        for document in yaml.safe_load_all(path.read_text())
    ]
    return {document["metadata"]["name"]: document for document in documents if document["kind"] == kind}


def test_the_deployed_route_pins_and_splits_over_its_services_and_arms() -> None:
    route = deployed("GRPCRoute")["tailgate"]
    *pinned, unknown, weighted = route["spec"]["rules"]
    assert [*pinned, weighted] == route_of({"eager": 50, "compiled-padded": 50})["spec"]["rules"]
    assert unknown == {"matches": [{"headers": [{"type": "RegularExpression", "name": ARM_HEADER, "value": ".+"}]}]}
    services, deployments = deployed("Service"), deployed("Deployment")
    for backend in route["spec"]["rules"][-1]["backendRefs"]:
        service = services[backend["name"]]["spec"]
        pod = deployments[backend["name"]]["spec"]["template"]
        assert service["selector"].items() <= pod["metadata"]["labels"].items()
        assert [port["port"] for port in service["ports"]] == [backend["port"]]
        assert backend["port"] in [port["containerPort"] for port in pod["spec"]["containers"][0]["ports"]]
    tables = [json.loads(text) for text in deployed("ConfigMap")["tailgate-arms"]["data"].values()]
    arms = [ArmConfig.from_dict(table) for table in tables]
    assert [arm.name for arm in arms] == ["eager", "compiled-padded"]
    for arm in arms:
        assert arm == arm_from(arm.preset, model=arms[0].model, engine=arms[0].engine)


def test_a_patch_sets_the_weights_of_the_named_arms_in_every_rule_and_holds_the_version() -> None:
    route = manifest()
    backends = [{"name": "eager", "port": 1}, {"name": "other", "port": 1, "weight": 4}]
    split = {"matches": [{"method": {"service": "a"}}], "backendRefs": backends}
    route["spec"]["rules"] = [split, {"backendRefs": [{"name": "eager", "port": 1}]}, copy.deepcopy(split)]
    assert route_weights(route) == {"eager": 1, "other": 4}  # 1 is the default of a weight
    patch = weights_patch(route, {"eager": 0})
    assert patch["metadata"] == {"resourceVersion": "100"}
    for number in (0, 2):
        del patch["spec"]["rules"][number]["backendRefs"][0]["weight"]
    assert patch["spec"]["rules"] == route["spec"]["rules"]


def with_rules(change: Any) -> dict[str, Any]:
    route = manifest()
    change(route["spec"]["rules"])
    return route


UNEVEN = {"backendRefs": [{"name": "tailgate-eager", "weight": 1}, {"name": "b"}]}


@pytest.mark.parametrize(
    ("route", "weights", "words"),
    [
        (manifest(), {"eagre": 1}, ('"eagre"', "tailgate-eagre", "tailgate-compiled-2-13")),
        (manifest(), {"eager": -1}, ('"eager"', "-1")),
        (manifest(), {"eager": 0, "Compiled_2.13": 0}, ("weight 0",)),
        (with_rules(lambda rules: rules.pop()), {"eager": 1}, ('"tailgate"', "no rule")),
        (with_rules(lambda rules: rules.append(UNEVEN)), {"eager": 1}, ("tailgate-eager", "90", "1 in another")),
    ],
)
def test_an_impossible_patch_is_refused(route: Any, weights: dict[str, int], words: tuple[str, ...]) -> None:
    refusal(weights_patch, route, weights, words=words)


def gateway_to(port: int, **fields: Any) -> Gateway:
    return Gateway(**{"namespace": "models", "route": "tailgate", "arms": ARMS, "proxy": f"127.0.0.1:{port}", **fields})


def test_new_weights_are_set_and_read_back_also_among_other_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes, "_IN_FORCE_S", 0.3)
    cluster = FakeCluster(manifest())
    with served(cluster) as port:
        gateway = gateway_to(port)
        cluster.accept()
        gateway.reweight({"eager": 50, "Compiled_2.13": 50})
        assert cluster.requests[-1][0] == "GET", "no gateway has accepted this generation"
        assert gateway.shares() == Shares(weights={"eager": 50, "Compiled_2.13": 50}, shadows={})
        assert cluster.route["spec"]["rules"][:-1] == manifest()["spec"]["rules"][:-1]
        cluster.interfere = lambda _: cluster.change(lambda route: route["metadata"].update(labels={}))
        with pytest.raises(SplitterError, match="409"):
            gateway.reweight({"eager": 70})
        cluster.interfere = None
        gateway.reweight({"eager": 70})
        assert gateway.shares().weights == {"eager": 70, "Compiled_2.13": 50}
        assert cluster.route["metadata"]["labels"] == {}


READ_ONLY = [{"apiGroups": ["gateway.networking.k8s.io"], "resources": ["grpcroutes"], "verbs": ["get"]}]


@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        ({"refusal": "no changes\non Fridays"}, r"422 .*no changes.*on Fridays"),
        ({"namespace": "elsewhere"}, r'404 .*"models"'),
        ({"rules": READ_ONLY}, "403 .*rbac.yaml"),
        ({"route": {"metadata": {"name": "tailgate"}}}, "no route"),
    ],
)
def test_weights_that_cannot_be_set_are_an_error(trouble: dict[str, Any], words: str) -> None:
    cluster = FakeCluster(manifest())
    for name, value in trouble.items():
        setattr(cluster, name, value)
    with served(cluster) as port:
        gateway = gateway_to(port)
        with pytest.raises(SplitterError, match=words):
            gateway.reweight({"eager": 70})
    with pytest.raises(SplitterError, match=f"127.0.0.1:{port} does not answer"):
        gateway.shares()


def test_a_pod_finds_its_api_server_and_shows_its_token_to_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pem = make_certificates(tmp_path)
    cluster = FakeCluster(manifest(), token="secret")
    with pytest.raises(ConfigError, match="kubectl proxy"):
        gateway_to(0, proxy="")
    (tmp_path / "token").write_text("secret")
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    with served(cluster, pem) as port:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(port))
        for ca, words in ((pem.other_ca, "certificate verify failed"), (pem.ca, "")):
            monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", ca)
            if words:
                with pytest.raises(SplitterError, match=words):
                    gateway_to(0, proxy="").shares()
                assert cluster.requests == []
            else:
                assert gateway_to(0, proxy="").shares().weights["eager"] == 90
