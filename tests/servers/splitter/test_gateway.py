"""Weights of a GRPCRoute: the patch, and the client that applies it to an API server over real HTTP and TLS."""

from __future__ import annotations

import copy
import json
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from servers.config import ArmConfig
from servers.fields import ConfigError
from servers.splitter.access_log import log_path
from servers.splitter.admin import Admin, SplitterError
from servers.splitter.envoy_config import ArmTarget, SplitterConfig
from servers.splitter.gateway import ApiServer, Gateway, RouteState, in_cluster
from servers.splitter.kubernetes import grpc_route_manifest, route_weights, service_name, weights_patch
from servers.splitter.replicas import replica_addresses
from servers.splitter.weights import (
    Shares,
    configured_weights,
    live_shares,
    live_weights,
    reshare,
    reweight,
    started_s_ago,
)
from tests.fakes.certificates import Certificates, make_certificates
from tests.fakes.kubernetes_api import FakeCluster, served
from tests.fakes.patience import PATIENCE_S
from tests.servers.splitter.house import Build, House, binomial_bound

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


def test_two_who_set_weights_are_told_of_each_other(cluster: FakeCluster, gateway: Gateway) -> None:
    def reweight(route: dict[str, Any]) -> None:
        cluster.change(lambda route: route["spec"]["rules"][-1]["backendRefs"][0].update(weight=33))

    cluster.interfere = reweight
    with pytest.raises(SplitterError, match=r"^somebody else changed the weights of GRPCRoute .*from .*=90 .*=33 "):
        gateway.reweight({"eager": 70})
    assert route_weights(cluster.route)["tailgate-eager"] == 33


def test_weights_that_the_cluster_does_not_keep_are_an_error(cluster: FakeCluster, gateway: Gateway) -> None:
    cluster.admit = lambda route: route["spec"]["rules"][-1]["backendRefs"][0].update(weight=90)
    with pytest.raises(SplitterError, match="has eager=90 after eager=70 was set: something in the cluster changes it"):
        gateway.reweight({"eager": 70})


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


def test_reweighting_drops_no_stream_and_new_requests_follow(build: Build) -> None:
    house = build({"eager": 1, "compiled": 1})
    held = house.hold(50)
    for eager, compiled in ((1, 0), (0, 1), (9, 1), (0, 7), (1, 1)):
        reweight(house.envoy.admin, {"eager": eager, "compiled": compiled})
        assert live_weights(house.envoy.admin) == {"eager": eager, "compiled": compiled}
        counts = Counter(answer.arm for answer in house.ask(*[{}] * 200))
        share = eager / (eager + compiled)
        assert counts.total() == 200
        assert abs(counts["eager"] - 200 * share) <= binomial_bound(200, share)
    assert not held.done()
    house.release()
    answers = held.result(PATIENCE_S)
    assert [answer.code for answer in answers] == [grpc.StatusCode.OK] * 50
    assert [answer.tokens for answer in answers] == [3] * 50


def test_arms_that_are_not_named_keep_their_weight(shared: House) -> None:
    reweight(shared.envoy.admin, {"idle.arm": 4})
    try:
        assert reweight(shared.envoy.admin, {}) == {"eager": 3, "compiled-padded": 1, "idle.arm": 4}
        assert Counter(answer.arm for answer in shared.ask(*[{}] * 100))["idle.arm"] > 0
    finally:
        reweight(shared.envoy.admin, {"idle.arm": 0})


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"eagre": 1}, 'arm "eagre" is unknown to the split at \\S+: use one of eager, compiled-padded, idle.arm'),
        ({"eager": -1}, 'weight of arm "eager" is -1: give a whole number from 0 to 1000000'),
        (
            {"eager": 0, "compiled-padded": 0},
            "every arm would have weight 0: give at least one arm a weight of 1 or more",
        ),
    ],
)
def test_bad_weights_change_nothing(shared: House, weights: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}$"):
        reweight(shared.envoy.admin, weights)
    assert live_weights(shared.envoy.admin) == {"eager": 3, "compiled-padded": 1, "idle.arm": 0}


def copied(house: House, count: int) -> int:
    """How many of `count` requests reach the shadow "dark"."""
    eager = house.replicas["eager"][0]
    eager_before, copies_before = eager.calls, house.copies("dark")
    assert Counter(answer.arm for answer in house.ask(*[{}] * count)) == {"eager": count}
    assert eager.calls == eager_before + count
    return house.copies("dark") - copies_before


@pytest.mark.process
def test_copies_follow_a_new_share_and_end_with_zero(build: Build) -> None:
    house = build({"eager": 1, "dark": 1}, weights={"eager": 1, "dark": 0})
    admin = house.envoy.admin
    assert live_shares(admin) == Shares(weights={"eager": 1, "dark": 0}, shadows={})
    assert copied(house, 50) == 0
    assert reshare(admin, shadows={"dark": 100}).shadows == {"dark": 100}
    for percent in (100.0, 50.0, 12.3456):
        assert reshare(admin, shadows={"dark": percent}).shadows == {"dark": percent}
        assert live_shares(admin).shadows == {"dark": percent}
        assert abs(copied(house, 400) - 4 * percent) <= binomial_bound(400, percent / 100)
    assert reshare(admin, shadows={"dark": 0}).shadows == {}
    assert live_shares(admin).shadows == {}
    assert copied(house, 50) == 0


@pytest.mark.parametrize(
    ("shadows", "message"),
    [
        ({"drak": 5.0}, 'arm "drak" is unknown to the split at \\S+: use one of eager, compiled-padded, idle.arm'),
        ({"idle.arm": 250.0}, 'shadow of arm "idle.arm" is 250 %: give 0 %, or from 0.0001 % to 100 %'),
    ],
)
def test_a_bad_shadow_changes_nothing(shared: House, shadows: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}$"):
        reshare(shared.envoy.admin, shadows=shadows)
    assert live_shares(shared.envoy.admin).shadows == {}


class Saying(Admin):
    """An admin port that answers every question with one body."""

    body = ""

    def fetch(self, method: str, path: str) -> tuple[int, str]:
        return 200, self.body


@pytest.mark.parametrize("question", [live_shares, configured_weights, started_s_ago, replica_addresses, log_path])
@pytest.mark.parametrize(
    "body",
    [
        "",
        "[" * 5000,
        "1" * 5000,
        json.dumps(
            {
                "weighted_clusters": {"clusters": [{"name": "eager", "weight": float("inf")}]},
                "uptime_current_epoch": 5,
                "cluster_statuses": [5],
                "log_format": {"json_format": 5},
            }
        ),
    ],
)
def test_an_answer_of_something_else_is_one_line(question: Callable[[Admin], object], body: str) -> None:
    admin = Saying("127.0.0.1:9901")
    object.__setattr__(admin, "body", body)
    with pytest.raises(SplitterError, match=r"^127\.0\.0\.1:9901 answered no .*: is it a split's admin port\?$"):
        question(admin)


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
