"""What splits users' traffic: which one an experiment names, and a ramp that moves a GRPCRoute with its role."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from analysis.records.weight_journal import read_weights
from loadtests.experiments.users import UsersConfig
from loadtests.trials import ramp_control, splitters
from loadtests.trials.splitters import EnvoySplitter, RouteSplitter, Splitter, splitter_of
from servers.fields import ConfigError
from servers.splitter.envoy_config import ArmTarget, SplitterConfig
from servers.splitter.kubernetes import grpc_route_manifest, route_weights
from tests.fakes.kubernetes_api import FakeCluster, served
from tests.loadtests.trials.test_ramp_control import Ramp

ROOT = Path(__file__).parents[3]
(ROLE,) = (
    document
    for document in yaml.safe_load_all((ROOT / "deploy/kubernetes/ramp/rbac.yaml").read_text())
    if document["kind"] == "Role"
)


@contextmanager
def routed(namespace: str = "models") -> Iterator[tuple[FakeCluster, Splitter]]:
    """A cluster whose route gives everything to "eager", and its splitter; who asks has the rights of rbac.yaml."""
    arms = tuple(ArmTarget(name=name, backends=("h:1",), weight=int(name == "eager")) for name in ("eager", "new"))
    route = copy.deepcopy(grpc_route_manifest(SplitterConfig(arms=arms)))
    cluster = FakeCluster(route, namespace=namespace, rules=ROLE["rules"])
    with served(cluster) as port:
        splitter = splitter_of(UsersConfig(route=f"{namespace}/tailgate", api=f"127.0.0.1:{port}"), ("eager", "new"))
        assert isinstance(splitter, RouteSplitter)
        yield cluster, splitter


def in_route(cluster: FakeCluster) -> dict[str, int]:
    return {name.removeprefix("tailgate-"): weight for name, weight in route_weights(cluster.route).items()}


def test_a_route_is_moved_where_one_is_named_and_else_the_envoy_behind_the_admin_address() -> None:
    assert isinstance(splitter_of(UsersConfig(admin="127.0.0.1:9901"), ("eager", "new")), EnvoySplitter)
    assert splitter_of(UsersConfig(access_log="requests.log"), ("eager", "new")) is None


def test_a_route_outside_of_a_cluster_needs_an_api_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match="run in a pod, or give the address of a `kubectl proxy`"):
        splitter_of(UsersConfig(route="models/tailgate"), ("eager", "new"))


def test_a_ramp_of_a_route_goes_up_and_back_with_every_right_of_the_role_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ramp_control, "_READ_NS", 0)
    with routed() as (cluster, splitter):
        cluster.admit = accepted
        ramp = Ramp(tmp_path, splitter)
        ramp.poll(3)
        assert in_route(cluster) == {"eager": 9900, "new": 100}
        ramp.die()
        ramp.poll()
        assert in_route(cluster) == {"eager": 10_000, "new": 0}
        last = read_weights(tmp_path)[-1]
        assert (last.action, last.done_ns is not None) == ("rollback", True)
        assert {status for _, status in cluster.requests} == {200}, "nothing was forbidden"
        assert {method.lower() for method, _ in cluster.requests} == set(ROLE["rules"][0]["verbs"])


def test_flaggers_http_route_is_read_by_who_may_only_read_it() -> None:
    (canary,) = yaml.safe_load_all((ROOT / "deploy/flagger/canary.yaml").read_text())
    name = canary["metadata"]["name"]
    services = (f"{name}-primary", f"{name}-canary")
    backends = [{"name": services[0], "weight": 95}, {"name": services[1], "weight": 5}]
    route = {
        "kind": "HTTPRoute",
        "metadata": {"name": name},
        "spec": {"rules": [{"matches": [{"path": {"value": "/"}}], "backendRefs": backends}]},
    }
    reads = {"apiGroups": ["gateway.networking.k8s.io"], "resources": ["httproutes"], "verbs": ["get"]}
    cluster = FakeCluster(route, namespace="default", rules=[reads])
    with served(cluster) as port:
        users = UsersConfig(route=f"default/{name}", route_kind="HTTPRoute", api=f"127.0.0.1:{port}", moved_by="others")
        splitter = splitter_of(users, services)
        assert splitter is not None
        assert splitter.weights() == {services[0]: 95, services[1]: 5}
        backends[1] |= {"weight": 50}
        cluster.change(lambda now: now["spec"]["rules"][0].update(backendRefs=backends[:1]))
        with pytest.raises(ConfigError, match='HTTPRoute "tailgate-served" has no rule with several backends'):
            splitter.weights()


def test_weights_of_a_route_that_somebody_else_sets_end_the_ramp_and_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ramp_control, "_READ_NS", 0)
    with routed() as (cluster, splitter):
        cluster.admit = accepted
        ramp = Ramp(tmp_path, splitter)
        ramp.poll()
        cluster.change(lambda route: by_hand(route, 7))
        ramp.poll(2)
        assert ramp.actions == ["start", "set by hand"]
        assert in_route(cluster)["new"] == 7


def test_a_rollback_waits_for_a_route_that_splits_nothing_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ramp_control, "_READ_NS", 0)
    with routed() as (cluster, splitter):
        cluster.admit = accepted
        ramp = Ramp(tmp_path, splitter)
        ramp.poll()
        rules = copy.deepcopy(cluster.route["spec"]["rules"])
        cluster.change(lambda route: route["spec"].update(rules=rules[:1]))
        ramp.poll()
        ramp.die()
        ramp.poll(2)
        assert ramp.actions[-1] == "rollback"
        assert read_weights(tmp_path)[-1].done_ns is None
        cluster.change(lambda route: route["spec"].update(rules=rules))
        ramp.poll()
        assert read_weights(tmp_path)[-1].done_ns is not None
        assert in_route(cluster) == {"eager": 10_000, "new": 0}


def test_a_gateway_that_never_says_that_it_follows_delays_a_rollback_for_a_second_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]
    passing = SimpleNamespace(
        monotonic=lambda: clock[0], sleep=lambda spent_s: clock.__setitem__(0, clock[0] + spent_s)
    )
    monkeypatch.setattr(splitters, "time", passing)
    with routed() as (cluster, splitter):
        splitter.reweight({"eager": 1, "new": 0})
        assert 0 < clock[0] <= 1.01
        assert in_route(cluster) == {"eager": 1, "new": 0}


def accepted(route: dict[str, Any]) -> None:
    """The gateway's controller takes a change as it comes."""
    condition = {"type": "Accepted", "status": "True", "observedGeneration": 10**6}
    route["status"] = {"parents": [{"conditions": [condition]}]}


def by_hand(route: dict[str, Any], weight: int) -> None:
    route["spec"]["rules"][-1]["backendRefs"][-1]["weight"] = weight
