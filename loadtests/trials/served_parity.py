"""Ask every arm replica the same few prompts once the traffic is over, and compare the tokens or the vectors.

This runs after the trial's records are closed: it changes nothing that was measured, not even the shapes that an arm
without a warm-up has compiled so far.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

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


Question = inference_pb2.GenerateRequest | inference_pb2.EmbedRequest


def questions(experiment: Experiment, *, trial: int, vocab_size: int) -> list[Question]:
    """Return fresh random prompts, spread evenly over orders of magnitude up to what every arm takes."""
    rng = np.random.default_rng([experiment.seed, trial, PROMPTS])
    engines = [arm.engine for arm in experiment.managed_arms]
    longest = min(engine.max_prompt_tokens for engine in engines)
    tokens = min(TOKENS, *(engine.max_new_tokens for engine in engines))
    asked: list[Question] = []
    for number, size in enumerate(rng.uniform(0.0, math.log(longest), PROMPTS)):
        ids = inference_pb2.TokenIds(ids=rng.integers(vocab_size, size=round(math.exp(size))).tolist())
        what: dict[str, Any] = {"request_id": f"parity-{number}", "token_ids": ids}
        if experiment.task == "embed":
            asked.append(inference_pb2.EmbedRequest(**what))
        else:
            asked.append(inference_pb2.GenerateRequest(**what, max_tokens=tokens, ignore_eos=True))
    return asked


def ask(
    channel: grpc.Channel, asked: Sequence[Question], *, check: Callable[[], None], timeout_s: float
) -> Answers | str:
    """Return the tokens or the vector of each prompt, all asked at once so that they share batches; or why not.

    `check` is called often and may raise to end the wait. A vector that is not of unit length is none: the load and its
    clients take it for one.
    """
    stub: Any = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]

    def answer(question: Question) -> list[Any] | str:
        try:
            if isinstance(question, inference_pb2.GenerateRequest):
                return [token for chunk in stub.Generate(question, timeout=timeout_s) for token in chunk.token_ids]
            vector = list(stub.Embed(question, timeout=timeout_s).values)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                return f"an answer was not complete after {timeout_s:g} s"
            return f"{error.code().name}: {error.details()}"
        if abs((length := math.hypot(*vector)) - 1.0) <= _UNIT_WITHIN:
            return vector
        what = f"the vector of {len(question.token_ids.ids)} tokens"
        return f"{what} has {len(vector)} values and length {length:.3g}, not 1"

    tasks = [partial(answer, question) for question in asked]
    answers: Answers = []
    for given in in_threads(tasks, at_once=len(tasks), wait=lambda _: check()):
        if isinstance(given, str):
            return given
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
        row: dict[str, Any] = {"arm": arms[replica], "replica": replica, "error": None, "same": 0, "of": 0}
        if isinstance(given, str) or isinstance(right, str):
            row["error"] = given if isinstance(given, str) else f"{first} answered {right}"
        elif least is None:
            row |= {"same": sum(map(operator.eq, given, right)), "of": len(right)}
        else:
            from tailgate.analysis.parity.vectors import cosines

            near = [
                float(cosines([one], [other])[0]) if len(one) == len(other) else -1.0
                for one, other in zip(given, right, strict=True)
            ]
            row |= {"same": sum(value >= least for value in near), "of": len(right)}
            row |= {"cosine": min(near), "min_cosine": least}
        rows.append(row)
    return rows
