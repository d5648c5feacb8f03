"""What the benchmark asks for: fresh random prompts, the mixed set, random churn, rows of a trace. No clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from analysis.wording import counted
from servers.fields import ConfigError

FIRST_TOKEN_ID = 3  # ids below are padding, start and end of text in the common vocabularies

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt, how many tokens to generate, and when it is due after the start (open loop)."""

    prompt: list[int]
    max_tokens: int
    offset_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Sizes of the measured work. Prompt lengths of the mixed set are lognormal (mu, sigma), clipped to low … high.

    The defaults are what an 8B model on a data-centre GPU is measured with.
    """

    decode_prompt: int = 128
    decode_new: int = 256
    mixed_requests: int = 96
    mixed_new: int = 128
    mixed_mu: float = 5.5
    mixed_sigma: float = 1.0
    mixed_low: int = 8
    mixed_high: int = 1024
    slots: int = 32
    max_queue: int = 512
    max_prompt_tokens: int = 1024
    max_new_tokens: int = 256
    churn_requests: int = 200


WORKLOADS = {
    "full": Workload(),
    # The same in small, for random:tiny on a laptop's processor.
    "small": Workload(
        decode_prompt=16,
        mixed_requests=24,
        mixed_new=16,
        mixed_mu=3.0,
        mixed_sigma=0.7,
        mixed_low=4,
        mixed_high=64,
        slots=8,
        max_queue=128,
        max_prompt_tokens=64,
        churn_requests=40,
    ),
}


def prompts(lengths: Sequence[int] | IntArray, vocab_size: int, rng: np.random.Generator) -> list[list[int]]:
    """One prompt of random token ids for each length."""
    ids = rng.integers(FIRST_TOKEN_ID, vocab_size, size=int(np.sum(lengths)))
    return [prompt.tolist() for prompt in np.split(ids, np.cumsum(lengths)[:-1])] if len(lengths) else []


def decode_set(work: Workload, batch: int, vocab_size: int, rng: np.random.Generator) -> list[Request]:
    """`batch` requests of equal size, so that they decode together."""
    return [
        Request(prompt=prompt, max_tokens=work.decode_new)
        for prompt in prompts([work.decode_prompt] * batch, vocab_size, rng)
    ]


def mixed_lengths(work: Workload, rng: np.random.Generator) -> IntArray:
    """Prompt lengths of the mixed set."""
    drawn = np.exp(rng.normal(work.mixed_mu, work.mixed_sigma, work.mixed_requests))
    return np.clip(np.rint(drawn), work.mixed_low, work.mixed_high).astype(np.int64)


def mixed_set(work: Workload, vocab_size: int, rng: np.random.Generator) -> list[Request]:
    """Prompts of very different lengths, the same number of new tokens each, all due at once."""
    return [
        Request(prompt=prompt, max_tokens=work.mixed_new)
        for prompt in prompts(mixed_lengths(work, rng), vocab_size, rng)
    ]


def churn_set(count: int, *, max_prompt: int, max_new: int, vocab_size: int, rng: np.random.Generator) -> list[Request]:
    """Any admissible request: prompt and output lengths uniform over all that the engine takes, its limits included."""
    lengths = rng.integers(1, max_prompt + 1, size=count)
    outputs = rng.integers(1, max_new + 1, size=count)
    if count >= 2:
        lengths[:2], outputs[:2] = (1, max_prompt), (max_new, max_new)
    return [
        Request(prompt=prompt, max_tokens=int(output))
        for prompt, output in zip(prompts(lengths, vocab_size, rng), outputs, strict=True)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Lengths and due times of trace requests that the engine can take: three columns of equal length."""

    offset_ns: IntArray
    input_tokens: IntArray
    output_tokens: IntArray

    def __len__(self) -> int:
        return len(self.offset_ns)

    def take(self, which: slice | IntArray, *, time_scale: float = 1.0) -> Rows:
        """Some of the rows, due times multiplied by `time_scale`."""
        return Rows(
            offset_ns=np.rint(self.offset_ns[which] * time_scale).astype(np.int64),
            input_tokens=self.input_tokens[which],
            output_tokens=self.output_tokens[which],
        )

    def requests(self, vocab_size: int, rng: np.random.Generator) -> list[Request]:
        """The rows with fresh random prompts."""
        made = prompts(self.input_tokens, vocab_size, rng)
        return [
            Request(prompt=prompt, max_tokens=int(output), offset_ns=int(offset))
            for prompt, output, offset in zip(made, self.output_tokens, self.offset_ns, strict=True)
        ]


def first_seconds(rows: Rows, *, duration_s: float, time_scale: float) -> Rows:
    """The rows due within `duration_s` once the trace's time is multiplied by `time_scale`."""
    count = int(np.searchsorted(rows.offset_ns * time_scale, duration_s * 1e9, side="left"))
    if count == 0:
        raise ConfigError(f"the trace has no request within {duration_s:g} s: raise --duration")
    return rows.take(slice(count), time_scale=time_scale)


def paced(rows: Rows, *, tokens_per_s: float, share: float, duration_s: float) -> tuple[Rows, float]:
    """(rows, time scale): the trace's first rows, stretched in time to ask `share` of `tokens_per_s` for `duration_s`.

    The rows are as many as hold share × tokens_per_s × duration_s output tokens; the last is due at the end.
    """
    needed = share * tokens_per_s * duration_s
    produced = np.cumsum(rows.output_tokens)
    count = int(np.searchsorted(produced, needed, side="right"))
    if count >= len(rows):
        raise ConfigError(
            f"the trace has {len(rows)} requests with {int(produced[-1])} output tokens, {duration_s:g} s at this pace "
            f"take {needed:.0f}: lower --duration or --saturation-share"
        )
    if count < 2 or rows.offset_ns[count - 1] == 0:
        raise ConfigError(f"{duration_s:g} s hold {counted(count, 'request')} at this pace: raise --duration")
    scale = duration_s * 1e9 / float(rows.offset_ns[count - 1])
    return rows.take(slice(count), time_scale=scale), scale


def trace_rows(path: str, *, max_prompt: int, max_new: int) -> Rows:
    """The requests of a published trace, lengths clipped to what the engine takes."""
    from loadtests.traffic.traces import read_trace

    trace = read_trace(path)
    return Rows(
        offset_ns=trace.offset_ns,
        input_tokens=np.minimum(trace.input_tokens, max_prompt).astype(np.int64),
        output_tokens=np.minimum(trace.output_tokens, max_new).astype(np.int64),
    )
