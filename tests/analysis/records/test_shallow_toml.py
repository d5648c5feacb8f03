"""TOML that is no setting."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis.records.run_records import read_run
from analysis.records.shallow_toml import TomlError, parse
from analysis.records.tables import RecordError
from tests.fakes.runs import FakeRun, write_run


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (".".join("a" * 50_000) + " = 1", "a key has 50000 parts; the limit is 32"),
        ("x = " + "[" * 300_000 + "]" * 300_000, "values are nested too deep"),
        ("x = " + "9" * 5000, "a value cannot be read"),
        ("x", "not valid TOML"),
    ],
)
def test_the_experiment_of_a_run_is_refused(text: str, reason: str, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", FakeRun(duration_s=10.0, rate=1.0))
    (run / "experiment.toml").write_text(text)
    with pytest.raises(TomlError, match=reason):
        parse(text)
    with pytest.raises(RecordError, match=reason):
        read_run(run)


def test_a_key_of_any_length_is_cut_and_its_place_is_not():
    with pytest.raises(TomlError, match=r"^not valid TOML: .* \.\.\. .*\(at line 3, column \d+\)$") as caught:
        parse(f"[{'k' * 5000}]\na = 1\n[{'k' * 5000}]\n")
    assert len(str(caught.value)) < 600
