"""What a user would run instead of a server: transformers' `generate` and its continuous batching.

They live in a process of their own, so that their compiled code and the arm's cannot meet, and answer one question at
a time, so that each measurement can stand next to one of the arm's.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from servers.config import ModelConfig

DECODE_KINDS = ("eager", "static")
MIXED_KINDS = ("continuous", "continuous-graphs")
KINDS = (*DECODE_KINDS, *MIXED_KINDS)

# Decode is timed from here on: under CUDA graphs the first tokens of a new batch size compile, warm up and record.
_SKIP_TOKENS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Run `kind` on these prompts, `new_tokens` each."""

    kind: str
    prompts: list[list[int]]
    new_tokens: int


class BaselineError(RuntimeError):
    """The baseline could not be run; the message says why."""


class Baselines:
    """The process that holds the plain model. Answers are tokens per second: of decode alone, or of the mixed set."""

    def __init__(self, model: ModelConfig, *, threads: int = 0) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=answer, args=(theirs, model, threads), name="baselines", daemon=True)
        self._process.start()
        theirs.close()
        self._vocab_size = 0

    @property
    def vocab_size(self) -> int:
        """Token ids go from 0 to this, exclusive. Waits until the model is loaded."""
        self._vocab_size = self._vocab_size or int(self._receive())
        return self._vocab_size

    def ask(self, question: Question) -> float:
        """Tokens per second. Raises BaselineError when it fails."""
        _ = self.vocab_size  # the process's first word
        try:
            self._pipe.send(question)
        except OSError:
            raise BaselineError("the baseline's process is gone") from None
        return self._receive()

    def _receive(self) -> float:
        try:
            answer = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(5.0)
            raise BaselineError(f"the baseline's process ended with exit code {self._process.exitcode}") from None
        if isinstance(answer, str):
            raise BaselineError(answer)
        return float(answer)

    def close(self) -> None:
        """The process is gone."""
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        self._pipe.close()
        self._process.join(10.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def answer(pipe: Any, config: ModelConfig, threads: int) -> None:
    """The body of the process: the vocabulary's size, then an answer to each question; a text says what failed."""
    # it warns of a persistent manager at every call
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    try:
        if threads:
            import torch

            torch.set_num_threads(threads)
        model = load_plain(config)
        pipe.send(float(model.config.get_text_config().vocab_size))
    except Exception as error:
        pipe.send(_reason(error))
        return
    runs = Runs(model)
    while True:
        try:
            question = pipe.recv()
        except EOFError:
            return
        if question is None:
            return
        try:
            pipe.send(runs.run(question))
        except Exception as error:
            pipe.send(_reason(error))


def _reason(error: Exception) -> str:
    first = str(error).splitlines()[0] if str(error) else "no detail"
    return f"{type(error).__name__}: {first}"


def load_plain(config: ModelConfig) -> Any:
    """The arm's model as transformers serves it: the same weights, dtype and device, with its own attention."""
    import torch
    from transformers import AutoModelForCausalLM

    from servers.engine.model import model_config, resolve_device, resolve_dtype

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

    def run(self, question: Question) -> float:
        """Tokens per second; a run that does not count goes before the first of a kind and batch size."""
        import torch

        work = self._mixed if question.kind in MIXED_KINDS else self._decode
        now = (question.kind, 0 if question.kind in MIXED_KINDS else len(question.prompts))
        if now != self._last:
            if self._last is not None:
                self._forget()
            if question.kind == "static":
                # Otherwise a second batch size makes the batch dynamic and its decode slower than a first would be.
                torch._dynamo.reset()
            # backwards: the same lengths, and nothing that prefix caching could find again
            work(replace(question, prompts=[prompt[::-1] for prompt in question.prompts]))
            self._last = now
        return work(question)

    def _forget(self) -> None:
        if hasattr(self.model, "destroy_cached_continuous_batching_manager"):
            self.model.destroy_cached_continuous_batching_manager()
        import torch

        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()

    def _decode(self, question: Question) -> float:
        """Decode tokens per second of one `generate`, the prefill and the first tokens left out."""
        import torch
        from transformers import GenerationConfig

        batch, length = len(question.prompts), len(question.prompts[0])
        watch = _Watch(self.model.device, last=question.new_tokens)
        ids = torch.tensor(question.prompts, device=self.model.device)
        config = GenerationConfig(  # type: ignore[no-untyped-call]
            max_new_tokens=question.new_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            **({"cache_implementation": "static"} if question.kind == "static" else {}),
        )
        # generate() completes what it is given from the model's own configuration, the end of sequence among it
        self.model.generation_config.eos_token_id = None
        output = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=config, stopping_criteria=[watch]
        )
        if output.shape != (batch, length + question.new_tokens):
            raise BaselineError(f"generate returned {tuple(output.shape)}, not {question.new_tokens} new tokens a row")
        return batch * watch.steps / watch.seconds

    def _mixed(self, question: Question) -> float:
        """Output tokens per second of all prompts at once through continuous batching, its set-up left out."""
        from transformers import ContinuousBatchingConfig, GenerationConfig

        settings: dict[str, Any] = {"use_cuda_graph": question.kind == "continuous-graphs"}
        if self.model.device.type == "cpu":
            # By default it takes most of the memory that is free, which on a processor is everybody's.
            blocks = sum(2 + (len(prompt) + question.new_tokens) // 256 for prompt in question.prompts)
            settings |= {"num_blocks": blocks, "max_batch_tokens": 256}
        started = time.perf_counter()
        results = self.model.generate_batch(
            question.prompts,
            generation_config=GenerationConfig(  # type: ignore[no-untyped-call]
                max_new_tokens=question.new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
            ),
            continuous_batching_config=ContinuousBatchingConfig(**settings),
            progress_bar=False,
            persistent_manager=True,
        )
        # the last answer, not the return: the manager's thread is joined in between
        seconds = max((result.lifespan[1] for result in results.values()), default=started) - started
        produced = sum(len(result.generated_tokens) for result in results.values())
        wanted = question.new_tokens * len(question.prompts)
        if produced != wanted or seconds <= 0:
            raise BaselineError(f"continuous batching produced {produced} tokens of {wanted}")
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
    from servers.engine.model import resolve_device

    return kind == "static" and resolve_device(device).type != "cpu"


def questions(kind: str, prompts: Sequence[list[int]], new_tokens: int) -> Question:
    """The question about `kind` on these prompts."""
    return Question(kind=kind, prompts=[list(prompt) for prompt in prompts], new_tokens=new_tokens)
