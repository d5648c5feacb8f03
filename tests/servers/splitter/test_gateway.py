"""Weights of a GRPCRoute: the patch, and the client that applies it to an API server over real HTTP and TLS."""

from __future__ import annotations

import copy
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from servers.fields import ConfigError
from servers.splitter.admin import SplitterError
from servers.splitter.envoy_config import ArmTarget, SplitterConfig
from servers.splitter.gateway import ApiServer, Gateway, RouteState, in_cluster
from servers.splitter.kubernetes import arm_weights, grpc_route_manifest, route_weights, weights_patch
from tests.fakes.certificates import Certificates, make_certificates
from tests.fakes.kubernetes_api import FakeCluster, served

ROOT = Path(__file__).parents[3]
ARMS = ("eager", "Compiled_2.13")


def manifest(weights: tuple[int, int] = (90, 10), shadow: float = 0.0) -> dict[str, Any]:
    """The route that tailgate prints, as a cluster holds it."""
    arms = tuple(
        ArmTarget(name=name, backends=("h:1",), weight=weight, shadow_percent=shadow if not weight else 0.0)
        for name, weight in zip(ARMS, weights, strict=True)
    )
    route = copy.deepcopy(grpc_route_manifest(SplitterConfig(arms=arms)))
    route["metadata"]["resourceVersion"] = "100"
    return route


# --- The patch --------------------------------------------------------------------------------------------------------


def test_a_patch_sets_the_weights_of_the_named_arms_and_holds_the_version() -> None:
    assert weights_patch(manifest(), {"Compiled_2.13": 25}) == [
        {"op": "replace", "path": "/metadata/resourceVersion", "value": "100"},
        {"op": "add", "path": "/spec/rules/3/backendRefs/1/weight", "value": 25},
    ]
    both = weights_patch(manifest(), {"Compiled_2.13": 1, "eager": 3})
    assert [(item["path"], item["value"]) for item in both[1:]] == [
        ("/spec/rules/3/backendRefs/0/weight", 3),
        ("/spec/rules/3/backendRefs/1/weight", 1),
    ]


def test_every_rule_that_splits_is_patched_and_services_may_bear_the_arms_names() -> None:
    route = manifest()
    backends = [{"name": "eager", "port": 1}, {"name": "other", "port": 1, "weight": 4}]
    split = {"matches": [{"method": {"service": "a"}}], "backendRefs": backends}
    route["spec"]["rules"] = [split, {"backendRefs": [{"name": "eager", "port": 1}]}, copy.deepcopy(split)]
    assert route_weights(route) == {"eager": 1, "other": 4}  # 1 is what a weight is that is not given
    assert arm_weights(route, ["other"]) == {"other": 4}
    assert [item["path"] for item in weights_patch(route, {"eager": 0})[1:]] == [
        "/spec/rules/0/backendRefs/0/weight",
        "/spec/rules/2/backendRefs/0/weight",
    ]


def test_a_patch_that_cannot_be_is_refused_in_one_line() -> None:
    one = manifest()
    one["spec"]["rules"].pop()
    uneven = manifest()
    uneven["spec"]["rules"].append({"backendRefs": [{"name": "tailgate-eager", "weight": 1}, {"name": "b"}]})
    percent = manifest((1, 0), shadow=5)
    percent["spec"]["rules"][-1]["filters"][0]["requestMirror"] |= {"percent": 5}
    del percent["spec"]["rules"][-1]["filters"][0]["requestMirror"]["fraction"]
    for route, weights, message in (
        (
            manifest(),
            {"eagre": 1},
            'arm "eagre" has no Service tailgate-eagre among the weighted backends of GRPCRoute',
        ),
        (manifest(), {"eager": -1}, 'weight of arm "eager" is -1: give a whole number from 0'),
        (manifest(), {"eager": 0, "Compiled_2.13": 0}, "every arm would have weight 0: give at least one"),
        (manifest((1, 0), shadow=25), {"Compiled_2.13": 1}, 'arm "tailgate-compiled-2-13" gets copies of 25 % of the'),
        (manifest((1, 0), shadow=100), {"Compiled_2.13": 1}, 'arm "tailgate-compiled-2-13" gets copies of 100 % of'),
        (percent, {"Compiled_2.13": 1}, 'arm "tailgate-compiled-2-13" gets copies of 5 % of the requests'),
        (one, {"eager": 1}, 'GRPCRoute "tailgate" has no rule with several backends: give it one rule'),
        (uneven, {"eager": 1}, 'GRPCRoute "tailgate" gives tailgate-eager weight 90 in one rule and 1 in another'),
    ):
        with pytest.raises(ConfigError) as refusal:
            weights_patch(route, weights)
        assert str(refusal.value).startswith(message)
        assert "\n" not in str(refusal.value)


# --- The API server ---------------------------------------------------------------------------------------------------


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster(manifest())


@pytest.fixture
def gateway(cluster: FakeCluster) -> Iterator[Gateway]:
    """As through `kubectl proxy`."""
    with served(cluster) as port:
        api = ApiServer(host="127.0.0.1", port=port)
        yield Gateway(api=api, namespace="models", route="tailgate", arms=ARMS)


def test_new_weights_are_set_and_read_back(cluster: FakeCluster, gateway: Gateway) -> None:
    assert gateway.state() == RouteState(
        resource_version="100", weights={"eager": 90, "Compiled_2.13": 10}, in_force=False
    )
    state = gateway.reweight({"eager": 50, "Compiled_2.13": 50})
    assert state == RouteState(resource_version="107", weights={"eager": 50, "Compiled_2.13": 50}, in_force=False)
    pins = manifest()["spec"]["rules"][:-1]
    assert cluster.route["spec"]["rules"][:-1] == pins
    cluster.accept()
    assert gateway.state().in_force
    # A gateway that has taken an earlier change has not taken this one.
    assert not gateway.reweight({"eager": 0}).in_force
    assert gateway.state().weights == {"eager": 0, "Compiled_2.13": 50}


def test_a_change_of_somebody_else_is_kept_and_the_weights_follow(cluster: FakeCluster, gateway: Gateway) -> None:
    def label(route: dict[str, Any]) -> None:
        cluster.interfere = None
        cluster.change(lambda route: route["metadata"].update(labels={"team": "models"}))

    cluster.interfere = label
    assert gateway.reweight({"eager": 70}).weights == {"eager": 70, "Compiled_2.13": 10}
    assert cluster.route["metadata"]["labels"] == {"team": "models"}
    assert [status for _, status in cluster.requests] == [200, 409, 200, 200]


@pytest.mark.parametrize("added", [0, 1])
def test_rules_that_move_in_between_are_a_conflict_too(cluster: FakeCluster, gateway: Gateway, added: int) -> None:
    web = {"backendRefs": [{"name": "web", "port": 1}]}

    def move(route: dict[str, Any]) -> None:
        cluster.interfere = None
        cluster.change(lambda route: route["spec"].update(rules=[web] * added + route["spec"]["rules"][1 - added :]))

    cluster.interfere = move
    assert gateway.reweight({"eager": 70}).weights["eager"] == 70
    assert [status for _, status in cluster.requests] == [200, 422, 200, 200]
    assert route_weights(cluster.route) == {"tailgate-eager": 70, "tailgate-compiled-2-13": 10}


def test_two_who_set_weights_are_told_of_each_other(cluster: FakeCluster, gateway: Gateway) -> None:
    def reweight(route: dict[str, Any]) -> None:
        cluster.change(lambda route: route["spec"]["rules"][-1]["backendRefs"][0].update(weight=33))

    cluster.interfere = reweight
    with pytest.raises(SplitterError, match=r"^somebody else changed the weights of GRPCRoute .*from .*=90 .*=33 "):
        gateway.reweight({"eager": 70})
    assert route_weights(cluster.route)["tailgate-eager"] == 33


def test_a_route_that_others_never_stop_changing_is_given_up(cluster: FakeCluster, gateway: Gateway) -> None:
    cluster.interfere = lambda _: cluster.change(lambda route: route["metadata"].update(labels={}))
    with pytest.raises(SplitterError, match="was changed by others 5 times in a row: see who writes to it"):
        gateway.reweight({"eager": 70})


def test_weights_that_the_cluster_does_not_keep_are_an_error(cluster: FakeCluster, gateway: Gateway) -> None:
    cluster.admit = lambda route: route["spec"]["rules"][-1]["backendRefs"][0].update(weight=90)
    with pytest.raises(SplitterError, match="has eager=90 after eager=70 was set: something in the cluster changes it"):
        gateway.reweight({"eager": 70})


def test_a_patch_that_the_api_server_refuses_is_not_tried_again(cluster: FakeCluster, gateway: Gateway) -> None:
    cluster.refusal = "no changes\non Fridays"
    with pytest.raises(SplitterError, match=r"answered 422 to PATCH of GRPCRoute .*\(no changes on Fridays\): see the"):
        gateway.reweight({"eager": 70})
    assert [method for method, _ in cluster.requests] == ["GET", "PATCH", "GET"]


def pod(folder: Path, pem: Certificates, port: int, token: str) -> tuple[dict[str, str], Path]:
    """What a pod's process sees: its environment and the folder of its service account."""
    (folder / "ca.crt").write_text(Path(pem.ca).read_text())
    (folder / "token").write_text(token + "\n")
    (folder / "namespace").write_text("models")
    return {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(port)}, folder


def test_a_pod_with_the_deployed_role_moves_the_weights_by_tls(tmp_path: Path) -> None:
    pem = make_certificates(tmp_path)
    documents = list(yaml.safe_load_all((ROOT / "deploy/kubernetes/ramp/rbac.yaml").read_text()))
    (role,) = (item for item in documents if item["kind"] == "Role")
    cluster = FakeCluster(manifest(), token="first", rules=role["rules"])
    with served(cluster, pem) as port:
        api, namespace = in_cluster(*pod(tmp_path, pem, port, "first"))
        gateway = Gateway(api=api, namespace=namespace, route="tailgate", arms=ARMS)
        assert gateway.reweight({"eager": 5}).weights["eager"] == 5
        # Kubernetes gives a pod a new token in the same file, and takes back the old one.
        cluster.token = "second"
        with pytest.raises(SplitterError, match=r"answered 401 to GET of GRPCRoute.*is the service account's token"):
            gateway.state()
        (tmp_path / "token").write_text("second")
        assert gateway.state().weights["eager"] == 5
        # That route alone.
        other = Gateway(api=api, namespace=namespace, route="other", arms=ARMS)
        with pytest.raises(SplitterError, match=r'answered 403 to GET of GRPCRoute "other" .*ramp/rbac\.yaml') as no:
            other.state()
        assert "\n" not in str(no.value)


def test_an_api_server_that_may_be_somebody_else_gets_no_token(tmp_path: Path) -> None:
    pem = make_certificates(tmp_path)
    cluster = FakeCluster(manifest(), token="secret")
    token = tmp_path / "token"
    token.write_text("secret")
    with served(cluster, pem) as port:
        api = ApiServer(host="127.0.0.1", port=port, ca=pem.other_ca, token=str(token))
        with pytest.raises(SplitterError, match=r"does not answer \(.*certificate verify failed.*is its authority"):
            Gateway(api=api, namespace="models", route="tailgate", arms=ARMS).state()
    assert cluster.requests == []
    with pytest.raises(ConfigError, match="would go out in the clear: name the cluster's authority too"):
        ApiServer(host="127.0.0.1", port=1, token=str(token))
    token.write_text("secret\nother line")
    with pytest.raises(SplitterError, match="holds no token of one line: is it the file of the service account") as no:
        Gateway(
            api=ApiServer(host="127.0.0.1", port=1, ca=pem.ca, token=str(token)),
            namespace="models",
            route="tailgate",
            arms=ARMS,
        ).state()
    assert "secret" not in str(no.value)


def test_what_goes_wrong_is_one_line_with_a_remedy(cluster: FakeCluster, gateway: Gateway) -> None:
    missing = Gateway(api=gateway.api, namespace="elsewhere", route="tailgate", arms=ARMS)
    with pytest.raises(SplitterError, match=r'answered 404 .*"elsewhere" \(.*not found\): does it have that name'):
        missing.state()
    strangers = Gateway(api=gateway.api, namespace="models", route="tailgate", arms=("eager", "other"))
    with pytest.raises(ConfigError, match=r'arm "other" has no Service tailgate-other among .*: use one of'):
        strangers.state()
    cluster.rules = [{"apiGroups": ["gateway.networking.k8s.io"], "resources": ["grpcroutes"], "verbs": ["get"]}]
    with pytest.raises(SplitterError, match=r"answered 403 to PATCH .*: let the service account patch it, as deploy/"):
        gateway.reweight({"eager": 1})
    cluster.rules = None
    cluster.route = {"metadata": {"name": "tailgate"}}
    with pytest.raises(SplitterError, match="answered no GRPCRoute: is it a Kubernetes API"):
        gateway.state()
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(SplitterError, match=rf"^the API server at 127\.0\.0\.1:{port} does not answer"):
        Gateway(api=ApiServer(host="127.0.0.1", port=port), namespace="a", route="b", arms=ARMS).state()


def test_outside_of_a_cluster_is_known(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^KUBERNETES_SERVICE_HOST is not set: run in a pod, or"):
        in_cluster({}, tmp_path)
    environment = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}
    with pytest.raises(ConfigError, match=r"ca\.crt is missing: give the pod a service account"):
        in_cluster(environment, tmp_path)
    for name in ("ca.crt", "token", "namespace"):
        (tmp_path / name).write_text("models\n")
    api, namespace = in_cluster(environment, tmp_path)
    assert (api.address, namespace) == ("[fd00::1]:6443", "models")
    with pytest.raises(ConfigError, match='"fd00::1" and port "https" are no address'):
        in_cluster({**environment, "KUBERNETES_SERVICE_PORT_HTTPS": "https"}, tmp_path)
