"""Numbers from what was observed: steady decode steps, rates, latencies, spreads, paired ratios. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from servers.compiler.events import CompileEvent
from servers.engine.messages import StepOutput


@dataclass(slots=True, kw_only=True)
class Answer:
    """What became of one request. Times are ns since the epoch on the observer's clock."""

    prompt_tokens: int
    due_ns: int
    token_ns: list[int]
    status: str = ""  # a gRPC status name; empty while it is not known


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One stretch of traffic and what was seen of it; `outputs` and `events` are empty where only a client looked."""

    start_ns: int
    end_ns: int
    answers: dict[str, Answer]
    outputs: list[StepOutput]
    events: list[CompileEvent]

    @property
    def output_tokens(self) -> int:
        """Tokens that came."""
        return sum(len(answer.token_ns) for answer in self.answers.values())

    @property
    def failed(self) -> dict[str, int]:
        """Requests that ended otherwise than OK, by status."""
        ended = (answer.status or "UNANSWERED" for answer in self.answers.values())
        return dict(Counter(status for status in ended if status != "OK"))


class NothingMeasuredError(Exception):
    """The traffic never reached the state that was to be measured; the message says what would."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SteadyDecode:
    """Decode while every row was busy: `steps` steps of `batch` rows in `seconds`, attending to `positions` each."""

    batch: int
    steps: int
    seconds: float
    step_ms: float  # the median step
    positions: float  # cache positions read by a step, summed over its rows; mean over the steps

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second over the steady steps."""
        return self.batch * self.steps / self.seconds


def steady_decode(outputs: Sequence[StepOutput], prompt_tokens: Mapping[str, int], batch: int) -> SteadyDecode:
    """The decode steps with `batch` rows that followed on another such step, timed from emission to emission.

    prompt_tokens: prompt length by request id. A step that waited behind a prefill, or that follows on a step with
    fewer or more rows, does not count. Raises NothingMeasuredError when there is none.
    """
    emitted: Counter[str] = Counter()
    durations: list[int] = []
    positions: list[int] = []
    last_ns: int | None = None  # when the step before was emitted, if that was a full decode step
    for output in outputs:
        full = output.step is not None and output.step.kind == "decode" and output.step.batch == batch
        full = full and len(output.tokens) == batch
        if full and last_ns is not None:
            durations.append(output.emit_ns - last_ns)
            positions.append(sum(prompt_tokens[name] + emitted[name] for name, _ in output.tokens))
        if output.step is not None:
            last_ns = output.emit_ns if full else None
        emitted.update(name for name, _ in output.tokens)
    if not durations:
        raise NothingMeasuredError(f"no decode step had {batch} rows twice in a row: ask for more new tokens")
    return SteadyDecode(
        batch=batch,
        steps=len(durations),
        seconds=sum(durations) / 1e9,
        step_ms=float(np.median(durations)) / 1e6,
        positions=float(np.mean(positions)),
    )


# Of an answer's tokens, how many may come with the first before it counts as a burst.
_BURST_SHARE = 0.1


def steady_arrivals(answers: Iterable[Answer]) -> float:
    """Tokens per second as a client sees them, between the last first token and the first ending of all answers.

    Raises NothingMeasuredError when the answers did not stream side by side, or when one began with a burst: what was
    held back before it would make the rest look fast.
    """
    times = [answer.token_ns for answer in answers]
    together = all(times)
    start_ns = max(tokens[0] for tokens in times) if together else 0
    end_ns = min(tokens[-1] for tokens in times) if together else 0
    if end_ns <= start_ns:
        raise NothingMeasuredError("the answers never streamed all at once: ask for more new tokens")
    burst = max(tokens.count(tokens[0]) - 1 for tokens in times)
    if burst > _BURST_SHARE * max(len(tokens) for tokens in times):
        raise NothingMeasuredError(f"{burst} tokens came at once with a first one: the wire was held up")
    count = sum(start_ns < at_ns <= end_ns for tokens in times for at_ns in tokens)
    return count / ((end_ns - start_ns) / 1e9)


def throughput(session: Session) -> float:
    """Output tokens per second from the start to the last token."""
    last_ns = max((answer.token_ns[-1] for answer in session.answers.values() if answer.token_ns), default=0)
    if last_ns <= session.start_ns:
        raise NothingMeasuredError("no token came")
    return session.output_tokens / ((last_ns - session.start_ns) / 1e9)


def spread(values: Sequence[float]) -> dict[str, Any]:
    """A sample of at least one: its size, extremes, quartiles and median (linear between order statistics)."""
    low, q1, median, q3, high = (float(item) for item in np.quantile(values, [0.0, 0.25, 0.5, 0.75, 1.0]))
    return {"n": len(values), "min": low, "q1": q1, "median": median, "q3": q3, "max": high}


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float] | None:
    """Two order statistics that hold the true median with at least `confidence`, whatever the law (the sign test's).

    None when even the extremes do not: at 95 % that is below six values.
    """
    ordered = sorted(values)
    n = len(ordered)
    interval = None
    below = 0.0  # P(Binomial(n, 1/2) <= rank - 1)
    for rank in range(n // 2):
        below += math.comb(n, rank) / 2**n
        if 1.0 - 2.0 * below < confidence:
            break
        interval = (ordered[rank], ordered[n - 1 - rank])
    return interval


def paired_ratio(a: Sequence[float], b: Sequence[float]) -> dict[str, Any]:
    """a ÷ b over pairs measured next to each other: low … high is a distribution-free 95 % interval of the median.

    None below six pairs.
    """
    ratios = [one / other for one, other in zip(a, b, strict=True)]
    low, high = median_interval(ratios) or (None, None)
    sample = spread(ratios)
    return {"pairs": len(ratios), "median": sample["median"], "low": low, "high": high, "spread": sample}


def latencies(answers: Iterable[Answer]) -> dict[str, float | None]:
    """TTFT from the due time and pooled inter-token gaps in ms; None where no request gives one."""
    finished = [answer for answer in answers if answer.status == "OK" and answer.token_ns]
    first = [(answer.token_ns[0] - answer.due_ns) / 1e6 for answer in finished]
    gaps = [np.diff(answer.token_ns) / 1e6 for answer in finished if len(answer.token_ns) > 1]
    pooled = np.concatenate(gaps) if gaps else np.array([])
    p50, p99 = _quantile(pooled, 0.5), _quantile(pooled, 0.99)
    return {
        "p50_ttft_ms": _quantile(first, 0.5),
        "p99_ttft_ms": _quantile(first, 0.99),
        "p50_itl_ms": p50,
        "p99_itl_ms": p99,
        "max_itl_ms": _quantile(pooled, 1.0),
        "p99_itl_over_median": p99 / p50 if p50 and p99 is not None else None,
    }


def _quantile(values: Any, q: float) -> float | None:
    return float(np.quantile(values, q)) if len(values) else None


def tokens_in_window(outputs: Iterable[StepOutput], start_ns: int, end_ns: int) -> int:
    """Tokens emitted after `start_ns` and not after `end_ns`."""
    return sum(len(output.tokens) for output in outputs if start_ns < output.emit_ns <= end_ns)
