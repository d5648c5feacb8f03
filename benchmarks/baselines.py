"""What a user would run instead of a server: transformers' `generate` and its continuous batching.

They live in a process of their own, so that their compiled code and the arm's cannot meet, and run once at a time,
so that each measurement can stand next to one of the arm's.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from servers.config import ModelConfig

DECODE_KINDS = ("eager", "static")
MIXED_KINDS = ("continuous", "continuous-graphs")
KINDS = (*DECODE_KINDS, *MIXED_KINDS)

# Decode is timed from here on: under CUDA graphs the first tokens of a new batch size compile, warm up and record.
_SKIP_TOKENS = 4


class BaselineError(RuntimeError):
    """The baseline could not be run; the message says why."""


class Baselines:
    """The process that holds the plain model. Results are tokens per second: of decode alone, or of the mixed set."""

    def __init__(self, model: ModelConfig, *, threads: int = 0) -> None:
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(max_workers=1, mp_context=context, initializer=_end_with_parent)
        self.pid = self._pool.submit(os.getpid).result()
        self._vocab_size = self._pool.submit(_load, model, threads)

    @property
    def vocab_size(self) -> int:
        """Token ids go from 0 to this, exclusive. Waits until the model is loaded, and raises what made that fail."""
        return self._vocab_size.result()

    def tokens_per_s(self, kind: str, prompts: Sequence[list[int]], new_tokens: int) -> float:
        """The rate of `kind` on these prompts, `new_tokens` each. Raises what made it fail there."""
        return self._pool.submit(_run, kind, [list(prompt) for prompt in prompts], new_tokens).result()

    def close(self) -> None:
        """The process is gone, whatever it was at."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._pool.shutdown(cancel_futures=True)


# --- In that process --------------------------------------------------------------------------------------------------

_runs: list[Runs] = []  # one, once the model is loaded


def _end_with_parent() -> None:
    """The model does not stay on the device when the benchmark is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _load(config: ModelConfig, threads: int) -> int:
    # it warns of a persistent manager at every call
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    if threads:
        import torch

        torch.set_num_threads(threads)
    model = load_plain(config)
    _runs.append(Runs(model))
    return int(model.config.get_text_config().vocab_size)


def _run(kind: str, prompts: list[list[int]], new_tokens: int) -> float:
    return _runs[0].run(kind, prompts, new_tokens)


def load_plain(config: ModelConfig) -> Any:
    """The arm's model as transformers serves it: the same weights, dtype and device, with its own attention."""
    import torch
    from transformers import AutoModelForCausalLM

    from servers.engine.model import model_config
    from servers.engine.placement import resolve_device, resolve_dtype

    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    if config.id.startswith("random:"):
        torch.manual_seed(config.seed)
        with torch.device(device):
            loaded: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                model_config(config), dtype=dtype, attn_implementation=config.attention
            )
    else:
        loaded = AutoModelForCausalLM.from_pretrained(config.id, dtype=dtype, attn_implementation=config.attention)
    return loaded.to(device).eval().requires_grad_(False)


class Runs:
    """Runs questions on a plain model."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self._last: tuple[str, int] | None = None

    def run(self, kind: str, prompts: list[list[int]], new_tokens: int) -> float:
        """Tokens per second; a run that does not count goes before the first of a kind and batch size."""
        import torch

        work = self._mixed if kind in MIXED_KINDS else self._decode
        now = (kind, 0 if kind in MIXED_KINDS else len(prompts))
        if now != self._last:
            if self._last is not None:
                self._forget()
            if kind == "static":
                # Otherwise a second batch size makes the batch dynamic and its decode slower than a first would be.
                torch._dynamo.reset()
            # backwards: the same lengths, and nothing that prefix caching could find again
            work(kind, [prompt[::-1] for prompt in prompts], new_tokens)
            self._last = now
        return work(kind, prompts, new_tokens)

    def _forget(self) -> None:
        if hasattr(self.model, "destroy_cached_continuous_batching_manager"):
            self.model.destroy_cached_continuous_batching_manager()
        import torch

        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()

    def _decode(self, kind: str, prompts: list[list[int]], new_tokens: int) -> float:
        """Decode tokens per second of one `generate`, the prefill and the first tokens left out."""
        import torch
        from transformers import GenerationConfig

        batch, length = len(prompts), len(prompts[0])
        watch = _Watch(self.model.device, last=new_tokens)
        ids = torch.tensor(prompts, device=self.model.device)
        config = GenerationConfig(  # type: ignore[no-untyped-call]
            max_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            **({"cache_implementation": "static"} if kind == "static" else {}),
        )
        # generate() completes what it is given from the model's own configuration, the end of sequence among it
        self.model.generation_config.eos_token_id = None
        output = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=config, stopping_criteria=[watch]
        )
        if output.shape != (batch, length + new_tokens):
            raise BaselineError(f"generate returned {tuple(output.shape)}, not {new_tokens} new tokens a row")
        return batch * watch.steps / watch.seconds

    def _mixed(self, kind: str, prompts: list[list[int]], new_tokens: int) -> float:
        """Output tokens per second of all prompts at once through continuous batching, its set-up left out."""
        from transformers import ContinuousBatchingConfig, GenerationConfig

        settings: dict[str, Any] = {"use_cuda_graph": kind == "continuous-graphs"}
        if self.model.device.type == "cpu":
            # By default it takes most of the free memory, which on a processor is also that of other programs.
            blocks = sum(2 + (len(prompt) + new_tokens) // 256 for prompt in prompts)
            settings |= {"num_blocks": blocks, "max_batch_tokens": 256}
        started = time.perf_counter()
        results = self.model.generate_batch(
            prompts,
            generation_config=GenerationConfig(  # type: ignore[no-untyped-call]
                max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
            ),
            continuous_batching_config=ContinuousBatchingConfig(**settings),
            progress_bar=False,
            persistent_manager=True,
        )
        # the last answer, not the return: the manager's thread is joined in between
        seconds = max((result.lifespan[1] for result in results.values()), default=started) - started
        produced = sum(len(result.generated_tokens) for result in results.values())
        expected = new_tokens * len(prompts)
        if produced != expected or seconds <= 0:
            raise BaselineError(f"continuous batching produced {produced} tokens of {expected}")
        return produced / seconds


class _Watch:
    """A stopping criterion that never stops and reads the clock at two tokens, when the device has reached them."""

    def __init__(self, device: Any, *, last: int) -> None:
        self._device = device
        self._last = last
        self._first = min(_SKIP_TOKENS, last - 1)
        self._seen = 0
        self._times: list[float] = []
        self._never: Any = None

    @property
    def steps(self) -> int:
        """Decode steps between the two readings."""
        return self._last - self._first

    @property
    def seconds(self) -> float:
        """Seconds between the two readings."""
        begin, end = self._times
        return end - begin

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        import torch

        if self._never is None:
            self._never = torch.zeros(input_ids.shape[0], dtype=torch.bool, device=self._device)
        self._seen += 1
        if self._seen in (self._first, self._last):
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self._times.append(time.perf_counter())
        return self._never


def compiles(kind: str, device: str) -> bool:
    """Whether transformers compiles decode for `kind` on the device that `device` names: a static cache, no CPU."""
    from servers.engine.placement import resolve_device

    return kind == "static" and resolve_device(device).type != "cpu"
