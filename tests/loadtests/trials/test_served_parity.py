import itertools
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest

from loadtests.experiments.model import Experiment
from loadtests.experiments.reading import from_table
from loadtests.trials import served_parity
from loadtests.trials.served_parity import (
    PROMPTS,
    TOKENS,
    Question,
    ask,
    ask_vectors,
    compared,
    compared_vectors,
    cosine,
    departure,
    questions,
)
from servers.config import ArmConfig
from servers.rpc import inference_pb2, inference_pb2_grpc
from tests.fakes.arm import Arm


def experiment(**engine: Any) -> Experiment:
    arms = [{"preset": "eager", "control": True}, {"preset": "eager-padded"}]
    return from_table({"name": "small", "seed": 3, "engine": engine, "arms": arms, "traffic": {"rate": 1}})


@pytest.fixture
def channel() -> Iterator[grpc.Channel]:
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=PROMPTS))
    arm = Arm(ArmConfig(), "eager-0", stall_s=0.0)
    inference_pb2_grpc.add_InferenceServicer_to_server(arm, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as opened:
        yield opened
    server.stop(0.0).wait()


def nothing() -> None:
    """Nobody wants an end."""


def test_questions_fit_every_arm_and_differ_by_trial() -> None:
    small = experiment(max_prompt_tokens=40, max_new_tokens=9)
    asked = questions(small, trial=1, vocab_size=50)
    assert len(asked) == PROMPTS
    assert all(1 <= len(question.prompt) <= 40 for question in asked)
    assert {question.max_tokens for question in asked} == {9}
    assert {token for question in asked for token in question.prompt} <= set(range(50))
    assert questions(small, trial=1, vocab_size=50) == asked
    assert questions(small, trial=2, vocab_size=50) != asked
    assert questions(experiment(), trial=1, vocab_size=50)[0].max_tokens == TOKENS


def test_every_question_is_answered_in_full(channel: grpc.Channel) -> None:
    asked = [Question(prompt=(1, 2, 3), max_tokens=4), Question(prompt=(1,), max_tokens=7)]
    assert ask(channel, asked, check=nothing) == [[5] * 4, [5] * 7]


def test_a_server_that_is_gone_is_told_in_its_own_words() -> None:
    with grpc.insecure_channel("127.0.0.1:1") as nowhere:
        said = ask(nowhere, [Question(prompt=(1,), max_tokens=1)], check=nothing)
    assert isinstance(said, str)
    assert said.startswith("UNAVAILABLE")


def test_the_wait_for_answers_can_be_ended(channel: grpc.Channel) -> None:
    class StopError(Exception):
        pass

    def check() -> None:
        raise StopError

    with pytest.raises(StopError):
        ask(channel, [Question(prompt=(1,), max_tokens=1000)], check=check)


def test_each_replica_is_compared_with_the_first_of_the_control() -> None:
    answers = {"eager-0": [[1, 2], [3, 4]], "padded-0": [[1, 2], [3, 9]], "padded-1": "UNAVAILABLE: gone"}
    arms = {"eager-0": "eager", "padded-0": "padded", "padded-1": "padded"}
    assert compared(answers, arms, first="eager-0") == [  # type: ignore[arg-type]
        {"arm": "eager", "replica": "eager-0", "error": None, "departs": None, "same": 2, "of": 2},
        {"arm": "padded", "replica": "padded-0", "error": None, "departs": [1, 1], "same": 1, "of": 2},
        {"arm": "padded", "replica": "padded-1", "error": "UNAVAILABLE: gone", "departs": None, "same": 0, "of": 2},
    ]


def test_without_the_control_nobody_can_be_compared() -> None:
    rows = compared({"eager-0": "gone", "padded-0": [[1]]}, {"eager-0": "eager", "padded-0": "padded"}, first="eager-0")
    assert [row["error"] for row in rows] == ["gone", "eager-0 answered gone"]


@pytest.mark.parametrize(
    ("mine", "theirs", "expected"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([], [1], 0), ([], [], None)],
)
def test_an_answer_departs_at_its_first_other_token_or_at_its_end(
    mine: list[int], theirs: list[int], expected: int | None
) -> None:
    assert departure(mine, theirs) == expected


@pytest.fixture
def busy_channel() -> Iterator[grpc.Channel]:
    """To an arm whose first answer takes half a second, as one that compiles."""
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=PROMPTS))
    arm = Arm(ArmConfig(name="naive", preset="compiled-naive"), "naive-0", stall_s=0.5)
    inference_pb2_grpc.add_InferenceServicer_to_server(arm, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as opened:
        yield opened
    server.stop(0.0).wait()


def test_an_arm_that_works_is_waited_for_and_one_that_does_not_is_left(
    busy_channel: grpc.Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_parity, "_WORK_EVERY_S", 0.05)
    asked = [Question(prompt=(1,), max_tokens=2)]
    said = ask(busy_channel, asked, check=nothing, still_s=0.2, worked_s=lambda: 7.0)
    assert said == "it stands still: no answer came and its processes did nothing for 0.2 s"
    busy = itertools.count()
    longer = [Question(prompt=(1,) * 40, max_tokens=2)]
    assert ask(busy_channel, longer, check=nothing, still_s=0.2, worked_s=lambda: float(next(busy))) == [[5, 5]]


def test_every_text_has_a_vector_of_unit_length(channel: grpc.Channel) -> None:
    given = ask_vectors(
        channel, [Question(prompt=(1, 2, 3), max_tokens=0), Question(prompt=(1,), max_tokens=0)], check=nothing
    )
    assert not isinstance(given, str)
    assert [len(vector) for vector in given] == [2, 2]
    assert given[0] != given[1]


class _LongVectors(inference_pb2_grpc.InferenceServicer):
    def Embed(self, request: Any, context: Any) -> Any:  # noqa: N802
        return inference_pb2.EmbedResponse(values=[3.0, 4.0], tokens=1)


def test_a_vector_that_is_not_of_unit_length_is_none() -> None:
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=2))
    inference_pb2_grpc.add_InferenceServicer_to_server(_LongVectors(), server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as opened:
        said = ask_vectors(opened, [Question(prompt=(1, 2), max_tokens=0)], check=nothing)
    server.stop(0.0).wait()
    assert said == "the vector of 2 tokens has 2 values and length 5, not 1"


def test_vectors_are_held_to_the_cosine_with_the_control() -> None:
    near, far = [[1.0, 0.0], [0.6, 0.8]], [[1.0, 0.0], [0.8, 0.6]]
    arms = {"eager-0": "eager", "near-0": "near", "far-0": "far", "gone-0": "gone"}
    rows = compared_vectors(
        {"eager-0": near, "near-0": near, "far-0": far, "gone-0": "UNAVAILABLE: gone"},
        arms,
        first="eager-0",
        least=0.99,
    )
    assert [(row["same"], row["of"], row["departs"], row["error"]) for row in rows] == [
        (2, 2, None, None),
        (2, 2, None, None),
        (1, 2, 1, None),
        (0, 2, None, "UNAVAILABLE: gone"),
    ]
    assert rows[2]["cosine"] == pytest.approx(0.96)


def test_vectors_of_other_sizes_or_without_direction_are_opposite() -> None:
    assert cosine([1.0, 0.0], [1.0, 0.0, 0.0]) == cosine([0.0, 0.0], [1.0, 0.0]) == -1.0
    assert cosine([0.0, 2.0], [0.0, 3.0]) == 1.0
