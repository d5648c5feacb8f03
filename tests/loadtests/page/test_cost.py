"""What is compared in the cost of the live page: an experiment in which nothing but watching changes."""

from __future__ import annotations

from pathlib import Path

from loadtests.experiments.reading import load
from tests.loadtests.page.cost import quiet


def test_no_arm_compiles_beside_the_load(tmp_path: Path) -> None:
    experiment = load(str(quiet(tmp_path / "quiet.toml")))
    assert [(arm.name, arm.control) for arm in experiment.arms] == [("eager", True), ("eager-padded", False)]
    assert not any(arm.config.compile.enabled for arm in experiment.arms)
