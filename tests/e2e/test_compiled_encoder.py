from __future__ import annotations

from dataclasses import replace

import pytest

from servers.compiler.recorder import CompileRecorder
from tests.servers.engine.test_encoder import (
    ENGINE,
    arm_of,
    assert_as_plain,
    job,
    recorder,
    served,
    warm,
)

__all__ = ["recorder"]

PRESETS = (
    *("eager", "eager-padded", "compiled-padded", "compiled-bucketed"),
    *("compiled-dynamic", "compiled-strict", "compiled-naive"),
)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_embeds_like_the_plain_model_and_none_but_naive_compiles_once_warm(
    preset: str, recorder: CompileRecorder
) -> None:
    runner = warm(arm_of(preset), recorder)
    recorder.drain()
    assert_as_plain(runner)
    assert {event.kind for event in recorder.drain()} == ({"recompile"} if preset == "compiled-naive" else set())


@pytest.mark.parametrize("preset", ["compiled-padded", "compiled-bucketed", "compiled-dynamic", "compiled-naive"])
def test_compiled_code_embeds_like_the_plain_model_at_every_border(preset: str, recorder: CompileRecorder) -> None:
    runner = warm(arm_of(preset, backend="inductor"), recorder)
    recorder.drain()
    assert_as_plain(runner)
    while_serving = {event.kind for event in recorder.drain()} & {"compile", "recompile"}
    assert bool(while_serving) == (preset == "compiled-naive")


def test_a_naive_encoder_recompiles_for_a_length_that_it_has_not_met(recorder: CompileRecorder) -> None:
    runner = warm(arm_of("compiled-naive"), recorder)
    recorder.drain()
    runner.vectors([job(17)])
    assert [event.kind for event in recorder.drain()] == ["recompile"]


def test_one_dynamic_graph_serves_every_batch_and_length(recorder: CompileRecorder) -> None:
    arm = arm_of("compiled-dynamic")
    warm(replace(arm, engine=replace(ENGINE, max_prompt_tokens=512)), recorder)
    graphs = [event for event in recorder.drain() if event.kind in ("compile", "recompile")]
    assert [(graph.kind, graph.dynamic) for graph in graphs] == [("compile", True)]


def test_a_regional_encoder_compiles_one_graph_a_shape_however_many_layers(recorder: CompileRecorder) -> None:
    runner = warm(arm_of("compiled-bucketed"), recorder)
    assert runner.model.config.num_hidden_layers > 1
    graphs = [event for event in recorder.drain() if event.kind in ("compile", "recompile")]
    assert len(graphs) == len(list(runner.shapes.planned()))
    assert all("BertLayer" in graph.frame for graph in graphs)


def test_a_batch_that_is_full_of_equal_texts_has_the_graph_of_one_that_is_padded(recorder: CompileRecorder) -> None:
    """transformers leaves the mask out where nothing is padded, which would be a second graph."""
    runner = warm(arm_of("compiled-bucketed"), recorder)
    recorder.drain()
    runner.vectors([job(40, seed=row) for row in range(5)])
    runner.vectors([job(40 - row, seed=row) for row in range(5)])
    assert recorder.drain() == []


@pytest.mark.parametrize("preset", ["eager", "compiled-padded", "compiled-bucketed"])
def test_a_step_record_says_what_was_encoded_and_whether_compiled_code_did(
    preset: str, recorder: CompileRecorder
) -> None:
    runner = warm(arm_of(preset), recorder)
    finished, steps = served(runner, recorder, [4, 9, 40, 1, 2, 7, 8])
    assert [(step.kind, step.batch, step.tokens) for step in steps] == [("encode", 5, 56), ("encode", 2, 15)]
    assert {step.compiled for step in steps} == {preset != "eager"}
    assert all(step.padded_tokens >= step.tokens for step in steps)
    assert [(item.status, item.reason, len(item.vector)) for item in finished] == [("OK", "embedded", 512)] * 7
    timing = finished[0].timing
    assert (timing.batch_id, timing.batch_size, timing.padded_batch) == (0, 5, 5)
    assert timing.prefill_ns > 0
    assert timing.decode_ns == 0
