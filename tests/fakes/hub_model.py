"""A folder as from_pretrained expects it: a tiny Llama with random weights, its tokenizer and a chat template.

`python -m tests.fakes.hub_model DIR llama-3-8b` writes a model of those shapes in bfloat16, whose token t is surely
followed by t + 1: servers that round differently give the same answers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from itertools import islice, product
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from tailgate.servers.config import ModelConfig
from tailgate.servers.engine.model import load_model

# A token each, with the space before it; a byte-level vocabulary would stream broken characters.
WORDS = tuple(f"{start}{middle}{end}" for start in "bdfgklmnprst" for middle in "aeiou" for end in "lnrst")
SPECIAL = ("<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>")
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def make(folder: Path, *, hidden: int = 32, inner: int = 64) -> Path:
    """Write the model, of one layer, into `folder`. Some servers need 32 or 64 dimensions a head."""
    heads: Any = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    sizes: Any = {"vocab_size": write_tokenizer(folder, WORDS), "hidden_size": hidden, "intermediate_size": inner}
    config = LlamaConfig(**sizes, **heads, max_position_embeddings=1024, initializer_range=0.3)
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config)
    # The end of text must stay out of greedy answers, or their length would be the weights' choice.
    model.lm_head.weight.data[: len(SPECIAL)] = 0.0
    model.save_pretrained(folder)
    return folder


def make_sure(folder: Path, preset: str) -> None:
    """Write the model of random:PRESET with tokens that follow each other in order."""
    model: Any = load_model(ModelConfig(id=f"random:{preset}", dtype="bfloat16"), plain=True)
    for weights in model.model.layers.parameters():
        weights *= 0.1  # what a layer adds does not change the next token
    model.lm_head.weight.copy_(model.model.embed_tokens.weight.normal_().roll(1, 0))
    model.save_pretrained(folder)
    write_tokenizer(
        folder, map("".join, islice(product(ascii_lowercase, repeat=4), model.config.vocab_size - len(SPECIAL)))
    )


def write_tokenizer(folder: Path, words: Iterable[str]) -> int:
    """Write tokenizer and chat template into `folder`; return the size of the vocabulary."""
    vocabulary = {token: number for number, token in enumerate((*SPECIAL, *(f"▁{word}" for word in words)))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(list(SPECIAL))
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    config = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **tokens})
    (folder / "tokenizer_config.json").write_text(config)
    return len(vocabulary)


if __name__ == "__main__":
    make_sure(Path(sys.argv[1]), sys.argv[2])
