"""Live weights of a real Envoy in front of real gRPC servers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable

import grpc
import pytest

from servers.fields import ConfigError
from servers.splitter.access_log import log_path
from servers.splitter.admin import Admin, SplitterError
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
from tests.fakes.patience import PATIENCE_S
from tests.servers.splitter.house import Build, House, binomial_bound


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


def test_a_shadow_becomes_an_arm_in_one_step(build: Build) -> None:
    house = build({"eager": 1, "dark": 1}, weights={"eager": 1, "dark": 0}, shadows={"dark": 25})
    admin = house.envoy.admin
    assert live_shares(admin).shadows == {"dark": 25}
    both = r'^arm "dark" gets copies of 25 % of the requests and has weight 1: set one of them to 0$'
    with pytest.raises(ConfigError, match=both):
        reweight(admin, {"dark": 1})
    with pytest.raises(ConfigError, match=r'^arm "eager" gets copies of 5 % of the requests and has weight 1: '):
        reshare(admin, shadows={"eager": 5})
    assert live_shares(admin) == Shares(weights={"eager": 1, "dark": 0}, shadows={"dark": 25})
    shares = reshare(admin, weights={"dark": 1, "eager": 0}, shadows={"dark": 0, "eager": 100})
    assert shares == live_shares(admin) == Shares(weights={"eager": 0, "dark": 1}, shadows={"eager": 100})
    assert {answer.arm for answer in house.ask(*[{}] * 20)} == {"dark"}


@pytest.mark.parametrize(("by_hand", "percent"), [("40", 40.0), ("400", 100.0), ("nonsense", 25.0)])
def test_a_share_that_was_set_by_hand_is_read_as_envoy_takes_it(build: Build, by_hand: str, percent: float) -> None:
    house = build({"eager": 1, "dark": 1}, weights={"eager": 1, "dark": 0}, shadows={"dark": 25})
    house.envoy.admin.post(f"/runtime_modify?tailgate.shadow.dark={by_hand}")
    assert live_shares(house.envoy.admin).shadows == {"dark": percent}
    assert abs(copied(house, 400) - 4 * percent) <= binomial_bound(400, percent / 100)


def test_a_split_of_one_arm_has_no_shadow(build: Build) -> None:
    house = build({"eager": 1})
    assert live_shares(house.envoy.admin) == Shares(weights={"eager": 1}, shadows={})


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
