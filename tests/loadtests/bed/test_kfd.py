"""AMD's GPUs as the kernel's driver lists them."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtests.bed.kfd import amd_gpus
from loadtests.trials import environment
from loadtests.trials.preflight import check_arm
from servers.config import ArmConfig, ModelConfig
from servers.fields import ConfigError


def kfd_node(folder: Path, number: int, properties: str) -> None:
    node = folder / str(number)
    node.mkdir(parents=True)
    (node / "properties").write_text(properties)


def test_amds_gpus_are_seen_without_rocm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kfd_node(tmp_path, 0, "cpu_cores_count 96\nsimd_count 0\ngfx_target_version 0\n")
    kfd_node(tmp_path, 1, "simd_count 1216\ngfx_target_version 90402\n")
    kfd_node(tmp_path, 10, "simd_count 384\ngfx_target_version 110000\n")
    kfd_node(tmp_path, 2, "simd_count 880\ngfx_target_version 90010\n")
    kfd_node(tmp_path, 3, "no number\ngfx_target_version what\n")
    assert amd_gpus(tmp_path) == ["AMD GPU gfx942", "AMD GPU gfx90a", "AMD GPU gfx1100"]
    assert amd_gpus(tmp_path / "none") == []
    monkeypatch.setattr(environment, "amd_gpus", lambda: amd_gpus(tmp_path))
    monkeypatch.setattr(environment.shutil, "which", lambda program: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert environment.sees_gpu()
    assert environment.count_gpus() == 1
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "0,2")
    assert environment.count_gpus() == 2
    check_arm(ArmConfig(model=ModelConfig(device="cuda:1")))
    with pytest.raises(ConfigError, match=r'model\.device is "cuda:2" but 2 GPUs are visible'):
        check_arm(ArmConfig(model=ModelConfig(device="cuda:2")))
