"""One encoder's replica in its own processes, which all tests share."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import grpc
import pytest
import torch

from servers.config import ArmConfig
from servers.engine.model import load_model
from servers.front.tokenizer import ByteTokenizer
from servers.rpc import inference_pb2, telemetry_pb2
from tests.fakes.processes import PATIENCE_S
from tests.servers.front.replica import ENCODER, ENCODER_ENGINE, Replica, ask, embed, refusal, start

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("encoder replica")]
TEXTS = ("a", "two words", "the quick brown fox jumps over the lazy dog", "x" * 31, "y" * 32, "z" * 47)


@pytest.fixture(scope="module")
def eager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    arm = ArmConfig.from_preset("eager", model=ENCODER, engine=ENCODER_ENGINE)
    replica = start(tmp_path_factory.mktemp("eager"), arm)
    try:
        assert replica.wait_warm()[-1].stage == "serving"
        yield replica
    finally:
        replica.end()


def embed_together(replica: Replica, texts: tuple[str, ...]) -> list[inference_pb2.EmbedResponse]:
    requests = [inference_pb2.EmbedRequest(text=text) for text in texts]
    calls = [replica.inference.Embed.future(request, timeout=PATIENCE_S) for request in requests]
    return [call.result() for call in calls]


@torch.no_grad()
def assert_as_plain(texts: tuple[str, ...], answers: list[inference_pb2.EmbedResponse]) -> None:
    """The vectors are those of the Hugging Face model alone."""
    model = load_model(replace(ENCODER, attention="eager"))
    for text, answer in zip(texts, answers, strict=True):
        ids = ByteTokenizer().encode(text)
        assert answer.tokens == len(ids)
        own = torch.tensor(answer.values, dtype=torch.float64)
        assert float(own.norm()) == pytest.approx(1.0, abs=1e-5)
        mean = model(input_ids=torch.tensor([ids])).last_hidden_state[0].double().mean(dim=0)
        assert float(own @ mean / mean.norm()) >= 0.9999


def test_a_text_is_answered_with_its_vector_and_the_trailing_metadata(eager: Replica) -> None:
    answer, trailer = embed(eager, "two words", request_id="one", session_id="s")
    assert_as_plain(("two words",), [answer])
    expected = {"arm": "eager", "prompt-tokens": "10", "output-tokens": "0", "batch-size": "1", "padded-batch": "1"}
    expected |= {"padded-length": "10", "decode-ns": "0", "compile-stall-ns": "0"}
    assert {key: trailer[f"tailgate-{key}"] for key in expected} == expected
    assert int(trailer["tailgate-prefill-ns"]) > 0
    assert int(trailer["tailgate-recv-ns"]) < int(trailer["tailgate-end-ns"])
    ids = inference_pb2.TokenIds(ids=ByteTokenizer().encode("two words"))
    assert eager.inference.Embed(inference_pb2.EmbedRequest(token_ids=ids)).values == pytest.approx(
        answer.values, abs=1e-6
    )


def test_texts_that_come_together_keep_their_own_vectors(eager: Replica) -> None:
    assert_as_plain(TEXTS, embed_together(eager, TEXTS))
    records = eager.steps(2)
    assert {record.kind for record in records} == {"encode"}
    assert not any(record.compiled for record in records)


def test_bad_texts_are_refused_with_value_and_limit(eager: Replica) -> None:
    request = inference_pb2.EmbedRequest
    for bad, words in (
        (request(), ("text", "missing")),
        (request(text=""), ("text", "empty")),
        (request(text="x" * 48), ("text", "49", "48")),
        (request(text="x" * 5000), ("text", "5000 bytes", "3072")),
        (request(token_ids=inference_pb2.TokenIds(ids=[30522])), ("30522", "30521")),
        (request(text="a", request_id="i" * 300), ("request_id", "300", "256")),
    ):
        error = refusal(eager, bad)
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert [word for word in words if word not in error.details()] == [], error.details()
        assert dict(error.trailing_metadata() or ())["tailgate-arm"] == "eager"
    error = refusal(eager, ask())
    assert error.code() == grpc.StatusCode.UNIMPLEMENTED
    assert "Embed" in error.details()


def test_health_and_snapshot_are_those_of_an_encoder(eager: Replica) -> None:
    assert eager.health() == 1
    snapshot = eager.telemetry.Snapshot(telemetry_pb2.SnapshotRequest())
    config = json.loads(snapshot.config_json)
    assert (config["model"]["task"], config["model"]["pooling"]) == ("embed", "mean")
    assert "encode" in snapshot.startup_groups_ns
    assert "kv_cache" not in snapshot.memory_bytes
    assert snapshot.vocab_size == 30522
