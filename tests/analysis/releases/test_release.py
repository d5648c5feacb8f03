"""What is kept of a run for later comparisons."""

from dataclasses import replace
from pathlib import Path

import pytest

from analysis.records.run_list import listed_runs, write_run_list
from analysis.releases.release import release_of
from tests.fakes.beds import referenced
from tests.fakes.runs import DAYS_APART, EAGER, FakeArm, FakeRun, write_run

RUN = FakeRun(arms=(EAGER, FakeArm(name="compiled")), duration_s=60, rate=1, gates={"draws": 99})


@pytest.mark.parametrize(("other", "kept"), [("aaaa", "aaaa"), ("bbbb", None)])
def test_runs_that_were_joined_over_machines_are_of_none_of_them(tmp_path: Path, other: str, kept: str | None) -> None:
    directories = [
        write_run(
            tmp_path / f"run-{day}", replace(RUN, seed=day, day=day * DAYS_APART, environment={"machine": machine})
        )
        for day, machine in enumerate(("aaaa", other))
    ]
    write_run_list(tmp_path / "joined", listed_runs(directories))
    assert release_of(tmp_path / "joined").machine == kept


def test_references_of_an_arm_are_those_of_the_device_that_it_was_put_on(tmp_path: Path) -> None:
    fake = replace(RUN, bed=referenced(python_ms=10.0, read_gb_per_s=20.0))
    assert release_of(write_run(tmp_path / "run", fake)).arms["compiled"].references == {
        "python_ms": 10.0,
        "read_gb_per_s": 20.0,
    }
