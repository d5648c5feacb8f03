from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from servers.engine.placement import device_name, platform_versions, product_name, resolve_device
from servers.fields import ConfigError


@pytest.mark.parametrize(
    ("name", "gpus", "words"),
    [
        ("gpu", 1, "use auto, cpu, cuda or cuda:N"),
        ("cuda", 0, "torch sees no GPU"),
        ("cuda:2", 2, "torch sees 2 GPUs: use cuda:0 to cuda:1"),
    ],
)
def test_a_device_that_is_not_there_is_refused_in_one_line(
    name: str, gpus: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(ConfigError, match=words) as refused:
        resolve_device(name)
    assert "\n" not in str(refused.value)


def test_the_last_gpu_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("cuda:1") == torch.device("cuda:1")
    assert resolve_device("auto").type == "cuda"


@pytest.mark.parametrize(("given", "name"), [("cpu", "cpu"), ("cuda", "cuda:0"), ("cuda:3", "cuda:3")])
def test_records_number_every_gpu(given: str, name: str) -> None:
    assert device_name(torch.device(given)) == name


@pytest.mark.parametrize(
    ("name", "expected"),
    [("AMD Instinct MI300X", "AMD Instinct MI300X (gfx942)"), ("", "AMD GPU (gfx942)")],
)
def test_a_rocm_device_is_called_what_it_is(name: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert product_name(torch.device("cuda:0")) == expected
    assert platform_versions() == {"rocm": "6.4.43482"}
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert product_name(torch.device("cuda:0")) == name
    assert platform_versions() == {"cuda": "13.0"}
    assert product_name(torch.device("cpu")) == "cpu"
