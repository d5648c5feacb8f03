"""The device and the dtype that a setting's name stands for on this machine."""

from __future__ import annotations

import os

import torch

from tailgate.servers.complaint import ConfigError


def resolve_device(name: str) -> torch.device:
    """Return the device that `name` means; `auto` is the first GPU, or else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        among = f' where CUDA_VISIBLE_DEVICES is "{visible}"' if visible is not None else ""
        raise ConfigError(
            f'model.device is "{name}" but torch sees no GPU{among}: use cpu, a card that is there, or a CUDA build of '
            "torch"
        )
    if device.type == "cuda" and (device.index or 0) >= (seen := torch.cuda.device_count()):
        raise ConfigError(f'model.device is "{name}" but torch sees {seen} GPUs, the last is cuda:{seen - 1}: use that')
    return device


def device_name(device: torch.device) -> str:
    """Return the device's name in the records: cpu or cuda:N."""
    return device.type if device.type == "cpu" else f"{device.type}:{device.index or 0}"


def product_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype that `name` means; `auto` is bfloat16 on a GPU and float32 on a CPU."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}[name]
