"""Asks every arm replica the same few prompts once the traffic is over, and compares the tokens or the vectors.

This runs after the trial's records are closed: it changes nothing that was measured, not even the shapes that an arm
without a warm-up has compiled so far.
"""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np

from loadtests.experiments.model import Experiment
from servers.rpc import inference_pb2, inference_pb2_grpc

PROMPTS = 6
TOKENS = 16
# An arm without a warm-up compiles for a shape that the traffic did not bring, several times over.
TIMEOUT_S = 600.0
# A replica that compiles works. One that brings no token and does not work for so long stands still.
STILL_S = 30.0

_POLL_S = 0.05
_WORK_EVERY_S = 1.0
_UNIT_WITHIN = 0.02  # as values in bfloat16 come
_LEAST_WORK = 0.05  # of a core; what health checks and telemetry take is less


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One prompt, the same for every arm."""

    prompt: tuple[int, ...]
    max_tokens: int


def questions(experiment: Experiment, *, trial: int, vocab_size: int) -> tuple[Question, ...]:
    """Fresh random prompts, spread evenly over orders of magnitude up to what every arm takes."""
    rng = np.random.default_rng([experiment.seed, trial, PROMPTS])
    engines = [arm.config.engine for arm in experiment.own_arms]
    longest = min(engine.max_prompt_tokens for engine in engines)
    tokens = min(TOKENS, *(engine.max_new_tokens for engine in engines))
    lengths = [round(math.exp(size)) for size in rng.uniform(0.0, math.log(longest), PROMPTS)]
    if experiment.task == "embed":
        tokens = 0
    return tuple(
        Question(prompt=tuple(rng.integers(vocab_size, size=length).tolist()), max_tokens=tokens) for length in lengths
    )


def ask(
    channel: grpc.Channel,
    prompts: Sequence[Question],
    *,
    check: Callable[[], None],
    timeout_s: float = TIMEOUT_S,
    still_s: float = STILL_S,
    worked_s: Callable[[], float | None] = lambda: None,
) -> list[list[int]] | str:
    """The tokens of each answer, all questions asked at once so that their rows share batches; or why there are none.

    `check` is called often and may raise to end the wait. It ends after `timeout_s`, and after `still_s` in which
    nothing came and `worked_s`, the replica's CPU seconds, hardly grew; where that is None, only after `timeout_s`.
    """
    stub = _stub(channel)
    answers: list[list[int]] = [[] for _ in prompts]
    calls = [
        stub.Generate(
            inference_pb2.GenerateRequest(
                request_id=f"parity-{number}",
                token_ids=inference_pb2.TokenIds(ids=question.prompt),
                max_tokens=question.max_tokens,
                ignore_eos=True,
            ),
            timeout=timeout_s,
        )
        for number, question in enumerate(prompts)
    ]
    return _awaited(calls, _read_tokens, answers, check=check, still_s=still_s, worked_s=worked_s) or answers


def ask_vectors(
    channel: grpc.Channel,
    prompts: Sequence[Question],
    *,
    check: Callable[[], None],
    timeout_s: float = TIMEOUT_S,
    still_s: float = STILL_S,
    worked_s: Callable[[], float | None] = lambda: None,
) -> list[list[float]] | str:
    """The vector of each prompt, all asked at once so that they share batches; or why there are none.

    All is as for `ask`. A vector that is not of unit length is none: the load and its clients take it for one.
    """
    stub = _stub(channel)
    answers: list[list[float]] = [[] for _ in prompts]
    calls = [
        stub.Embed.future(
            inference_pb2.EmbedRequest(
                request_id=f"parity-{number}", token_ids=inference_pb2.TokenIds(ids=question.prompt)
            ),
            timeout=timeout_s,
        )
        for number, question in enumerate(prompts)
    ]
    if problem := _awaited(calls, _read_vector, answers, check=check, still_s=still_s, worked_s=worked_s):
        return problem
    for question, vector in zip(prompts, answers, strict=True):
        length = math.hypot(*vector)
        if not abs(length - 1.0) <= _UNIT_WITHIN:  # NaN too
            return (
                f"the vector of {len(question.prompt)} tokens has {len(vector)} values and length {length:.3g}, not 1"
            )
    return answers


def _stub(channel: grpc.Channel) -> Any:
    return inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]


def _awaited(
    calls: Sequence[Any],
    read: Callable[[Any, list[Any]], None],
    answers: Sequence[list[Any]],
    *,
    check: Callable[[], None],
    still_s: float,
    worked_s: Callable[[], float | None],
) -> str:
    """Every call was read into its answer by threads (returns ""), or why not; then none is under way any more."""
    readers = ThreadPoolExecutor(max_workers=len(calls), thread_name_prefix="answers")
    try:
        reads = [readers.submit(read, call, answer) for call, answer in zip(calls, answers, strict=True)]
        idle = _IdleTime(worked_s)
        while not all(item.done() for item in reads):
            check()
            if idle.seconds(sum(map(len, answers))) > still_s:
                return f"it stands still: no answer came and its processes did nothing for {still_s:g} s"
            time.sleep(_POLL_S)
        for item in reads:
            item.result()
        return ""
    except grpc.RpcError as error:
        return f"{error.code().name}: {error.details()}"
    finally:
        for call in calls:
            call.cancel()
        readers.shutdown()


def _read_tokens(call: Any, tokens: list[int]) -> None:
    for chunk in call:
        tokens.extend(chunk.token_ids)


def _read_vector(call: Any, values: list[float]) -> None:
    values.extend(call.result().values)


class _IdleTime:
    """How long a replica has brought nothing and done no work."""

    def __init__(self, worked_s: Callable[[], float | None]) -> None:
        self._worked_s = worked_s
        self._active = self._looked = time.monotonic()
        self._tokens = 0
        self._work = worked_s()

    def seconds(self, tokens: int) -> float:
        """Seconds without a new token or value and without work. 0 where the work cannot be measured."""
        now = time.monotonic()
        if tokens != self._tokens:
            self._tokens, self._active = tokens, now
        if now - self._looked >= _WORK_EVERY_S:
            work = self._worked_s()
            if work is None or self._work is None or abs(work - self._work) > _LEAST_WORK * (now - self._looked):
                self._active = now
            self._work, self._looked = work, now
        return 0.0 if self._work is None else now - self._active


@dataclass(slots=True)
class ExpectedAnswers:
    """What the control answered in an earlier trial, for arms that are not there together; None until it has."""

    answers: list[Any] | str | None = None

    def keep(self, first: str, answers: Mapping[str, list[Any] | str]) -> None:
        """What the replica `first` answered is kept; what it answered before counts, once there is an answer."""
        if first in answers and (self.answers is None or isinstance(self.answers, str)):
            self.answers = answers[first]


def compared(
    answers: Mapping[str, list[list[int]] | str],
    arms: Mapping[str, str],
    *,
    first: str,
    expected: list[list[int]] | str | None = None,
) -> list[dict[str, Any]]:
    """A row for each replica in `answers`: how many of its answers are those of the replica `first`, or as `expected`.

    `arms` names each replica's arm.
    """
    if expected is None:
        expected = answers.get(first, "nothing yet")
    rows: list[dict[str, Any]] = []
    for replica, given in answers.items():
        row: dict[str, Any] = {"arm": arms[replica], "replica": replica, "error": None}
        if isinstance(given, str) or isinstance(expected, str):
            row |= {"error": given if isinstance(given, str) else f"{first} answered {expected}", "same": 0}
        else:
            row["same"] = sum(map(operator.eq, given, expected))
        rows.append({**row, "of": 0 if isinstance(expected, str) else len(expected)})
    return rows


def compared_vectors(
    answers: Mapping[str, list[list[float]] | str],
    arms: Mapping[str, str],
    *,
    first: str,
    least: float,
    expected: list[list[float]] | str | None = None,
) -> list[dict[str, Any]]:
    """A row for each replica in `answers`: how many of its vectors have a cosine of `least` or more with those of the
    replica `first`, or with `expected`, and the lowest cosine.
    """
    if expected is None:
        expected = answers.get(first, "nothing yet")
    rows: list[dict[str, Any]] = []
    for replica, given in answers.items():
        row: dict[str, Any] = {"arm": arms[replica], "replica": replica, "error": None}
        if isinstance(given, str) or isinstance(expected, str):
            row |= {"error": given if isinstance(given, str) else f"{first} answered {expected}", "same": 0}
        else:
            cosines = [cosine(vector, reference) for vector, reference in zip(given, expected, strict=True)]
            row |= {"same": sum(value >= least for value in cosines), "cosine": min(cosines)}
        rows.append({**row, "of": 0 if isinstance(expected, str) else len(expected), "min_cosine": least})
    return rows


def cosine(one: Sequence[float], other: Sequence[float]) -> float:
    """The cosine of the angle between two vectors; -1 where they have other sizes or one has no direction."""
    scale = math.hypot(*one) * math.hypot(*other)
    if len(one) != len(other) or not scale:
        return -1.0
    return max(-1.0, min(1.0, math.fsum(map(operator.mul, one, other)) / scale))
