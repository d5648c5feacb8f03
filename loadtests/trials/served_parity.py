"""Ask every arm replica the same few prompts once the traffic is over, and compare the tokens or the vectors.

This runs after the trial's records are closed: it changes nothing that was measured, not even the shapes that an arm
without a warm-up has compiled so far.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import grpc
import numpy as np

from tailgate.loadtests.experiments.model import Experiment
from tailgate.loadtests.external.answers import in_threads
from tailgate.servers.rpc import inference_pb2, inference_pb2_grpc

PROMPTS = 6
TOKENS = 16
# An arm without a warm-up compiles for a shape that the traffic did not bring, several times over.
TIMEOUT_S = 600.0

_UNIT_WITHIN = 0.02  # as values in bfloat16 come

Answers = list[list[Any]]  # of each prompt: its tokens, or its vector


class Question(NamedTuple):
    """One prompt, the same for every arm."""

    prompt: tuple[int, ...]
    max_tokens: int


def questions(experiment: Experiment, *, trial: int, vocab_size: int) -> tuple[Question, ...]:
    """Return fresh random prompts, spread evenly over orders of magnitude up to what every arm takes."""
    rng = np.random.default_rng([experiment.seed, trial, PROMPTS])
    engines = [arm.engine for arm in experiment.own_arms]
    longest = min(engine.max_prompt_tokens for engine in engines)
    tokens = 0 if experiment.task == "embed" else min(TOKENS, *(engine.max_new_tokens for engine in engines))
    lengths = [round(math.exp(size)) for size in rng.uniform(0.0, math.log(longest), PROMPTS)]
    return tuple(Question(tuple(rng.integers(vocab_size, size=length).tolist()), tokens) for length in lengths)


def ask(
    channel: grpc.Channel, prompts: Sequence[Question], *, embeds: bool, check: Callable[[], None], timeout_s: float
) -> Answers | str:
    """Return the tokens or the vector of each prompt, all asked at once so that they share batches; or why not.

    `check` is called often and may raise to end the wait. A vector that is not of unit length is none: the load and its
    clients take it for one.
    """
    stub: Any = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]

    def answer(number: int, question: Question) -> list[Any] | str:
        name, ids = f"parity-{number}", inference_pb2.TokenIds(ids=question.prompt)
        try:
            if embeds:
                text = inference_pb2.EmbedRequest(request_id=name, token_ids=ids)
                return list(stub.Embed(text, timeout=timeout_s).values)
            request = inference_pb2.GenerateRequest(
                request_id=name, token_ids=ids, max_tokens=question.max_tokens, ignore_eos=True
            )
            return [token for chunk in stub.Generate(request, timeout=timeout_s) for token in chunk.token_ids]
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                return f"an answer was not complete after {timeout_s:g} s"
            return f"{error.code().name}: {error.details()}"

    tasks = [partial(answer, number, question) for number, question in enumerate(prompts)]
    answers: Answers = []
    for question, given in zip(prompts, in_threads(tasks, at_once=len(tasks), wait=lambda _: check()), strict=True):
        if isinstance(given, str):
            return given
        if embeds and not abs((length := math.hypot(*given)) - 1.0) <= _UNIT_WITHIN:  # NaN too
            what = f"the vector of {len(question.prompt)} tokens"
            return f"{what} has {len(given)} values and length {length:.3g}, not 1"
        answers.append(given)
    return answers


def compared(
    answers: Mapping[str, Answers | str],
    arms: Mapping[str, str],
    *,
    first: str,
    least: float | None = None,
    expected: Answers | None = None,
) -> list[dict[str, Any]]:
    """Return a row for each replica in `answers`: how many of its answers are those of the replica `first`, or as
    `expected`. `arms` names each replica's arm.

    Tokens must be equal; with `least`, answers are vectors, of which the cosine must be so much at least.
    """
    right = expected or answers.get(first, "nothing yet")
    rows: list[dict[str, Any]] = []
    for replica, given in answers.items():
        row: dict[str, Any] = {"arm": arms[replica], "replica": replica, "error": None, "same": 0}
        if isinstance(given, str) or isinstance(right, str):
            row["error"] = given if isinstance(given, str) else f"{first} answered {right}"
        elif least is None:
            row["same"] = sum(map(operator.eq, given, right))
        else:
            cosines = [cosine(vector, reference) for vector, reference in zip(given, right, strict=True)]
            row |= {"same": sum(value >= least for value in cosines), "cosine": min(cosines)}
        row["of"] = 0 if isinstance(right, str) else len(right)
        rows.append(row if least is None else {**row, "min_cosine": least})
    return rows


def cosine(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the cosine of the angle between two vectors; -1 where they have other sizes or one has no direction."""
    scale = math.hypot(*one) * math.hypot(*other)
    if len(one) != len(other) or not scale:
        return -1.0
    return min(1.0, math.fsum(map(operator.mul, one, other)) / scale)
