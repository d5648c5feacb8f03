"""Live weights of a real Envoy in front of real gRPC servers."""

from __future__ import annotations

from collections import Counter

import grpc
import pytest

from servers.fields import ConfigError
from servers.splitter.envoy_config import Mirror
from servers.splitter.weights import reweight
from tests.servers.splitter.house import Build, House, binomial_bound


def test_reweighting_drops_no_stream_and_new_requests_follow(build: Build) -> None:
    house = build({"eager": 1, "compiled": 1})
    held = house.hold(50)
    for eager, compiled in ((1, 0), (0, 1), (9, 1), (0, 7), (1, 1)):
        reweight(house.envoy.admin, {"eager": eager, "compiled": compiled})
        assert reweight(house.envoy.admin, {}) == {"eager": eager, "compiled": compiled}
        counts = Counter(answer.arm for answer in house.ask(*[{}] * 200))
        share = eager / (eager + compiled)
        assert counts.total() == 200
        assert abs(counts["eager"] - 200 * share) <= binomial_bound(200, share)
    assert not held.done()
    house.release()
    answers = held.result(10)
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
        ({"eagre": 1}, 'arm "eagre" is unknown to the split at [0-9.:]+: use one of eager, compiled-padded, idle.arm'),
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
    assert reweight(shared.envoy.admin, {}) == {"eager": 3, "compiled-padded": 1, "idle.arm": 0}


def test_an_arm_that_takes_mirrored_copies_gets_no_weight(build: Build) -> None:
    house = build({"eager": 1, "dark": 1}, weights={"eager": 1, "dark": 0}, mirror=Mirror(arm="dark"))
    with pytest.raises(ConfigError, match=r'^arm "dark" takes mirrored copies and has weight 1: set its weight to 0$'):
        reweight(house.envoy.admin, {"dark": 1})
    assert reweight(house.envoy.admin, {}) == {"eager": 1, "dark": 0}
