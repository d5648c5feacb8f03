"""Weights of a loaded model in fewer bits, by torchao, before anything is compiled.

Quantised are the linear layers of the repeated blocks. The output matrix stays as it is, since its errors go into the
logits directly, and so does the embedding, of which a step reads a few rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tailgate.servers.complaint import ConfigError
from tailgate.servers.config import ModelConfig, check_quantisation

GROUP = 128  # weights along a row that share a scale, in int4


def quantise(model: Any, settings: ModelConfig) -> None:
    """Hold the weights of the blocks as `settings.quantisation` says. Raises ConfigError where the device, the dtype or
    a layer's size does not allow it, or the weights came quantised."""
    if settings.quantisation == "none":
        return
    setting = f'model.quantisation is "{settings.quantisation}"'
    device = next(model.parameters()).device
    on_gpu = device.type == "cuda"
    capability = torch.cuda.get_device_capability(device) if on_gpu else None
    check_quantisation(settings, on_gpu=on_gpu, capability=capability)
    if getattr(model.config, "quantization_config", None) is not None:
        raise ConfigError(f"{setting} but the files of {settings.id} are quantised already: leave it out")
    output = model.get_output_embeddings()
    linear = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    wanted = {name: layer for name, layer in linear.items() if layer is not output}
    chosen = {id(layer) for layer in wanted.values()}
    from torchao.quantization import quantize_

    try:
        quantize_(model, _configuration(settings.quantisation), filter_fn=lambda layer, _: id(layer) in chosen)
    except (AssertionError, ImportError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        why = next(iter(str(error).splitlines()), type(error).__name__)
        raise ConfigError(f"{setting} and torchao cannot do it here ({why}): use another") from None
    left = [name for name, layer in wanted.items() if not is_quantised(layer.weight)]
    if left or not wanted:
        first = f", first {left[0]} ({' × '.join(map(str, wanted[left[0]].weight.shape))})" if left else ""
        raise ConfigError(
            f"{setting} but {len(left)} of {len(wanted)} linear layers of the blocks cannot be held so{first}: use "
            "another"
        )


def _configuration(quantisation: str) -> Any:
    # torchao would else set inductor's options for the whole process, and those are the compile policy's.
    own: dict[str, Any] = {"set_inductor_config": False}
    from torchao import quantization

    if quantisation == "float8-per-row":
        return quantization.Float8DynamicActivationFloat8WeightConfig(granularity=quantization.PerRow(), **own)
    if quantisation == "float8-weight-only":
        return quantization.Float8WeightOnlyConfig(version=2, **own)
    if quantisation == "int8-weight-only":
        return quantization.Int8WeightOnlyConfig(version=2, **own)
    # The layout that the kernel within torch itself reads; others need packages of their own.
    return quantization.Int4WeightOnlyConfig(group_size=GROUP, int4_packing_format="tile_packed_to_4d", **own)


def is_quantised(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is held in other tensors, as quantised ones are."""
    return hasattr(tensor, "__tensor_flatten__")


def stored_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes that a parameter takes: of a quantised one those of its integers, scales and zero points."""
    if not is_quantised(tensor):
        return tensor.numel() * tensor.element_size()
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return sum(stored_bytes(getattr(tensor, name)) for name in names)


def weight_bytes(model: nn.Module) -> tuple[int, int]:
    """Return (bytes of all parameters, of those that are quantised)."""
    sizes = [(stored_bytes(item), is_quantised(item)) for item in model.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, quantised in sizes if quantised)
