from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from servers.config import ArmConfig, CompileConfig, ShapeConfig
from servers.fields import ConfigError
from servers.inspect.inspection import EXIT_COMPILES
from servers.inspect.listed_shapes import listed, parse_shapes, size_of, unplanned_shapes
from tests.servers.test_inspect import ENCODER, ENGINE, inspection_of


def test_an_encoder_is_inspected_at_the_sizes_of_whole_texts() -> None:
    shapes = list(unplanned_shapes(ENCODER))
    assert parse_shapes(", ".join(map(listed, shapes)), ENCODER) == shapes
    with pytest.raises(ConfigError, match="encode steps alone"):
        parse_shapes("prefill 1x5", ENCODER)
    arm = replace(ENCODER, compile=CompileConfig(enabled=True, backend="eager", dynamic=False, warmup="minimal"))
    inspection = inspection_of(arm, "encode 1x5, encode 3x7")
    assert [visit.outcome for visit in inspection.visits] == ["ready", "recompile"]
    assert inspection.memory_bytes["weights"] > 0
    assert "kv_cache" not in inspection.memory_bytes


def test_planned_shapes_are_ready_though_every_block_is_compiled_by_itself() -> None:
    policy = CompileConfig(enabled=True, dynamic=False, fullgraph=True, backend="eager", regional=True, capture=True)
    arm = ArmConfig(name="blocks", shapes=ShapeConfig(kind="buckets"), compile=policy, engine=ENGINE)
    inspection = inspection_of(arm, "prefill 1x1, prefill 1x33, decode 3@20")
    assert [visit.outcome for visit in inspection.visits] == ["ready"] * 3
    assert [(size_of(visit.padded), visit.planned) for visit in inspection.visits] == [
        ("1x32", True),
        ("1x40", True),
        ("4@52", True),
    ]
    assert inspection.exit_code == 0
    assert len(inspection.graphs) == 5  # one for each bucket, whatever the number of layers
    if not torch.cuda.is_available():
        assert sum(inspection.facts.cudagraph_skips.values()) == 5


def test_shapes_beyond_the_limit_run_eagerly_and_are_not_ready() -> None:
    policy = CompileConfig(enabled=True, dynamic=False, backend="eager", recompile_limit=1, warmup="minimal")
    inspection = inspection_of(
        ArmConfig(name="limited", compile=policy, engine=ENGINE), "prefill 1x5, prefill 1x7, prefill 1x9"
    )
    assert [visit.outcome for visit in inspection.visits] == ["ready", "limit", "limit"]
    assert "limit was reached at prefill batch 1 × length 7" in inspection.visits[2].reason
    assert inspection.exit_code == EXIT_COMPILES


def test_a_guarded_arm_runs_what_was_not_warmed_eagerly_and_that_is_no_fault() -> None:
    policy = CompileConfig(enabled=True, dynamic=False, backend="eager", guarded=True, warmup="minimal")
    inspection = inspection_of(ArmConfig(name="guarded", compile=policy, engine=ENGINE), "prefill 1x5, prefill 1x9")
    assert [visit.outcome for visit in inspection.visits] == ["ready", "guarded"]
    assert inspection.exit_code == 0


def test_a_strict_arm_refuses_what_was_not_warmed_and_that_is_a_fault() -> None:
    policy = CompileConfig(enabled=True, dynamic=False, backend="eager", strict=True, warmup="minimal")
    inspection = inspection_of(ArmConfig(name="strict", compile=policy, engine=ENGINE), "prefill 1x5, prefill 1x9")
    assert [visit.outcome for visit in inspection.visits] == ["ready", "refused"]
    assert "compile.strict compiles nothing while serving" in inspection.visits[1].reason
    assert inspection.exit_code == EXIT_COMPILES
