"""Load a Hugging Face causal language model or encoder, or build one of random weights from a preset."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES

from tailgate.servers.complaint import ConfigError
from tailgate.servers.config import ModelConfig
from tailgate.servers.engine import attention
from tailgate.servers.engine.placement import resolve_device, resolve_dtype
from tailgate.servers.engine.quantisation import is_quantised, quantise
from tailgate.servers.presets import BOS_ID, EOS_ID, PAD_ID, RANDOM_PRESETS


def model_config(model: ModelConfig) -> PreTrainedConfig:
    """Return the architecture of `model.id`, without its weights."""
    if not model.id.startswith("random:"):
        try:
            config: PreTrainedConfig = AutoConfig.from_pretrained(model.id)
            return config
        except (OSError, ValueError) as error:
            raise ConfigError(f'model.id "{model.id}" cannot be loaded: {str(error).splitlines()[0]}') from None
    shape = RANDOM_PRESETS[model.id.removeprefix("random:")]
    tokens = {"pad_token_id": PAD_ID, "bos_token_id": BOS_ID, "eos_token_id": EOS_ID}
    return AutoConfig.for_model(**{**shape, **tokens})


def check_task(model: ModelConfig, config: Any) -> None:
    """Check that a model of this architecture can do the task. Raises ConfigError."""
    what = f'model.task is "{model.task}" but model.id "{model.id}" is a {config.model_type} model'
    reads_masks = config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    if model.embeds and config.is_encoder_decoder:
        raise ConfigError(f"{what}, an encoder with a decoder, which takes two texts: give an encoder alone")
    # a model that generates may be configured to attend both ways
    is_causal = config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not reads_masks
    is_decoder = is_causal or getattr(config, "is_decoder", False)
    if not model.embeds and getattr(config, "attn_logit_softcapping", None):
        raise ConfigError(
            f'model.id "{model.id}" caps its attention scores (attn_logit_softcapping), which the attention of arms '
            "does not: give another model, or serve this one elsewhere as an external arm"
        )
    if model.embeds and is_decoder and not getattr(config, "use_bidirectional_attention", False):
        raise ConfigError(f'{what}, which generates: set model.task = "generate", or give an encoder')
    if not model.embeds and reads_masks and not is_decoder and not config.is_encoder_decoder:
        raise ConfigError(f'{what}, which embeds: set model.task = "embed", or give a model that generates')


def load_model(model: ModelConfig, *, plain: bool = False) -> nn.Module:
    """Load the model in evaluation mode, with the arms' attention, or transformers' own if `plain`. Random weights
    depend on `model.seed`, the device and the torch version alone. On cuda:N, N is this thread's current device
    afterwards."""
    device = resolve_device(model.device)
    if device.type == "cuda" and device.index is not None:
        # Kernels are launched and graphs captured on this thread's current device, wherever their tensors are.
        torch.cuda.set_device(device)
    dtype = resolve_dtype(model.dtype, device)
    config = model_config(model)
    check_task(model, config)
    architecture: Any = AutoModel if model.embeds else AutoModelForCausalLM
    implementation = "eager" if plain else attention.ENCODER_NAME if model.embeds else attention.NAME
    # an encoder's own weights may lack those of a head that it does not use, which are then drawn
    torch.manual_seed(model.seed)
    if model.id.startswith("random:"):
        with torch.device(device):
            loaded: Any = architecture.from_config(config, dtype=dtype, attn_implementation=implementation)
    else:
        loaded, found = architecture.from_pretrained(
            model.id, dtype=dtype, attn_implementation=implementation, output_loading_info=True
        )
        check_weights(model, found["missing_keys"])
    module: nn.Module = loaded.to(device).eval().requires_grad_(False)
    quantise(module, model)
    return module


def check_weights(model: ModelConfig, missing: Collection[str]) -> None:
    """Raise ConfigError if parameters are `missing` from the weights, since transformers draws them at random.

    An encoder's pooler may be missing: its output is not used.
    """
    lacking = sorted(name for name in missing if not (model.embeds and name.startswith("pooler.")))
    if lacking:
        raise ConfigError(
            f'model.id is "{model.id}", whose weights lack {len(lacking)} parameters of its config.json, such as '
            f"{lacking[0]}: give a folder whose config and weights belong together"
        )


def readable_tokens(module: Any) -> int | None:
    """Return the most tokens that a loaded encoder has positions for; None if it has no limit."""
    positions = getattr(module.config, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions < 1:
        return None
    table = getattr(getattr(module, "embeddings", None), "position_embeddings", None)
    # Some count their positions from the one after the padding's.
    padding = getattr(table, "padding_idx", None)
    return positions - padding - 1 if padding is not None else positions


# Projections that read the same input, under the names that transformers' models share.
_JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@torch.no_grad()
def join_weights(model: nn.Module) -> None:
    """Place the weights of projections that read the same input adjacent in memory: a compiler pass can then read them
    as one matrix."""
    for parent in model.modules():
        for names in _JOINED:
            parts = [getattr(parent, name, None) for name in names]
            if not all(isinstance(part, nn.Linear) and part.bias is None for part in parts):
                continue
            linears: list[Any] = parts
            weights = [part.weight for part in linears]
            if len({(weight.shape[1], weight.dtype, type(weight)) for weight in weights}) > 1:
                continue
            if not is_quantised(weights[0]):
                for part, own in zip(linears, _side_by_side(weights), strict=True):
                    part.weight = nn.Parameter(own, requires_grad=False)
                continue
            for name in weights[0].__tensor_flatten__()[0]:
                for weight, own in zip(weights, _side_by_side([getattr(item, name) for item in weights]), strict=True):
                    setattr(weight, name, own)


def _side_by_side(matrices: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return torch.split(torch.cat(list(matrices)), [matrix.shape[0] for matrix in matrices])


def eos_ids(module: Any) -> frozenset[int]:
    ids = module.generation_config.eos_token_id if module.generation_config is not None else None
    ids = module.config.eos_token_id if ids is None else ids
    if ids is None:
        return frozenset()
    return frozenset(ids) if isinstance(ids, list) else frozenset([ids])
