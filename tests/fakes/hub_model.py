"""A folder as from_pretrained expects it: a tiny Llama with random weights, its tokenizer and a chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

# A token each, with the space before it; a byte-level vocabulary would stream broken characters.
WORDS = tuple(f"{start}{middle}{end}" for start in "bdfgklmnprst" for middle in "aeiou" for end in "lnrst")
SPECIAL = ("<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>")
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def make(folder: Path, *, hidden: int = 32, inner: int = 64) -> Path:
    """Write the model, of one layer, into `folder`. Some servers need 32 or 64 dimensions a head."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {token: number for number, token in enumerate((*SPECIAL, *(f"▁{word}" for word in WORDS)))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    config = {
        **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32", **ends},
        **{"vocab_size": len(vocabulary), "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": 1},
        **{"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 1024},
    }
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    tables: dict[str, dict[str, Any]] = {
        "config": config,
        "generation_config": ends,
        "tokenizer_config": {"tokenizer_class": "PreTrainedTokenizerFast", **tokens},
    }
    for name, table in tables.items():
        (folder / f"{name}.json").write_text(json.dumps(table))
    torch.manual_seed(0)
    weights = LlamaForCausalLM(LlamaConfig(**config, initializer_range=0.3)).state_dict()
    # The end of text must stay out of greedy answers, or their length would be the weights' choice.
    weights["lm_head.weight"][: len(SPECIAL)] = 0.0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
