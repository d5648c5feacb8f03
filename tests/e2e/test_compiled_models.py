"""Compiled engines and encoders: graphs, recompiles and answers with the real compiler."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tailgate.servers.compiler.recorder import CompileRecorder
from tailgate.servers.config import ArmConfig, CompileConfig, EngineConfig, ModelConfig, ShapeConfig
from tailgate.servers.engine import steps
from tailgate.servers.engine.quantisation import weight_bytes
from tailgate.servers.engine.scheduler import Job
from tests.servers.engine.test_encoder import (
    arm_of,
    assert_as_plain,
    job,
    vectors_of,
    warm,
)
from tests.servers.engine.test_runner import (
    ENGINE,
    FLOAT8,
    INT8,
    assert_answers_for_one_position_a_row,
    assert_greedy_like_generate,
    jobs_for,
    own_request,
    recorder,
    runner_for,
    serve,
)
from tests.servers.test_config import arm_from

__all__ = ["recorder"]
LIGHT: dict[str, Any] = {"mode": "default", "options": {}, "join_projections": False, "row_kernels": False}
AOT_EAGER = {"backend": "aot_eager", **LIGHT}


def preset_arm(preset: str, policy: dict[str, Any] = AOT_EAGER, engine: EngineConfig = ENGINE) -> ArmConfig:
    arm = arm_from(preset, engine=engine)
    return arm.replace(compile=arm.compile.replace(**policy))


@pytest.mark.parametrize(("settings", "regional"), [(INT8, True), (INT8, False), (FLOAT8, True)])
def test_layers_share_a_graph_whatever_their_scales_and_nothing_compiles_after_warm_up(
    settings: ModelConfig, regional: bool, recorder: CompileRecorder
) -> None:
    light = CompileConfig(enabled=True, backend="aot_eager", dynamic=False, fullgraph=True, regional=regional)
    ladders = ShapeConfig(kind="buckets", batch_ladder=(4,), length_ladder=(44,))
    arm = ArmConfig(name="held", model=settings, engine=ENGINE.replace(threads=1), shapes=ladders, compile=light)
    runner = runner_for(arm, recorder)
    graphs = [event for event in recorder.drain() if event.kind in ("compile", "recompile")]
    assert len(graphs) == 2  # one for prefill and one for decode, and not one for each layer
    serve(runner, jobs_for(runner.vocab_size, seed=1))
    assert recorder.drain() == []
    assert runner.memory_bytes()["quantised_weights"] == weight_bytes(runner.model)[1]


def test_warming_kernels_compiles_no_graph(recorder: CompileRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    arm = preset_arm("compiled-naive", {**AOT_EAGER, "backend": "eager"})
    runner_for(arm, recorder)
    without = [event.shape for event in recorder.drain()]
    torch._dynamo.reset()
    recorder.remove()
    recorder.install()  # a reset drops compile callbacks
    monkeypatch.setattr("tailgate.servers.engine.attention.contexts_to_warm", lambda device, limit: [1, 3, limit])
    runner = runner_for(arm, recorder)
    assert [event.shape for event in recorder.drain()] == without
    assert runner.startup_ns["decode kernels"] > 0


@pytest.mark.parametrize(
    ("preset", "policy"),
    [
        ("compiled-padded", {}),  # inductor
        *((preset, AOT_EAGER) for preset in ("compiled-padded", "compiled-bucketed", "compiled-dynamic")),
    ],
)
def test_planned_arms_decode_like_generate_and_compile_nothing_after_warm_up(
    preset: str, policy: dict[str, Any], recorder: CompileRecorder
) -> None:
    arm = preset_arm(preset, policy)
    runner = runner_for(arm, recorder)
    warm = recorder.drain()
    assert warm
    assert {event.phase for event in warm} == {"warmup"}
    serve(runner, [own_request(arm)])
    assert recorder.drain() == []
    jobs = jobs_for(runner.vocab_size, seed=7)
    serve(runner, jobs)
    assert recorder.drain() == []
    assert_greedy_like_generate(runner, jobs)


@pytest.mark.parametrize("preset", ["compiled-padded", "compiled-bucketed", "compiled-dynamic"])
def test_a_compiled_prefill_computes_the_logits_of_one_position_a_row(
    preset: str, tmp_path: object, recorder: CompileRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_answers_for_one_position_a_row(preset, tmp_path, recorder, monkeypatch)


def test_bounds_that_the_model_breaks_cost_graphs_before_serving_and_none_after(
    recorder: CompileRecorder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def split_at_two(logits: torch.Tensor) -> torch.Tensor:
        # a choice by the number of rows: no one graph serves all
        return logits.argmax(dim=-1) if logits.shape[0] > 2 else logits.max(dim=-1).indices

    monkeypatch.setattr(steps, "largest", split_at_two)
    runner = runner_for(preset_arm("compiled-dynamic"), recorder)
    assert "without promised bounds" in caplog.text
    recorder.drain()
    jobs = jobs_for(runner.vocab_size, seed=11)
    serve(runner, jobs)
    assert [(event.kind, event.shape) for event in recorder.drain()] == []
    assert_greedy_like_generate(runner, jobs)


def test_the_longest_context_needs_no_graph_of_its_own(
    recorder: CompileRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    engine = EngineConfig(slots=2, max_prompt_tokens=20, max_new_tokens=12)
    runner = runner_for(preset_arm("compiled-strict", engine=engine), recorder)
    assert "without promised bounds" not in caplog.text
    prompt = jobs_for(runner.vocab_size, seed=1, count=1)[0].prompt
    longest = [Job(request_id=str(row), prompt=(prompt * 20)[:20], max_tokens=12, recv_ns=0) for row in range(2)]
    serve(runner, longest)
    assert [len(job.output) for job in longest] == [12, 12], "a strict arm refuses what needs a graph"


PRESETS = (
    *("eager", "eager-padded", "compiled-padded", "compiled-bucketed"),
    *("compiled-dynamic", "compiled-strict", "compiled-naive"),
)


@pytest.mark.parametrize(
    ("preset", "backend"),
    [
        *((preset, "eager") for preset in PRESETS),
        *((preset, "inductor") for preset in ("compiled-bucketed", "compiled-dynamic", "compiled-naive")),
    ],
)
def test_every_preset_embeds_like_the_plain_model_and_none_but_naive_compiles_once_warm(
    preset: str, backend: str, recorder: CompileRecorder
) -> None:
    runner = warm(arm_of(preset, backend=backend), recorder)
    recorder.drain()
    assert_as_plain(runner)
    kinds = {event.kind for event in recorder.drain()} & {"compile", "recompile", "eager_fallback", "limit_hit"}
    assert kinds == ({"recompile"} if preset == "compiled-naive" else set())


def test_one_dynamic_graph_serves_every_batch_and_length(recorder: CompileRecorder) -> None:
    arm = arm_of("compiled-dynamic")
    warm(arm.replace(engine=arm.engine.replace(max_prompt_tokens=512)), recorder)
    graphs = [event for event in recorder.drain() if event.kind in ("compile", "recompile")]
    assert [(graph.kind, graph.dynamic) for graph in graphs] == [("compile", True)]


def test_a_batch_that_is_full_of_equal_texts_has_the_graph_of_one_that_is_padded(recorder: CompileRecorder) -> None:
    """transformers leaves the mask out where nothing is padded, which would be a second graph."""
    runner = warm(arm_of("compiled-bucketed"), recorder)
    recorder.drain()
    vectors_of(runner, [job(40, seed=row) for row in range(5)])
    vectors_of(runner, [job(40 - row, seed=row) for row in range(5)])
    assert recorder.drain() == []
