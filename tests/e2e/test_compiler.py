"""The real compiler: what it records, background compiles, artifacts, inspection and preflight."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import _inductor as inductor
from torch import nn
from torch._inductor.utils import run_and_get_code

from tailgate.servers.compiler import products
from tailgate.servers.compiler.policy import compile_step, configure_compiler
from tailgate.servers.compiler.recorder import CompileRecorder
from tailgate.servers.complaint import ConfigError
from tailgate.servers.config import ArmConfig, CompileConfig, ShapeConfig
from tailgate.servers.engine.model import join_weights
from tailgate.servers.inspect import EXIT_COMPILES, parse_shapes, unplanned_shapes
from tailgate.servers.rpc.telemetry_pb2 import CompileEvent
from tests.servers.compiler.test_policy import Gated, distance, in_float8
from tests.servers.compiler.test_recorder import Function, announced, compiled, published, recorder, reset_compiler
from tests.servers.test_artifact import ARM, shipped, tailgate
from tests.servers.test_inspect import ENCODER, ENGINE, inspection_of

__all__ = ["announced", "published", "recorder", "shipped"]


@torch.no_grad()
@pytest.mark.parametrize("dynamic", [False, True])
def test_inductor_compiles_scaled_products_of_any_batch(dynamic: bool) -> None:
    module = Gated(64, 96).to(torch.bfloat16)
    in_float8(module, scaled_inputs=True)
    join_weights(module)
    policy = CompileConfig(enabled=True, dynamic=dynamic, fullgraph=True, join_projections=True)
    configure_compiler(policy, planned_shapes=2, closed=True, regions=1)
    try:
        step = compile_step(module, policy)
        for batch in (2, 7):
            x = torch.randn(batch, 1, 64, dtype=torch.bfloat16)
            assert distance(step(x), module(x)) < 0.08
        torch._dynamo.reset()
        with inductor.config.patch(force_disable_caches=True):
            _, code = run_and_get_code(step, torch.randn(3, 1, 64, dtype=torch.bfloat16))
        assert code[0].count("_scaled_mm(") == 2
    finally:
        reset_compiler()


def events_of(recorder: CompileRecorder, function: Function, *inputs: torch.Tensor, **options: object) -> CompileEvent:
    torch._dynamo.reset()
    with torch.no_grad():
        compiled(function, backend="inductor", **options)(*inputs)
    (event,) = recorder.drain()
    return event


def test_cache_hits_and_missing_cuda_graphs_are_reported(recorder: CompileRecorder) -> None:
    if torch.cuda.is_available():
        pytest.skip("on a GPU the graph is captured")
    constant = random.random()  # a program that no cache has seen

    def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(x @ w) * constant

    x = torch.ones(4, 8)
    cold = events_of(recorder, layer, x, torch.ones(8, 8), mode="reduce-overhead")
    warm = events_of(recorder, layer, x, torch.ones(8, 8), mode="reduce-overhead")
    assert (cold.cache, warm.cache) == ("miss", "hit")
    assert recorder.cudagraph_skips == 2


@torch.no_grad()
def test_inductor_calls_the_operator_of_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_DEVICES", ("cpu",))
    policy = CompileConfig(enabled=True, dynamic=False, join_projections=True, row_kernels=True)
    module, x = Gated(256, 256), torch.randn(1, 1, 256)
    join_weights(module)
    configure_compiler(policy, planned_shapes=1, closed=True, regions=1)
    try:
        with inductor.config.patch(force_disable_caches=True):
            answer, code = run_and_get_code(compile_step(module, policy), x)
        torch.testing.assert_close(answer, module(x))
        assert code[0].count("torch.ops.tailgate.row_product.default(") == 2
    finally:
        reset_compiler()


@pytest.mark.timeout(600)
def test_a_start_with_an_artifact_compiles_no_graph(shipped: Path, tmp_path: Path) -> None:
    setting = f"compile.artifact={shipped}"
    found = tailgate("inspect", *ARM, "--shapes", "prefill 9", "--cache-dir", str(tmp_path), "--set", setting)
    assert [graph["cache"] for graph in found["graphs"]] == ["hit", "hit"]


@pytest.mark.timeout(600)
def test_an_artifact_of_another_policy_is_refused_before_the_arm_serves(shipped: Path) -> None:
    setting = f"compile.artifact={shipped}"
    said = tailgate("serve", "--preset", "compiled-padded", "--port", "0", "--set", setting, code=1)
    assert "is for engine.slots 1 and here it is 8: make them equal" in said


@pytest.mark.timeout(600)
def test_dynamic_sizes_of_an_earlier_start_are_not_used(tmp_path: Path) -> None:
    naive = ["--arm", "compiled-naive", "--set", "engine.slots=2", "--set", "compile.backend=aot_eager"]
    for _ in range(2):
        # The job id names a profile that torch would keep from start to start.
        words = [*naive, "--shapes", "prefill 7", "--cache-dir", str(tmp_path)]
        found = tailgate("inspect", *words, code=None, TORCH_COMPILE_JOB_ID="mine")
        assert found["shapes"][0]["outcome"] == "recompiles"
        assert [graph["dynamic"] for graph in found["graphs"]] == [False, False, True]


def test_an_encoder_is_inspected_at_the_sizes_of_whole_texts() -> None:
    shapes = list(unplanned_shapes(ENCODER))
    assert parse_shapes(", ".join(map(str, shapes)), ENCODER) == shapes
    with pytest.raises(ConfigError, match="encode"):
        parse_shapes("prefill 5", ENCODER)
    arm = ENCODER.replace(compile=CompileConfig(enabled=True, backend="eager", dynamic=False, warmup="minimal"))
    inspection = inspection_of(arm, "encode 1x5, encode 3x7")
    assert [visit.outcome for visit in inspection.visits] == ["ready", "recompiles"]


def test_planned_shapes_are_ready_with_regional_compilation() -> None:
    policy = CompileConfig(enabled=True, dynamic=False, fullgraph=True, backend="eager", regional=True, capture=True)
    arm = ArmConfig(name="blocks", shapes=ShapeConfig(kind="buckets"), compile=policy, engine=ENGINE)
    inspection = inspection_of(arm, "prefill 1, prefill 33, decode 3@20")
    assert [visit.outcome for visit in inspection.visits] == ["ready"] * 3
    assert [(visit.padded.size, visit.planned) for visit in inspection.visits] == [
        ("32", True),
        ("44", True),
        ("4@52", True),
    ]
    assert inspection.unready == ()
    assert len(inspection.graphs) == 5  # one for each bucket, whatever the number of layers
    if not torch.cuda.is_available():
        assert inspection.cudagraph_skips == 5


@pytest.mark.parametrize(
    ("policy", "outcomes", "words"),
    [
        ({"recompile_limit": 1}, ["ready", "eager", "eager"], "prefill 7"),
        ({"strict": True}, ["ready", "is refused", "is refused"], "compile.strict"),
    ],
)
def test_shapes_without_a_graph_are_not_ready(policy: dict[str, Any], outcomes: list[str], words: str) -> None:
    compiling = CompileConfig(enabled=True, dynamic=False, backend="eager", warmup="minimal", **policy)
    arm = ArmConfig(name="limited", compile=compiling, engine=ENGINE)
    inspection = inspection_of(arm, "prefill 5, prefill 7, prefill 9")
    assert [visit.outcome for visit in inspection.visits] == outcomes
    assert words in inspection.visits[2].reason
    assert inspection.to_dict()["exit_code"] == EXIT_COMPILES
