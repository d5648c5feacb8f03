from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import _inductor as inductor
from torch import nn
from torch._inductor.utils import run_and_get_code

from servers.compiler.events import CompileEvent
from servers.compiler.policy import compile_step, configure_compiler
from servers.compiler.recorder import CompileRecorder
from servers.config import CompileConfig
from servers.engine.model import join_weights
from tests.servers.compiler.test_internals import SERVERS
from tests.servers.compiler.test_policy import Gated, distance, in_float8
from tests.servers.compiler.test_recorder import Function, compiled, published, recorder, reset_compiler

__all__ = ["published", "recorder"]


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


_COMPILES_ELSEWHERE = """
import json, sys, time
import torch
from servers.compiler.recorder import CompileRecorder

recorder = CompileRecorder()
recorder.install()
step = torch.compile(lambda x: torch.nn.functional.silu(x @ x) * 1.5, dynamic=False)
events, deadline = [], time.monotonic() + 240
with torch.no_grad():
    while time.monotonic() < deadline and not any(event.kind == "background_compile" for event in events):
        step(torch.ones(8, 8))
        events += recorder.drain()
        time.sleep(0.02)  # the other process has the processor meanwhile
print(json.dumps([(event.kind, event.compile_id, event.end_ns - event.start_ns) for event in events]))
"""


def test_what_inductor_compiles_in_another_process_is_a_background_compile(tmp_path: Path) -> None:
    without_caches = ("FX_GRAPH_CACHE", "AUTOGRAD_CACHE", "BUNDLE_TRITON_INTO_FX_GRAPH_CACHE")  # torch's own limit
    environment = {
        **os.environ,
        "PYTHONPATH": str(SERVERS.parent),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        "TORCHINDUCTOR_FX_COMPILE_MODE": "async+SUBPROCESS",
        **{f"TORCHINDUCTOR_{name}": "0" for name in without_caches},
    }
    command = [sys.executable, "-c", _COMPILES_ELSEWHERE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (here, first, _), (kind, compile_id, spent_ns) = json.loads(done.stdout.splitlines()[-1])
    assert (here, first) == ("compile", "0/0")
    assert (kind, compile_id) == ("background_compile", "0/0")
    assert spent_ns > 0


def events_of(recorder: CompileRecorder, function: Function, *inputs: torch.Tensor, **options: object) -> CompileEvent:
    torch._dynamo.reset()
    with torch.no_grad():
        compiled(function, backend="inductor", **options)(*inputs)
    (event,) = recorder.drain()
    return event


def test_generated_code_is_counted_and_its_cache_and_its_missing_cuda_graph_are_told(recorder: CompileRecorder) -> None:
    if torch.cuda.is_available():
        pytest.skip("on a GPU the graph is captured")
    constant = random.random()  # a program that no cache has seen

    def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(x @ w) * constant

    x = torch.ones(4, 8)
    cold = events_of(recorder, layer, x, torch.ones(8, 8), mode="reduce-overhead")
    warm = events_of(recorder, layer, x, torch.ones(8, 8), mode="reduce-overhead")
    assert (cold.cache, warm.cache) == ("miss", "hit")
    assert cold.kernels == 2  # one multiplication by a library, one generated kernel
    assert recorder.facts.cudagraph_skips == {"no CUDA device": 2}
    assert warm.backend_ns < cold.backend_ns


@torch.no_grad()
def test_inductor_knows_the_operator_that_stores_a_row() -> None:
    """On a CPU, where the product is a call all the same: its code names the operator, and the answers are the same."""
    policy = CompileConfig(enabled=True, dynamic=False, options={"coordinate_descent_tuning": True})
    module, x = Gated(), torch.randn(1, 1, 8)
    configure_compiler(policy, planned_shapes=1, closed=True, regions=1)
    try:
        with inductor.config.patch(force_disable_caches=True):
            answer, code = run_and_get_code(compile_step(module, policy), x)
        torch.testing.assert_close(answer, module(x))
        assert "force_stride_order" in code[0]
    finally:
        reset_compiler()
