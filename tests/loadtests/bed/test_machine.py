from pathlib import Path

import pytest

from loadtests.bed import machine
from loadtests.bed.machine import machine_identity


def test_a_machine_is_known_by_its_gpus_in_any_order(tmp_path: Path) -> None:
    one = machine_identity(["GPU-a", "GPU-b"])
    assert one is not None
    assert len(one) == 12
    assert int(one, 16) >= 0
    assert machine_identity(["GPU-b", "GPU-a"], tmp_path / "none") == one
    assert machine_identity(["GPU-a"]) != one


def test_without_gpus_it_is_known_by_its_own_id_and_without_one_by_its_last_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "id").write_text("0123456789abcdef\n")
    by_id, by_start = machine_identity([], tmp_path / "id"), machine_identity([], tmp_path / "none")
    assert by_id != by_start
    assert by_start is not None
    (tmp_path / "id").write_text("")  # as in an image of a machine that never started
    assert machine_identity([], tmp_path / "id") == by_start
    monkeypatch.setattr(machine, "host_identity", lambda: "")
    assert machine_identity([], tmp_path / "none") is None
