"""Production traffic: what splits it, who changes its weights, and a ramp that goes on after a kill."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml

from tailgate.analysis.records.weight_journal import BY_HAND, BY_OTHERS, read_journal
from tailgate.loadtests.experiments.users import UsersConfig
from tailgate.loadtests.trials import weights
from tailgate.loadtests.trials.status import ReplicaState
from tailgate.loadtests.trials.users_ramp import UsersTrial
from tailgate.loadtests.trials.weights import (
    EnvoySplitter,
    Splitter,
    WeightController,
    in_words,
    splitter_of,
)
from tailgate.servers.splitter.admin import SplitterError, reweight
from tailgate.servers.splitter.kubernetes import route_weights
from tests.fakes.kubernetes import FakeCluster, route_of, served
from tests.fakes.processes import PATIENCE_S
from tests.loadtests.trials.test_ramp import Ramp
from tests.servers.splitter.split import Loop, Split

ROOT = Path(__file__).parents[3]
(ROLE,) = (
    document
    for document in yaml.safe_load_all((ROOT / "deploy/kubernetes/ramp/rbac.yaml").read_text())
    if document["kind"] == "Role"
)


@contextmanager
def routed(namespace: str = "models") -> Iterator[tuple[FakeCluster, Splitter]]:
    """A cluster whose route gives everything to "eager", and its splitter; who asks has the rights of rbac.yaml."""
    cluster = FakeCluster(route_of({"eager": 1, "new": 0}), namespace=namespace, rules=ROLE["rules"])
    with served(cluster) as port:
        users = UsersConfig(route=f"{namespace}/tailgate", api=f"127.0.0.1:{port}", access_log="requests.log")
        splitter = splitter_of(users, ("eager", "new"))
        yield cluster, splitter


def in_route(cluster: FakeCluster) -> dict[str, int]:
    return {name.removeprefix("tailgate-"): weight for name, weight in route_weights(cluster.route).items()}


def test_a_ramp_of_a_route_goes_up_and_back_with_exactly_the_rights_of_the_role(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with routed() as (cluster, splitter):
        cluster.admit = accepted
        ramp = Ramp(tmp_path, splitter, monkeypatch)
        ramp.poll(3)
        assert in_route(cluster) == {"eager": 9900, "new": 100}
        ramp.die()
        ramp.poll()
        assert in_route(cluster) == {"eager": 10_000, "new": 0}
        last = read_journal(tmp_path)[0][-1]
        assert (last.action, last.done_ns is not None) == ("rollback", True)
        assert cluster.requests[-1][0] == "PATCH", "an accepted change is not waited for"
        assert {status for _, status in cluster.requests} == {200}, "nothing was forbidden"
        assert {method.lower() for method, _ in cluster.requests} == set(ROLE["rules"][0]["verbs"])


def accepted(route: dict[str, Any]) -> None:
    """The gateway's controller takes a change as it comes."""
    condition = {"type": "Accepted", "status": "True", "observedGeneration": 10**6}
    route["status"] = {"parents": [{"conditions": [condition]}]}


CONFIGURED = {"eager": 9, "compiled": 1, "dark": 0}


@pytest.fixture
def split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Split]:
    monkeypatch.setattr(weights, "_READ_NS", 0)
    loop = Loop()
    built = Split(loop, tmp_path / "split", dict.fromkeys(CONFIGURED, 1), weights=CONFIGURED)
    built.envoy.wait_ready(PATIENCE_S)
    yield built
    built.close()
    loop.close()


def test_a_change_by_hand_is_recorded_once_with_the_weights_before(split: Split, tmp_path: Path) -> None:
    admin = split.envoy.admin
    splitter = EnvoySplitter(admin)
    controller = WeightController(tmp_path, CONFIGURED, trial=2, configured=CONFIGURED)
    assert controller.poll(splitter) is None
    assert read_journal(tmp_path)[0] == ()
    reweight(admin, {"compiled": 9})
    change = controller.poll(splitter)
    assert controller.poll(splitter) is None
    start, written = read_journal(tmp_path)[0]
    assert written == change
    assert (start.weights, start.shadows, start.action) == (CONFIGURED, {}, "start")
    assert written.weights == {"eager": 9, "compiled": 9, "dark": 0}
    assert (written.action, written.step, written.trial) == (BY_HAND, None, 2)
    assert "compiled=1" in written.why
    assert start.at_ns < written.at_ns < (written.done_ns or 0)
    reweight(admin, {}, {"dark": 25})
    assert in_words(controller.poll(splitter) or start) == "eager=9, compiled=9, dark=0, copies of 25 % to dark"
    split.envoy.stop(grace_s=0)
    with pytest.raises(SplitterError):
        controller.poll(splitter)


def test_weights_that_others_move_are_recorded_from_the_first_reading(split: Split, tmp_path: Path) -> None:
    splitter = EnvoySplitter(split.envoy.admin)
    controller = WeightController(tmp_path, ("eager", "compiled"))
    for compiled in (1, 1, 3):
        reweight(split.envoy.admin, {"compiled": compiled})
        controller.poll(splitter)
    found = [(change.action, change.step, change.weights["compiled"]) for change in read_journal(tmp_path)[0]]
    assert found == [(BY_OTHERS, 0, 1), (BY_OTHERS, 0, 3)]


GONE, BACK = frozenset({"new-0"}), frozenset[str]()
SINCE_NS = [10**17, 10**18]  # it was restarted


@pytest.mark.parametrize(
    ("seen", "reported"),
    [
        ([(GONE, 1), (GONE, 1), (BACK, 1), (GONE, 1)], ["cannot be reached", "answers again", "cannot be"]),
        ([(BACK, 1), (BACK, 2), (BACK, 2)], ["was restarted"]),
        ([(GONE, 1), (BACK, 1), (BACK, 2)], ["cannot be reached", "answers again"]),
    ],
    ids=["lost twice", "an unnoticed restart", "a restart after a death"],
)
def test_each_death_of_a_replica_is_recorded_once(
    seen: list[tuple[frozenset[str], int]], reported: list[str], tmp_path: Path
) -> None:
    notes: list[str] = []
    facts = SimpleNamespace(deaths=[])
    status = SimpleNamespace(replicas={"new-0": ReplicaState()}, note=notes.append)
    context = SimpleNamespace(facts=facts, status=status, folder=tmp_path, number=1, keep_facts=lambda: None)
    observer = SimpleNamespace(arms={"new": {"h:1": "new-0"}}, since_ns=1)
    trial = UsersTrial(cast(Any, context), observer=cast(Any, observer), splitter=None, steering=())
    trial.collector.stop()
    for lost, starts in seen:
        since_ns = {"new-0": SINCE_NS[:starts]}
        trial.collector = cast(Any, SimpleNamespace(lost=lambda lost=lost: lost, served_since_ns=since_ns))
        trial._watch()
    assert len(notes) == len(reported)
    assert all(words in note for words, note in zip(reported, notes, strict=True))
    assert len(facts.deaths) == sum("again" not in words for words in reported)
    assert all((death["arm"], death["replica"]) == ("new", "new-0") for death in facts.deaths)
