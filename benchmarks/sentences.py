"""What one would serve embeddings with instead: sentence-transformers' `encode`, plain and compiled.

    python benchmarks/sentences.py --model random:bert-base --device cuda --p99-ms 50

Texts have the lengths of the workload "sentences". For each batch size `encode` is called over and over on fresh texts,
tokenising and pooling included; the result is the highest rate at which the p99 of a call stays within --p99-ms. Nobody
waits in a queue, and nothing is sent anywhere: a server built on it is slower. "compiled" is the model after
`compile(dynamic=True)`. Each batch size is tried with the tokenizer's own threads and without them, which on some hosts
cost more than they save. Needs sentence-transformers. The last line on stdout is one JSON object.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.command import BenchmarkParser, count, one_of, run_command, several
from loadtests.traffic.lengths import fitted_lengths
from servers.fields import ConfigError
from servers.presets import RANDOM_PRESETS

KINDS = ("plain", "compiled")
_DTYPES = ("float32", "float16", "bfloat16")
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_WARM_CALLS = 30  # a dynamic graph has met its sizes by then


def words_of(vocabulary: int) -> list[str]:
    """A word for each token that is not special."""
    return [f"w{index}" for index in range(vocabulary - len(_SPECIAL))]


def drawn_texts(rows: int, words: Sequence[str], longest: int, rng: np.random.Generator) -> list[str]:
    """Texts of the workload's lengths in tokens, the two at their ends counted."""
    tokens = np.clip(fitted_lengths("sentences", rows, rng=rng).input_tokens, 3, longest)
    return [" ".join(words[index] for index in rng.integers(len(words), size=size - 2)) for size in tokens.tolist()]


def best_rate(calls: Sequence[dict[str, float]], p99_ms: float) -> float:
    """The highest rate of those whose p99 keeps the limit; 0 where none does."""
    return max((call["sentences_per_s"] for call in calls if call["p99_ms"] <= p99_ms), default=0.0)


def measured_calls(encode: Any, batch: int, texts: Any, seconds: float, *, threads: bool) -> dict[str, float]:
    """How long a call for `batch` texts takes, the tokenizer in `threads` of its own or in one.

    `texts(n)` gives n fresh ones, drawn outside of the time.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = str(threads).lower()  # read at every call
    for _ in range(_WARM_CALLS):
        encode(texts(batch))
    took: list[float] = []
    while sum(took) < seconds:
        fresh = texts(batch)
        start = time.perf_counter()
        encode(fresh)
        took.append(time.perf_counter() - start)
    p50, p99 = np.percentile(took, [50, 99])
    return {
        "batch": batch,
        "tokenizer_threads": threads,
        "calls": len(took),
        "p50_ms": 1e3 * float(p50),
        "p99_ms": 1e3 * float(p99),
        "sentences_per_s": batch * len(took) / sum(took),
    }


def loaded(folder: Path, shape: dict[str, Any], dtype: str, device: str, seed: int) -> tuple[Any, list[str]]:
    """A SentenceTransformer of that shape with random weights, mean pooling and unit length, and its words."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoConfig, AutoModel, PreTrainedTokenizerFast

    torch.manual_seed(seed)
    config = AutoConfig.for_model(**shape)
    AutoModel.from_config(config).save_pretrained(folder)  # type: ignore[no-untyped-call]
    words = words_of(config.vocab_size)
    ids = {word: index for index, word in enumerate([*_SPECIAL, *words])}
    tokenizer = Tokenizer(WordLevel(ids, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", ids["[CLS]"]), ("[SEP]", ids["[SEP]"])]
    )
    PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=config.max_position_embeddings,
    ).save_pretrained(folder)
    transformer = Transformer(str(folder), model_kwargs={"dtype": getattr(torch, dtype)})
    modules = [transformer, Pooling(config.hidden_size, "mean"), Normalize()]
    return SentenceTransformer(modules=modules, device=device).eval(), words


def measure(arguments: Sequence[str]) -> dict[str, Any]:
    """The result of the command."""
    parser = BenchmarkParser("sentences.py", __doc__, repeats=1)
    parser.add_argument("--model", default="random:bert-base", help="random:NAME (default %(default)s)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", type=one_of(_DTYPES), default="float32", help="(default %(default)s)")
    parser.add_argument("--kinds", type=several(one_of(KINDS), "plain,compiled"), default=KINDS)
    parser.add_argument(
        "--batch", type=several(lambda text: str(count(text)), "1,8,32"), default=("1", "8", "32", "128")
    )
    parser.add_argument("--p99-ms", type=float, default=50.0)
    parser.add_argument("--seconds", type=float, default=5.0, help="of calls for each batch size (default %(default)s)")
    options = parser.parse_args(list(arguments))
    if importlib.util.find_spec("sentence_transformers") is None:
        raise ConfigError("sentence-transformers is not installed: pip install sentence-transformers")
    name = options.model.removeprefix("random:")
    if name not in RANDOM_PRESETS or RANDOM_PRESETS[name]["model_type"] != "bert":
        raise ConfigError(f'--model "{options.model}" is no encoder of random weights: give random:bert-base')
    shape = RANDOM_PRESETS[name]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for kind in options.kinds:
            rng = np.random.default_rng(options.seed)
            model, words = loaded(Path(folder), shape, options.dtype, options.device, options.seed)
            if kind == "compiled":
                model.compile(dynamic=True)
            encode = partial(model.encode, show_progress_bar=False, batch_size=max(map(int, options.batch)))
            texts = partial(drawn_texts, words=words, longest=shape["max_position_embeddings"], rng=rng)
            calls = [
                measured_calls(encode, int(batch), texts, options.seconds, threads=threads)
                for batch in options.batch
                for threads in (True, False)
            ]
            row = {"kind": kind, "calls": calls, "sentences_per_s": best_rate(calls, options.p99_ms)}
            found = f"{row['sentences_per_s']:,.0f} sentences/s within a p99 of {options.p99_ms:g} ms"
            print(f"{kind}: {found}", file=sys.stderr)
            rows.append(row)
    return {"ok": True, "p99_ms": options.p99_ms, "rows": rows}


if __name__ == "__main__":
    sys.exit(run_command("sentences.py", measure))
