"""Which settings a splitter refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from servers.fields import ConfigError
from servers.splitter.envoy_config import ArmTarget, SplitterConfig


def lonely_config(**settings: Any) -> SplitterConfig:
    return SplitterConfig(arms=(ArmTarget(name="eager", backends=("127.0.0.1:1",)),), **settings)


def shadow(percent: float, weight: int = 0) -> ArmTarget:
    return ArmTarget(name="a", backends=("h:1",), weight=weight, shadow_percent=percent)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ArmTarget(name="a b", backends=("h:1",)), 'arm name "a b" is not usable'),
        (lambda: ArmTarget(name="a", backends=()), 'arm "a" has no replica'),
        (lambda: ArmTarget(name="a", backends=("h:1", "h:1")), 'arm "a" names a replica twice'),
        (lambda: ArmTarget(name="a", backends=("h",)), 'address "h" is not host:port'),
        (lambda: ArmTarget(name="a", backends=("h:99999",)), 'address "h:99999" is not host:port'),
        (lambda: shadow(101), 'shadow of arm "a" is 101 %: give 0 %, or from 0.0001 % to 100 %'),
        (lambda: shadow(-1), 'shadow of arm "a" is -1 %'),
        (lambda: shadow(0.00001), 'shadow of arm "a" is 1e-05 %'),
        (lambda: shadow(float("nan")), 'shadow of arm "a" is nan %'),
        (lambda: shadow(25, weight=3), 'arm "a" gets copies of 25 % of the requests and has weight 3: set one of them'),
        (lambda: SplitterConfig(arms=()), "the splitter has no arm"),
        (lambda: lonely_config(host="localhost"), 'splitter.host is "localhost"'),
        (lambda: lonely_config(port=-1), "splitter.port is -1"),
        (lambda: lonely_config(workers=0), "splitter.workers is 0"),
        (lambda: lonely_config(stickiness="host"), "splitter.stickiness is 'host'"),
        (lambda: lonely_config(health_interval_s=0), "splitter.health_interval_s is 0"),
        (
            lambda: SplitterConfig(
                arms=(ArmTarget(name="a.b", backends=("h:1",)), ArmTarget(name="a.b", backends=("h:2",)))
            ),
            'arm name "a.b" is taken',
        ),
    ],
)
def test_impossible_setting_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        make()
    assert str(refusal.value).startswith(message)
    assert "\n" not in str(refusal.value)
