"""Servers of other projects, each in a process of its own, and what a short run against them leaves."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from analysis.checks.table import RULES
from tests.fakes.hub_model import SPECIAL, WORDS, weights
from tests.fakes.processes import free_port, wait_for
from tests.fakes.whole_run import console_script, last_line, requests

__all__ = ["answers", "assert_counted_alike", "free_port", "run_experiment", "running", "settings"]


# A run of seconds cannot pass the first ones; the others fail where two servers and their load share two processors.
EXCUSED = {rule.name for rule in RULES if rule.mended_by_length} | {"block autocorrelation"}
EXCUSED |= {"other work", "interference", "load generator"}


def answers(url: str) -> bool:
    """Return whether a GET of `url` is answered with 2xx."""
    try:
        urllib.request.urlopen(url, timeout=5).close()
    except OSError:
        return False
    return True


@contextmanager
def running(
    command: Sequence[str],
    *,
    log: Path,
    ready: Callable[[], bool],
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
) -> Iterator[None]:
    """Run `command` until the block ends, which begins once it is ready."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
    with log.open("wb") as file:
        process = subprocess.Popen(command, env=variables, stdout=file, stderr=file)

    def is_ready() -> bool:
        assert process.poll() is None, log.read_text()[-5000:]
        return ready()

    try:
        wait_for(is_ready, timeout_s, every_s=0.1, otherwise=lambda: log.read_text()[-5000:])
        yield
    finally:
        process.terminate()
        process.wait(60)


def settings(changes: Sequence[str]) -> list[str]:
    """Return the arguments that set `changes`, for a run of 16 seconds."""
    short = ["engine.max_prompt_tokens=256", "engine.max_new_tokens=64", "traffic.length_scale=0.1"]
    short += ["traffic.duration_s=16", "traffic.block_s=2", "machines.reference_s=0"]
    return [word for change in (*short, *changes) for word in ("--set", change)]


def run_experiment(
    arguments: Sequence[str], folder: Path, codes: Sequence[int]
) -> tuple[dict[str, Any], list[dict[str, dict[str, Any]]], Path]:
    """Run the experiment to its end. Return its summary, the rows of each pair by arm, and its directory.

    The run ends with one of `codes`, all of its requests succeed, and it fails only checks that its length excuses.
    """
    done = console_script(["run", *arguments, "--out", "out"], folder)
    line = last_line(done)
    assert done.returncode in codes, done.stderr
    assert line["complete"], done.stderr
    run_dir = folder / line["run_dir"]
    by_pair: dict[str, dict[str, dict[str, Any]]] = {}
    for row in requests(run_dir):
        assert row["status"] == "OK", row
        by_pair.setdefault(row["pair_id"], {})[row["arm"]] = row
    assert len(by_pair) > 10
    summary = json.loads((run_dir / "summary.json").read_text())
    assert [row for row in summary["validity"] if not row["ok"] and row["check"] not in EXCUSED] == []
    return summary, list(by_pair.values()), run_dir


def assert_counted_alike(pairs: Sequence[dict[str, dict[str, Any]]]) -> None:
    """Assert that both servers counted equal prompts, and as many tokens as were asked for, one in each chunk."""
    for pair in pairs:
        assert len(pair) == 2
        assert len({row["prompt_tokens"] for row in pair.values()}) == 1
        assert all(row["output_tokens"] == row["max_tokens"] == len(row["token_ns"]) for row in pair.values())


_ALIGNED = 32
_F32 = 0  # the type of every tensor
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    **{f"model.layers.0.self_attn.{name}_proj": f"blk.0.attn_{name}" for name in "qkv"},
    "model.layers.0.self_attn.o_proj": "blk.0.attn_output",
    **{f"model.layers.0.mlp.{name}_proj": f"blk.0.ffn_{name}" for name in ("gate", "up", "down")},
    "model.layers.0.input_layernorm": "blk.0.attn_norm",
    "model.layers.0.post_attention_layernorm": "blk.0.ffn_norm",
}


def make_gguf(path: Path, *, hidden: int, inner: int, heads: int = 2) -> Path:
    """`path` is the model, of one layer."""
    words = [f"▁{word}" for word in WORDS]
    begins = sorted({word[:end] for word in words for end in range(2, len(word))})
    text = [*words, *begins, *sorted(set("".join(words)))]
    rest = [f"<0x{byte:02X}>" for byte in range(256)]  # for characters that no word has
    vocabulary = [*SPECIAL, *text, *rest]
    shape = {
        **{"context_length": 1024, "embedding_length": hidden, "feed_forward_length": inner, "block_count": 1},
        **{"attention.head_count": heads, "attention.head_count_kv": heads, "rope.dimension_count": hidden // heads},
    }
    settings: dict[str, Any] = {
        "general.architecture": "llama",
        **{f"llama.{key}": value for key, value in shape.items()},
        "llama.attention.layer_norm_rms_epsilon": 1e-6,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": vocabulary,
        "tokenizer.ggml.scores": [0.0] * len(vocabulary),
        # 2 stands for what is unknown, 3 for what steers, 1 for text, 6 for a byte.
        "tokenizer.ggml.token_type": [2, *[3] * (len(SPECIAL) - 1), *[1] * len(text), *[6] * len(rest)],
        **{f"tokenizer.ggml.{name}_token_id": number for number, name in enumerate(("unknown", "bos", "eos"))},
        "tokenizer.ggml.add_bos_token": False,
    }
    drawn = weights(len(vocabulary), hidden, inner)
    drawn["lm_head.weight"][-len(rest) :] = 0.0  # a server holds back half a character
    tensors = {f"{_NAMES[name.removesuffix('.weight')]}.weight": tensor for name, tensor in drawn.items()}
    infos, data = b"", b""
    for name, tensor in tensors.items():
        infos += _text(name) + struct.pack(f"<I{tensor.ndim}QIQ", tensor.ndim, *tensor.shape[::-1], _F32, len(data))
        data += _padded(tensor.astype("<f4").tobytes())
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(settings))
    head += b"".join(_text(key) + _typed(value) for key, value in settings.items())
    path.write_bytes(_padded(head + infos) + data)
    return path


def _text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def _typed(value: Any) -> bytes:
    """The number of its type, then the value."""
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<II", 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + _text(value)
        case [first, *_]:
            # The numbers in a list are signed.
            items = [struct.pack("<Ii", 5, item) if isinstance(first, int) else _typed(item) for item in value]
            return struct.pack("<I", 9) + items[0][:4] + struct.pack("<Q", len(items)) + b"".join(i[4:] for i in items)
        case _:
            raise TypeError(f"{value!r} has no type here")


def _padded(raw: bytes) -> bytes:
    return raw + bytes(-len(raw) % _ALIGNED)
