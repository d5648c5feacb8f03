"""Experiments that cannot work are refused before anything starts."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import constants

from tailgate.loadtests.traffic import prompts
from tailgate.loadtests.trials import preflight
from tailgate.loadtests.trials.preflight import check_arm
from tailgate.servers.complaint import ConfigError
from tailgate.servers.config import ArmConfig, ModelConfig
from tests.fakes.machines import FakeCard, FakeNvml
from tests.fakes.processes import refusal


def arm(model_id: str = "random:tiny", device: str = "cpu") -> ArmConfig:
    return ArmConfig(model=ModelConfig(id=model_id, device=device))


def quantised(kind: str, **model: str) -> ArmConfig:
    return ArmConfig(name="fewer", model=ModelConfig(quantisation=kind, **model))  # type: ignore[arg-type]


@pytest.mark.parametrize("model", ["./no-such-model", "models/llama/8b", "meta llama", "{folder}", "{folder}/file"])
def test_a_model_that_is_not_there_is_refused(model: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("{}")
    said = refusal(ConfigError, check_arm, arm(model.format(folder=tmp_path)))
    assert str(model.format(folder=tmp_path)) in said
    assert "random:tiny" in said


def test_a_hub_id_and_a_folder_of_a_whole_model_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(weights())
    (tmp_path / "tokenizer.json").touch()
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub_at(server))
        answer = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
        Thread(target=lambda: server.accept()[0].sendall(answer)).start()
        for name in ("unknown-id", str(tmp_path)):
            check_arm(arm(name))


@pytest.mark.parametrize(
    ("files", "config", "words"),
    [
        (("tokenizer.json",), "{}", "has no weights (*.safetensors"),
        (("model.safetensors", "tokenizer_config.json"), "{}", "has no tokenizer (tokenizer.*"),
        (("pytorch_model.bin", "vocab.txt"), "[]", "config.json cannot be read"),
        (("pytorch_model.bin", "vocab.txt"), '{"n_positions": 8}', "has 8 positions: lower them to 8 together"),
    ],
)
def test_a_folder_that_lacks_part_of_its_model_or_positions_is_refused(
    files: tuple[str, ...], config: str, words: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(config)
    for name in files:
        (tmp_path / name).touch()
    assert words in refusal(ConfigError, check_arm, arm(str(tmp_path)))


def weights() -> bytes:
    header = b'{"__metadata__": {"format": "pt"}, "w": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}'
    return len(header).to_bytes(8, "little") + header + bytes(4)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (weights()[:-1], f"cut off: it has {len(weights()) - 1} of {len(weights())} bytes"),
        *((content, "cut off in its header") for content in (b"", weights()[:40], b"version https://git-lfs", b"\2")),
    ],
)
def test_weights_that_are_cut_off_are_refused(content: bytes, words: str, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "model-1.safetensors").write_bytes(weights())
    (tmp_path / "model-2.safetensors").write_bytes(content)
    assert f"model-2.safetensors is {words}" in refusal(ConfigError, check_arm, arm(str(tmp_path)))


def hub_at(server: socket.socket) -> str:
    return f"http://127.0.0.1:{server.getsockname()[1]}/{{repo_id}}/{{revision}}/{{filename}}"


@pytest.mark.parametrize(("silent", "reason"), [(False, "refused"), (True, "timed out")])
def test_a_hub_that_cannot_be_reached_is_reported_at_once(
    silent: bool, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "_HUB_S", 0.2 if silent else 60.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub_at(server))
        if not silent:
            server.close()
        said = refusal(ConfigError, check_arm, arm("some/unknown-id"))
        assert reason in refusal(ConfigError, prompts.load_prompt_text, "some/unknown-id")
    words = ('model.id "some/unknown-id"', reason, "local folder", "HF_HUB_OFFLINE=1", "HF_ENDPOINT", "try again")
    assert [word for word in words if word not in said] == []


def gpu(capability: tuple[int, int] | None) -> Any:
    return SimpleNamespace(capability=capability)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([FakeCard(bus=1), FakeCard(bus=2)]))
    monkeypatch.setattr(preflight, "sees_gpu", lambda: True)
    for visible, usable in (("1,0", "2 GPUs"), ("1", "1 GPU")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        check_arm(arm(device=f"cuda:{int(usable[0]) - 1}"))
        device = f"cuda:{usable[0]}"
        assert f'model.device is "{device}" but {usable}' in refusal(ConfigError, check_arm, arm(device=device))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # what torch makes of it is not known
    check_arm(arm(device="cuda:9"))


def test_quantised_weights_need_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    check_arm(quantised("int8-weight-only", device="cpu"))
    monkeypatch.setitem(sys.modules, "torchao", None)
    check_arm(quantised("none", device="cpu"))
    said = refusal(ConfigError, check_arm, quantised("int8-weight-only", device="cpu"))
    for word in ("arms.fewer.", "model.quantisation", "int8-weight-only", "pip install 'tailgate[quantisation]'"):
        assert word in said


@pytest.mark.parametrize(
    ("kind", "gpus", "words"),
    [
        ("int4-weight-only", None, ("arms.fewer.", "model.quantisation", "int4-weight-only", "CPU")),
        ("float8-per-row", None, ("arms.fewer.", "float8-per-row", "CPU")),
        ("float8-per-row", [gpu((8, 0))], ("8.0", "8.9")),
        ("float8-per-row", [gpu((8, 0)), gpu((9, 0))], ()),
        ("float8-per-row", [], ()),
        ("float8-per-row", [gpu(None)], ()),
    ],
)
def test_weights_that_the_device_cannot_multiply_are_refused(
    kind: str, gpus: list[Any] | None, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "sees_gpu", lambda: gpus is not None)
    monkeypatch.setattr(preflight, "shown_cards", lambda: gpus or [])
    if words:
        said = refusal(ConfigError, check_arm, quantised(kind))
        assert [word for word in words if word not in said] == []
    else:
        check_arm(quantised(kind))
