"""Asks every arm replica the same few greedy prompts once the traffic is over, and compares the tokens.

This runs after the trial's records are closed: it changes nothing that was measured, not even the shapes that an arm
without a warm-up has compiled so far.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import zip_longest
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

    `check` is called often and may raise to end the wait. It ends after `timeout_s`, and after `still_s` in which no
    token came and `worked_s`, the replica's CPU seconds, hardly grew; where that is None, only after `timeout_s`.
    """
    stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
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
    answers: list[list[int]] = [[] for _ in calls]
    readers = ThreadPoolExecutor(max_workers=len(calls), thread_name_prefix="answers")
    try:
        reads = [readers.submit(_read, call, tokens) for call, tokens in zip(calls, answers, strict=True)]
        idle = _IdleTime(worked_s)
        while not all(read.done() for read in reads):
            check()
            if idle.seconds(sum(map(len, answers))) > still_s:
                return f"it stands still: no token came and its processes did nothing for {still_s:g} s"
            time.sleep(_POLL_S)
        for read in reads:
            read.result()
        return answers
    except grpc.RpcError as error:
        return f"{error.code().name}: {error.details()}"
    finally:
        for call in calls:
            call.cancel()
        readers.shutdown()


def _read(call: Any, tokens: list[int]) -> None:
    for chunk in call:
        tokens.extend(chunk.token_ids)


class _IdleTime:
    """How long a replica has brought no token and done no work."""

    def __init__(self, worked_s: Callable[[], float | None]) -> None:
        self._worked_s = worked_s
        self._active = self._looked = time.monotonic()
        self._tokens = 0
        self._work = worked_s()

    def seconds(self, tokens: int) -> float:
        """Seconds without a new token and without work. 0 where the work cannot be measured."""
        now = time.monotonic()
        if tokens != self._tokens:
            self._tokens, self._active = tokens, now
        if now - self._looked >= _WORK_EVERY_S:
            work = self._worked_s()
            if work is None or self._work is None or abs(work - self._work) > _LEAST_WORK * (now - self._looked):
                self._active = now
            self._work, self._looked = work, now
        return 0.0 if self._work is None else now - self._active


def compared(
    answers: Mapping[str, list[list[int]] | str], arms: Mapping[str, str], *, first: str
) -> list[dict[str, Any]]:
    """A row for each replica in `answers`: how many of its answers are those of the replica `first`.

    `arms` names each replica's arm. `departs` is the earliest token at which an answer differs, as (question, token).
    """
    expected = answers[first]
    rows: list[dict[str, Any]] = []
    for replica, given in answers.items():
        row: dict[str, Any] = {"arm": arms[replica], "replica": replica, "error": None, "departs": None}
        if isinstance(given, str) or isinstance(expected, str):
            row |= {"error": given if isinstance(given, str) else f"{first} answered {expected}", "same": 0}
        else:
            departs = [departure(tokens, reference) for tokens, reference in zip(given, expected, strict=True)]
            known = [(token, question) for question, token in enumerate(departs) if token is not None]
            row["same"] = len(departs) - len(known)
            if known:
                row["departs"] = [*reversed(min(known))]
        rows.append({**row, "of": 0 if isinstance(expected, str) else len(expected)})
    return rows


def departure(tokens: Sequence[int], reference: Sequence[int]) -> int | None:
    """The index of the first token that differs, also where one answer goes on and the other ends; None if equal."""
    pairs = enumerate(zip_longest(tokens, reference))
    return next((token for token, (one, other) in pairs if one != other), None)
