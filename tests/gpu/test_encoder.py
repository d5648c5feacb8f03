"""Encoders on a CUDA device: `make test-gpu`."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from tailgate.servers.compiler.recorder import CompileRecorder
from tailgate.servers.config import ArmConfig, CompileConfig, EngineConfig, ModelConfig, ShapeConfig
from tailgate.servers.engine.encoder import EncoderRunner
from tailgate.servers.engine.model import load_model
from tailgate.servers.engine.scheduler import Job, Step
from tests.servers.engine.test_encoder import batches, cosine, job, recorder, served, vectors_of, warm
from tests.servers.test_config import arm_from

__all__ = ["recorder"]

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
TINY = ModelConfig(id="random:bert-tiny", task="embed", device="cuda", dtype="float32")
BASE = ModelConfig(id="random:bert-base", task="embed", device="cuda", dtype="bfloat16")
ENGINE = EngineConfig(slots=5, max_prompt_tokens=40)
QUIET = ("eager", "eager-padded", "compiled-padded", "compiled-bucketed", "compiled-dynamic", "compiled-strict")


@torch.no_grad()
def assert_as_plain(runner: EncoderRunner, every: Sequence[Sequence[Job]], least: float) -> None:
    """Assert that the vectors are those of the Hugging Face model alone, in float32."""
    model: nn.Module = load_model(runner.arm.model, plain=True)
    model.float()
    for texts in every:
        for text, vector in zip(texts, vectors_of(runner, texts), strict=True):
            ids = torch.tensor([text.prompt], device="cuda")
            mean = model(input_ids=ids).last_hidden_state[0].mean(dim=0)
            assert cosine(vector, mean) >= least, f"{text.request_id} of {len(texts)}"


@pytest.mark.parametrize("preset", QUIET)
def test_encoders_embed_like_the_plain_model_and_are_quiet_after_warm_up(
    preset: str, recorder: CompileRecorder
) -> None:
    arm = arm_from(preset, model=TINY, engine=ENGINE)
    runner = warm(arm, recorder)
    warmed = {event.kind for event in recorder.drain()}
    assert_as_plain(runner, batches(arm), 0.9999)
    answers = served(runner, [4, 9, 40, 1, 2, 7, 8])
    assert [item.status for item in answers.ended.values()] == ["OK"] * 7
    assert {output.step.compiled for output in answers.outputs if output.step} == {arm.compile.enabled}
    assert [(event.kind, event.shape) for event in recorder.drain()] == []
    if preset in ("compiled-padded", "compiled-bucketed"):
        assert {"compile", "graph_capture"} <= warmed


@pytest.mark.parametrize("regional", [False, True])
def test_a_captured_encoder_replays_one_graph_a_shape_whether_whole_or_by_blocks(
    regional: bool, recorder: CompileRecorder
) -> None:
    policy = CompileConfig(enabled=True, dynamic=False, fullgraph=True, regional=regional, capture=True)
    arm = ArmConfig(name="captured", model=TINY, engine=ENGINE, shapes=ShapeConfig(kind="buckets"), compile=policy)
    runner = warm(arm, recorder)
    captures = [event for event in recorder.drain() if event.kind == "graph_capture"]
    assert len(captures) == len(list(runner.shapes.planned()))
    assert_as_plain(runner, batches(arm), 0.9999)
    assert recorder.drain() == []
    assert recorder.cudagraph_skips == 0


def test_an_unpadded_batch_waits_for_nothing_on_the_device(recorder: CompileRecorder) -> None:
    runner = warm(arm_from("eager", model=TINY, engine=ENGINE), recorder)
    torch.cuda.set_sync_debug_mode("error")
    try:
        launched = runner.launch(step_of([40] * 5), 0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(runner.collect(launched)) == 5


def step_of(lengths: Sequence[int]) -> Step:
    jobs = tuple(job(length, seed=row) for row, length in enumerate(lengths))
    return Step("encode", prompts=jobs, chunks=tuple((0, len(item.prompt)) for item in jobs))


@pytest.mark.parametrize("preset", ["eager", "compiled-bucketed", "compiled-dynamic"])
def test_bert_base_in_bfloat16_stays_within_the_limit_of_parity(preset: str, recorder: CompileRecorder) -> None:
    engine = EngineConfig(slots=8, max_prompt_tokens=128)
    arm = arm_from(preset, model=BASE, engine=engine)
    if preset == "compiled-bucketed":
        arm = arm.replace(shapes=ShapeConfig(kind="buckets", batch_ladder=(1, 8), length_ladder=(64, 128)))
    runner = warm(arm, recorder)
    recorder.drain()
    assert_as_plain(runner, batches(arm), 0.999)
    assert recorder.drain() == []
