"""What cannot work is said before anything starts."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loadtests.trials import environment, preflight
from loadtests.trials.preflight import check_arm
from servers import artifact
from servers.config import ArmConfig, CompileConfig, ModelConfig
from servers.fields import ConfigError


def arm(model_id: str = "random:tiny", device: str = "cpu", **policy: object) -> ArmConfig:
    return ArmConfig(
        model=ModelConfig(id=model_id, device=device),
        compile=CompileConfig(enabled=bool(policy), **policy),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("./no-such-model", 'model.id "./no-such-model" does not exist'),
        ("models/llama/8b", '"models/llama/8b" is neither a folder here nor a Hugging Face id'),
        ("meta llama", '"meta llama" is neither'),
        ("{folder}", "is not a folder with a config.json"),
        ("{folder}/file", "is not a folder with a config.json"),
    ],
)
def test_a_model_that_is_not_there_is_refused(model: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("{}")
    with pytest.raises(ConfigError) as caught:
        check_arm(arm(model.format(folder=tmp_path)))
    assert words in str(caught.value)
    assert "random:NAME" in str(caught.value)


def test_a_hub_id_and_a_folder_with_a_configuration_pass(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for name in ("gpt2", "meta-llama/Llama-3.2-1B", str(tmp_path)):
        check_arm(arm(name))


@pytest.mark.parametrize(("visible", "usable"), [(None, 2), ("0", 1), ("1,0", 2), ("0,-1,1", 1), ("", 0)])
def test_a_gpu_that_is_not_there_is_refused(visible: str | None, usable: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "gpu_names", lambda: ["one", "other"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    for index in range(3):
        if index < usable or not usable:
            check_arm(arm(device=f"cuda:{index}"))
        else:
            with pytest.raises(ConfigError, match=f'model.device is "cuda:{index}" but {usable} GPU'):
                check_arm(arm(device=f"cuda:{index}"))


def quantised(kind: str, **model: str) -> ArmConfig:
    return ArmConfig(name="fewer", model=ModelConfig(quantisation=kind, **model))  # type: ignore[arg-type]


def refusal(config: ArmConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        check_arm(config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_quantised_weights_need_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    check_arm(quantised("int8-weight-only", device="cpu"))
    monkeypatch.setitem(sys.modules, "torchao", None)
    check_arm(quantised("none", device="cpu"))
    assert refusal(quantised("int8-weight-only", device="cpu")) == (
        'arm "fewer": model.quantisation is "int8-weight-only" and torchao, which does it, is not installed: '
        "pip install 'tailgate[quantisation]'"
    )


@pytest.mark.parametrize("kind", ["float8-per-row", "int4-weight-only"])
def test_what_only_a_gpu_multiplies_is_refused_on_a_cpu_that_nobody_named(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "sees_gpu", lambda: False)
    assert f'arm "fewer": model.quantisation is "{kind}" but the model runs on the CPU' in refusal(quantised(kind))


@pytest.mark.parametrize(("capabilities", "fits"), [("8.0\n", False), ("8.0\n9.0\n", True), ("", True), ("?", True)])
def test_a_gpu_too_old_for_float8_is_refused(capabilities: str, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "sees_gpu", lambda: True)
    monkeypatch.setattr(environment.shutil, "which", lambda name: name)
    monkeypatch.setattr(environment, "_output", lambda _: capabilities)
    check_arm(quantised("float8-weight-only", device="cpu"))
    if fits:
        check_arm(quantised("float8-per-row"))
    else:
        assert "the newest GPU here has compute capability 8.0, and float8 is known from 8.9 on" in refusal(
            quantised("float8-per-row")
        )


@pytest.mark.usefixtures("torch_asked_once")
def test_a_module_that_cannot_be_imported_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match=r'compile\.backend_module is "no_such\.module" and cannot be imported'):
        check_arm(arm(backend="tardy", backend_module="no_such.module"))


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({}, 'compile.backend is "tardy", which importing its.module does not register: torch knows inductor'),
        ({"backends": ["tardy"], "load": "OSError: libtardy.so"}, "cannot compile (OSError: libtardy.so)"),
    ],
)
def test_what_torch_says_of_a_late_backend_is_one_line(
    told: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = json.dumps({"backends": ["inductor"], "unknown": [], "unlike": {}, **told})
    monkeypatch.setattr(preflight.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess((), 0, text))
    with pytest.raises(ConfigError) as refused:
        check_arm(arm(backend="tardy", backend_module="its.module"))
    assert words in str(refused.value)


def test_a_late_backend_that_registers_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    text = json.dumps({"backends": ["tardy"], "unknown": [], "unlike": {}})
    monkeypatch.setattr(preflight.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess((), 0, text))
    check_arm(arm(backend="tardy", backend_module="its.module"))


def test_a_torch_that_tells_no_backends_refuses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    text = json.dumps({"backends": [], "unknown": [], "unlike": {}})
    monkeypatch.setattr(preflight.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess((), 0, text))
    check_arm(arm(backend="telepathy"))


def test_what_is_private_to_torch_is_asked_through_the_servers() -> None:
    assert "torch." not in preflight._ASK_TORCH


@pytest.mark.usefixtures("torch_asked_once")
def test_a_backend_that_torch_does_not_know_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'compile\.backend is "telepathy": torch knows .*inductor'):
        check_arm(arm(backend="telepathy"))


@pytest.mark.usefixtures("torch_asked_once")
@pytest.mark.parametrize("name", ["fastest", "triton.fastest", "triton"])
def test_an_option_that_inductor_does_not_know_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"compile.options.{name} is unknown to this torch"):
        check_arm(arm(backend="inductor", options={name: True}))


def test_torch_is_not_asked_about_what_every_torch_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_ASK_TORCH", "raise SystemExit(1)")
    monkeypatch.setattr(preflight.subprocess, "run", lambda *_, **__: pytest.fail("torch was asked"))
    for backend in ("inductor", "eager", "aot_eager"):
        check_arm(arm(backend=backend))
    check_arm(ArmConfig.from_preset("compiled-bucketed", model=ModelConfig(device="cpu")))


def written_for(config: ArmConfig, device: str, folder: Path, *, on_cpu: bool) -> ArmConfig:
    """The arm with an artifact of its own, written on `device`."""
    facts = artifact.facts_of(config, device=device, threads=1, on_cpu=on_cpu)
    (folder / "cache").mkdir()
    written = artifact.write(str(folder / "arm.compiled"), folder / "cache", facts)
    return replace(config, compile=replace(config.compile, artifact=written.path))


def test_an_artifact_of_another_gpu_is_refused_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = written_for(arm(device="cuda", fullgraph=True), "NVIDIA H200", tmp_path, on_cpu=False)
    monkeypatch.setattr(preflight, "sees_gpu", lambda: True)
    for shown in (["NVIDIA H200, 570.86"], ["NVIDIA A10, 570.86", "NVIDIA H200, 570.86"], []):
        monkeypatch.setattr(preflight, "gpu_names", lambda shown=shown: shown)
        check_arm(shipped)
    monkeypatch.setattr(preflight, "gpu_names", lambda: ["NVIDIA H100 80GB HBM3, 570.86"])
    with pytest.raises(ConfigError, match="was written on NVIDIA H200 and this is NVIDIA H100 80GB HBM3"):
        check_arm(shipped)


def test_an_artifact_of_an_amd_gpu_is_left_to_the_replica(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = written_for(arm(device="cuda", fullgraph=True), "AMD Instinct MI300X", tmp_path, on_cpu=False)
    monkeypatch.setattr(preflight, "sees_gpu", lambda: True)
    for shown in (["AMD GPU gfx942"], ["AMD GPU gfx942", "AMD GPU gfx90a"]):
        monkeypatch.setattr(preflight, "gpu_names", lambda shown=shown: shown)
        check_arm(shipped)
        with pytest.raises(ConfigError, match=r"was written for compile\.dynamic not set and here it is True"):
            check_arm(replace(shipped, compile=replace(shipped.compile, dynamic=True)))


def test_an_artifact_of_this_processor_passes_and_a_damaged_one_does_not(tmp_path: Path) -> None:
    shipped = written_for(arm(fullgraph=True), artifact.processor(), tmp_path, on_cpu=True)
    check_arm(shipped)
    path = Path(shipped.compile.artifact)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ConfigError, match="is damaged"):
        check_arm(shipped)
