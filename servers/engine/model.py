"""Load a Hugging Face causal language model, or build one from an architecture preset with random weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from servers.config import ModelConfig
from servers.engine import attention
from servers.engine.placement import resolve_device, resolve_dtype
from servers.engine.quantisation import quantise
from servers.fields import ConfigError
from servers.presets import BOS_ID, EOS_ID, PAD_ID, RANDOM_PRESETS


def model_config(model: ModelConfig) -> PreTrainedConfig:
    """The architecture behind `model.id`, without its weights."""
    if not model.id.startswith("random:"):
        try:
            config: PreTrainedConfig = AutoConfig.from_pretrained(model.id)
            return config
        except (OSError, ValueError) as error:
            raise ConfigError(f'model.id "{model.id}" cannot be loaded: {str(error).splitlines()[0]}') from None
    shape = RANDOM_PRESETS[model.id.removeprefix("random:")]
    tokens = {"pad_token_id": PAD_ID, "bos_token_id": BOS_ID, "eos_token_id": EOS_ID}
    return AutoConfig.for_model(**{**shape, **tokens})


def load_model(model: ModelConfig) -> nn.Module:
    """The model in evaluation mode on its device, in its dtype, with the attention and the quantisation asked for.

    Random weights depend on `model.seed`, the device and the torch version alone, so arms of one run share them. On
    cuda:N, N is this thread's current device afterwards.
    """
    device = resolve_device(model.device)
    if device.type == "cuda" and device.index is not None:
        # Kernels are launched and graphs captured on this thread's current device, wherever their tensors are.
        torch.cuda.set_device(device)
    dtype = resolve_dtype(model.dtype, device)
    config = model_config(model)
    implementation = attention.register() if model.attention == "sdpa" else model.attention
    if model.id.startswith("random:"):
        torch.manual_seed(model.seed)
        with torch.device(device):
            loaded: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                config, dtype=dtype, attn_implementation=implementation
            )
    else:
        loaded = AutoModelForCausalLM.from_pretrained(model.id, dtype=dtype, attn_implementation=implementation)
    module: nn.Module = loaded.to(device).eval().requires_grad_(False)
    quantise(module, model)
    return module


def hollow_model(model: ModelConfig) -> nn.Module:
    """The modules of the model by their names, without memory for weights."""
    with torch.device("meta"):
        hollow: nn.Module = AutoModelForCausalLM.from_config(model_config(model))  # type: ignore[no-untyped-call]
    return hollow


# Projections that read the same input, under the names that transformers' models share.
_JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@torch.no_grad()
def join_weights(model: nn.Module) -> None:
    """Weights of projections that read the same input stand side by side in memory.

    The modules and what they compute are as before. `join_linears` may then read them as one matrix.
    """
    for parent in model.modules():
        for names in _JOINED:
            parts = [getattr(parent, name, None) for name in names]
            if not all(isinstance(part, nn.Linear) and part.bias is None for part in parts):
                continue
            linears: list[Any] = parts
            if len({(part.weight.shape[1], part.weight.dtype) for part in linears}) > 1:
                continue
            together = torch.cat([part.weight for part in linears])
            rows = torch.split(together, [part.weight.shape[0] for part in linears])
            for part, own in zip(linears, rows, strict=True):
                part.weight = nn.Parameter(own, requires_grad=False)


def eos_ids(module: Any) -> frozenset[int]:
    """The end-of-sequence ids of a loaded model."""
    ids = module.generation_config.eos_token_id if module.generation_config is not None else None
    ids = module.config.eos_token_id if ids is None else ids
    if ids is None:
        return frozenset()
    return frozenset(ids) if isinstance(ids, list) else frozenset([ids])
