"""Ladders of sizes."""

from __future__ import annotations

import pytest

from servers.config import ArmConfig, EngineConfig
from servers.fields import ConfigError
from servers.ladders import check_rising, default_lengths, doubling


def test_doubling_ends_at_the_limit_itself() -> None:
    assert doubling(32, 100) == (32, 64, 100)
    assert doubling(32, 8) == (8,)
    assert doubling(1, 1) == (1,)


@pytest.mark.parametrize("longest", [1, 32, 100, 4096])
def test_the_ladder_that_nobody_wrote_is_the_one_of_a_bucketed_arm(longest: int) -> None:
    arm = ArmConfig.from_preset("compiled-bucketed", engine=EngineConfig(max_prompt_tokens=longest))
    assert default_lengths(longest) == arm.length_ladder


@pytest.mark.parametrize("ladder", [(0, 1), (2, 2), (4, 2), (-1,)])
def test_a_ladder_that_does_not_rise_is_refused(ladder: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"^length_ladder is \[.*\]: give rising positive integers$"):
        check_rising("length_ladder", ladder)
