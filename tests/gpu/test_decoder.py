"""The engine on a CUDA device: `make test-gpu`."""

from __future__ import annotations

import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from tailgate.servers.compiler.policy import compile_step, configure_compiler
from tailgate.servers.compiler.recorder import CompileRecorder, Trigger
from tailgate.servers.config import ArmConfig, CompileConfig, EngineConfig, ModelConfig, ShapeConfig
from tailgate.servers.engine import attention
from tailgate.servers.engine.device import read_memory
from tailgate.servers.engine.kv_cache import TILE
from tailgate.servers.engine.model import join_weights
from tailgate.servers.engine.quantisation import is_quantised, stored_bytes
from tailgate.servers.engine.runner import ModelRunner
from tailgate.servers.engine.scheduler import Job
from tailgate.servers.engine.step_runner import CapturedStep
from tailgate.servers.presets import RANDOM_PRESETS
from tailgate.servers.reference import measure
from tailgate.servers.rpc.telemetry_pb2 import CompileEvent
from tests.servers.compiler.test_policy import Gated, distance
from tests.servers.compiler.test_recorder import reset_compiler
from tests.servers.engine.test_runner import (
    ENGINE,
    SMALL,
    assert_greedy_like_generate,
    jobs_for,
    recorder,
    runner_for,
    serve,
)
from tests.servers.test_artifact import tailgate
from tests.servers.test_config import arm_from

__all__ = ["recorder"]

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
FLOAT32 = ModelConfig(device="cuda", dtype="float32")


def serve_long_prompts(runner: ModelRunner, recorder: CompileRecorder) -> tuple[list[Job], list[CompileEvent]]:
    """Serve prompts of 1 to 696 tokens. Return the jobs and the events that they caused."""
    jobs = jobs_for(runner.vocab_size, seed=5, count=6)
    for number, job in enumerate(jobs):
        job.prompt = (job.prompt * 700)[: 1 + 139 * number]
    recorder.drain()
    serve(runner, jobs)
    return jobs, recorder.drain()


def assert_quiet_and_greedy(runner: ModelRunner, recorder: CompileRecorder, *, seed: int = 1) -> None:
    """Assert that requests after the warm-up cause no event, such as a compile, and are answered like `generate`."""
    recorder.drain()
    jobs = jobs_for(runner.vocab_size, seed=seed)
    serve(runner, jobs)
    assert [(event.kind, event.shape, event.reason) for event in recorder.drain()] == []
    assert_greedy_like_generate(runner, jobs)


def random_values(*shape: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "preset", ["eager", "compiled-padded", "compiled-bucketed", "compiled-dynamic", "compiled-strict"]
)
def test_arms_decode_like_generate_and_are_quiet_after_warm_up(preset: str, recorder: CompileRecorder) -> None:
    runner = runner_for(arm_from(preset, model=FLOAT32, engine=ENGINE), recorder)
    assert runner.overlaps is (preset in ("compiled-padded", "compiled-bucketed"))
    warm = {event.kind for event in recorder.drain()}
    assert_quiet_and_greedy(runner, recorder)
    if preset in ("compiled-padded", "compiled-bucketed"):
        assert {"compile", "graph_capture"} <= warm


def test_a_captured_step_that_was_recorded_eagerly_is_not_called_compiled(recorder: CompileRecorder) -> None:
    policy = CompileConfig(enabled=True, dynamic=False, backend="eager", regional=True, capture=True, recompile_limit=1)
    shapes = ShapeConfig(kind="buckets", length_ladder=(16, 44), batch_ladder=(4,))
    runner = runner_for(
        ArmConfig(name="limited", model=FLOAT32, shapes=shapes, compile=policy, engine=ENGINE), recorder
    )
    recorder.drain()
    serve(runner, jobs_for(runner.vocab_size, seed=1))
    assert "eager_fallback" in {event.kind for event in recorder.drain()}


@pytest.mark.parametrize("preset", ["eager", "compiled-padded", "compiled-bucketed", "compiled-dynamic"])
@pytest.mark.parametrize(
    ("kind", "most_bytes"),
    [("float8-per-row", 0.53), ("float8-weight-only", 0.53), ("int8-weight-only", 0.53), ("int4-weight-only", 0.30)],
)
def test_quantised_arms_are_smaller_and_quiet_after_warm_up(
    kind: str, most_bytes: float, preset: str, recorder: CompileRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers share graphs whatever their scales, and a scale that comes with the traffic is no reason to compile."""
    # int4's layout pads what a layer reads to 1,024
    wide = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 4}
    wide = {**RANDOM_PRESETS["tiny"], **wide, "num_attention_heads": 16, "num_key_value_heads": 4}
    monkeypatch.setitem(RANDOM_PRESETS, "wide", wide)
    model = ModelConfig(id="random:wide", device="cuda", dtype="bfloat16", quantisation=kind)
    runner = runner_for(arm_from(preset, model=model, engine=ENGINE), recorder)
    warm = recorder.drain()
    held = [item for item in runner.model.parameters() if is_quantised(item)]
    assert len(held) == 7 * 4
    assert sum(map(stored_bytes, held)) <= most_bytes * sum(item.numel() * 2 for item in held)
    graphs = [event for event in warm if event.kind in ("compile", "recompile")]
    if preset == "compiled-bucketed":
        assert len(graphs) <= len(list(runner.shapes.planned()))  # and not that for each layer
    serve(runner, jobs_for(runner.vocab_size, seed=1))
    assert [(event.kind, event.shape, event.reason) for event in recorder.drain()] == []


@torch.no_grad()
@pytest.mark.parametrize("batch", [1, 7, 200])
def test_scales_outside_a_product_give_the_answer_of_scales_within(batch: int) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    module = Gated(256, 512).to("cuda", torch.bfloat16)
    config = quantization.Float8DynamicActivationFloat8WeightConfig(granularity=quantization.PerRow())
    quantization.quantize_(module, config, filter_fn=lambda layer, _: isinstance(layer, nn.Linear))
    x = torch.randn(batch, 1, 256, device="cuda", dtype=torch.bfloat16)
    expected = module(x)
    join_weights(module)
    policy = CompileConfig(enabled=True, dynamic=False, fullgraph=True, join_projections=True)
    configure_compiler(policy, planned_shapes=1, closed=True, regions=1)
    try:
        assert distance(compile_step(module, policy)(x), expected) < 0.08
    finally:
        reset_compiler()


@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 33, 64, 65, 200])
@pytest.mark.parametrize(("rows", "columns"), [(64, 256), (192, 768), (6144, 4096), (4096, 14336)])
@pytest.mark.parametrize("gated", [False, True])
def test_products_of_rows_agree_with_float64(count: int, rows: int, columns: int, gated: bool) -> None:
    from tailgate.servers.compiler import products, row_kernels

    random = partial(random_values, generator=torch.Generator("cuda").manual_seed(count))
    source, weight = random(count, 1, columns), random((1 + gated) * rows, columns) * columns**-0.5
    expected = products.multiply_few(source.double(), weight.double(), gated)
    for _ in range(3):  # the counters between programs must be ready again after each call
        output = row_kernels.launch_few(source, weight, gated)
        assert (output.double() - expected).norm() / expected.norm() < 5e-3
    if count > 1:
        return
    scale, norm, residual = torch.rand(len(weight), 1, device="cuda"), random(columns), random(1, 1, rows)
    for held in (weight, (weight * 64).to(torch.float8_e4m3fn), (weight * 64).to(torch.int8), weight.float()):
        for parts in ((None, None), (norm, None), (None, residual), (norm, residual)):
            scales = None if held.dtype.itemsize > 1 else scale
            output = row_kernels.launch_row(source, held, scales, parts[0], 1e-5, parts[1], gated)
            wide = [item if item is None else item.double() for item in (source, held, scales, parts[0], parts[1])]
            expected = products.multiply_row(*wide[:4], 1e-5, wide[4], gated)
            assert (output.double() - expected).norm() / expected.norm() < 5e-3


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="torch sees one GPU")
@pytest.mark.parametrize("preset", ["eager", "compiled-bucketed", "compiled-dynamic"])
def test_an_arm_runs_on_the_gpu_that_it_is_given(preset: str, recorder: CompileRecorder) -> None:
    second = FLOAT32.replace(device="cuda:1")
    try:
        runner = runner_for(arm_from(preset, model=second, engine=ENGINE), recorder)
        assert runner.device == torch.device("cuda:1")
        assert_quiet_and_greedy(runner, recorder)
    finally:
        torch.cuda.set_device(0)


@pytest.mark.parametrize("preset", ["eager", "compiled-bucketed", "compiled-dynamic"])
def test_windowed_and_chunked_prompts_are_right_on_a_gpu(
    preset: str, tmp_path: object, recorder: CompileRecorder
) -> None:
    torch.manual_seed(1)
    config = AutoConfig.for_model("mistral", **{**SMALL, "sliding_window": 9})
    AutoModelForCausalLM.from_config(config).save_pretrained(str(tmp_path))
    model = ModelConfig(id=str(tmp_path), device="cuda", dtype="float32")
    runner = runner_for(arm_from(preset, model=model, engine=ENGINE.replace(step_tokens=16)), recorder)
    assert_quiet_and_greedy(runner, recorder, seed=2)


@pytest.mark.parametrize("preset", ["compiled-padded", "compiled-bucketed", "compiled-dynamic"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_long_contexts_are_split_and_stay_quiet(preset: str, dtype: str, recorder: CompileRecorder) -> None:
    engine = EngineConfig(slots=3, max_prompt_tokens=700, max_new_tokens=12, step_tokens=256)
    model = ModelConfig(device="cuda", dtype=dtype)
    runner = runner_for(arm_from(preset, model=model, engine=engine), recorder)
    jobs, events = serve_long_prompts(runner, recorder)
    assert [(event.kind, event.shape) for event in events] == []
    if dtype == "float32":
        assert_greedy_like_generate(runner, jobs)


def test_a_prompt_shorter_than_the_slots_compiles_no_kernel(recorder: CompileRecorder) -> None:
    engine = EngineConfig(slots=128, max_prompt_tokens=700, max_new_tokens=12)
    runner = runner_for(ArmConfig(model=FLOAT32, engine=engine), recorder)
    recorder.drain()
    for tokens in (1, 2, 5, 30):
        serve(runner, [Job(request_id="short", prompt=[7] * tokens, max_tokens=1, recv_ns=0)])
    assert [(event.kind, event.shape) for event in recorder.drain()] == []


@pytest.mark.parametrize("batch", [1, 2, 3, 5, 8, 16, 17, 31, 32, 64])
@pytest.mark.parametrize(("kv_heads", "groups", "head_dim"), [(8, 4, 128), (2, 7, 96), (4, 1, 256)])
@pytest.mark.parametrize("reach", [700, 130])
def test_the_decode_kernel_agrees_with_float64(
    batch: int, kv_heads: int, groups: int, head_dim: int, reach: int
) -> None:
    from tailgate.servers.engine import decode_kernel

    limit = 700
    generator = torch.Generator("cuda").manual_seed(batch)
    random = partial(random_values, generator=generator)
    query = random(batch, kv_heads * groups, 1, head_dim)
    new_key, new_value = (random(batch, 1, kv_heads, head_dim).transpose(1, 2) for _ in range(2))
    keys, values = (random((batch + 1) * (limit + 1), kv_heads, head_dim) for _ in range(2))
    positions = torch.randint(0, limit, (batch,), generator=generator, device="cuda")
    rows = torch.arange(batch, device="cuda")
    expected_keys, expected_values = keys.clone(), values.clone()
    expected_keys[rows * (limit + 1) + positions] = new_key[:, :, 0]
    expected_values[rows * (limit + 1) + positions] = new_value[:, :, 0]
    distance = positions[:, None] - torch.arange(limit, device="cuda")
    seen = (distance >= 0) & (distance < reach)
    whole = [
        item.unflatten(0, (batch + 1, limit + 1))[:batch, :limit].transpose(1, 2).double().repeat_interleave(groups, 1)
        for item in (expected_keys, expected_values)
    ]
    expected = torch.nn.functional.scaled_dot_product_attention(query.double(), *whole, attn_mask=seen[:, None, None])
    for _ in range(3):  # the counters between programs must be ready again after each call
        output = decode_kernel.launch(
            query, new_key, new_value, keys, values, positions[:, None], limit, reach, limit, head_dim**-0.5
        )
        error = (output[:, 0].double() - expected[:, :, 0]).norm() / expected.norm()
        assert error < 5e-3
    assert torch.equal(keys, expected_keys)
    assert torch.equal(values, expected_values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("kv_heads", "groups", "head_dim"), [(8, 4, 128), (2, 7, 96), (4, 1, 256)])
@pytest.mark.parametrize("reach", [700, 130])
def test_parts_of_prompts_and_decoding_rows_agree_with_float64(
    kv_heads: int, groups: int, head_dim: int, reach: int, dtype: torch.dtype
) -> None:
    limit, slots = 700, 9
    decoding = [0, -1, limit - 1, *[-1] * (slots - 3)]
    tiles, tokens = [], 3
    for row, start, count in ((3, 0, 1), (4, 0, 129), (5, 100, 300), (6, 555, 128), (7, 0, 65), (8, 640, 59)):
        tiles += [
            (tokens + at - start, min(TILE, start + count - at), at, row) for at in range(start, start + count, TILE)
        ]
        tokens += count
    generator = torch.Generator("cuda").manual_seed(1)
    query = torch.randn((1, tokens + 7, kv_heads * groups, head_dim), generator=generator, device="cuda").to(dtype)
    keys, values = (
        torch.randn((slots * (limit + 1), kv_heads, head_dim), generator=generator, device="cuda").to(dtype)
        for _ in range(2)
    )
    parts = torch.tensor([*tiles, (0, 0, 0, 0)]), torch.tensor(decoding)
    attention.prepare(keys.device)
    output, expected = (
        attention.prefill_attention(*tensors, limit, reach, head_dim**-0.5)
        for tensors in (
            (query.transpose(1, 2), keys, values, *(part.cuda() for part in parts)),
            (query.transpose(1, 2).double().cpu(), keys.double().cpu(), values.double().cpu(), *parts),
        )
    )
    real = [0, 2, *range(3, tokens)]
    error = (output.double().cpu() - expected)[:, real].norm() / expected[:, real].norm()
    assert error < (5e-3 if dtype == torch.bfloat16 else 1e-6)


def test_two_measurements_of_a_card_agree() -> None:
    device = torch.device("cuda")
    first, second = (measure(device, 2.0) for _ in range(2))
    # Other tests may use the card meanwhile; figures of the host are noisier still.
    for figure in ("matmul_tflops", "read_gb_per_s"):
        assert second[figure] == pytest.approx(first[figure], rel=0.25)
    assert first["seconds"] < 4.0


def test_memory_is_read_without_waiting_for_the_device() -> None:
    device, mib = torch.device("cuda", 0), 1 << 20
    torch.cuda.init()
    read_memory(device, 0)
    allocated = torch.cuda.memory_allocated(device)
    first = torch.empty(64 * mib, dtype=torch.uint8, device=device)
    del first
    second = torch.empty(16 * mib, dtype=torch.uint8, device=device)
    after, now = read_memory(device, 1), torch.cuda.memory_allocated(device)
    assert 64 * mib <= (after.peak_bytes or 0) - allocated < 80 * mib
    assert (after.reserved_bytes or 0) >= now
    assert (read_memory(device, 2).peak_bytes or 0) == now, "the next peak counts from the last reading"
    del second
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # cycles: about a second
    took = []
    for at_ns in range(200):
        start = time.perf_counter()
        read_memory(device, at_ns)
        took.append(time.perf_counter() - start)
    assert not torch.cuda.current_stream().query(), "the device must still be at work"
    assert statistics.median(took) < 0.5e-3
    torch.cuda.synchronize()


def test_a_graph_that_is_garbage_does_not_break_the_recording_of_another() -> None:
    def double(values: torch.Tensor) -> tuple[torch.Tensor]:
        return (values * 2,)

    def collecting(values: torch.Tensor) -> tuple[torch.Tensor]:
        kept = [[number] for number in range(100_000)]  # more containers than a collection waits for
        return (values * len(kept),)

    values = torch.ones(4, device="cuda")
    garbage: list[Any] = [CapturedStep(double, [values], (), None)]
    garbage.append(garbage)
    del garbage
    (product,) = CapturedStep(collecting, [values], (), None)([values])
    assert product.tolist() == [100_000.0] * 4


SMALL_ARM = ("--set", "model.device=cuda", "--set", "engine.slots=2", "--set", "engine.max_prompt_tokens=64")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("preset", ["compiled-bucketed", "compiled-padded", "compiled-dynamic"])
def test_a_fresh_process_with_an_artifact_compiles_no_graph_anew(preset: str, tmp_path: Path) -> None:
    arm = ("--arm", preset, *SMALL_ARM)
    path, fresh = tmp_path / "arm.compiled", tmp_path / "fresh"
    assert tailgate("precompile", *arm, "--out", str(path))["unkept"] == 0
    found = tailgate(
        *("inspect", *arm, "--shapes", "prefill 32", "--cache-dir", str(fresh)),
        *("--set", f"compile.artifact={path}"),
    )
    assert {graph["cache"] for graph in found["graphs"]} == {"hit"}


def test_a_kernel_variant_is_an_event_when_it_is_first_launched_and_never_again(recorder: CompileRecorder) -> None:
    from tests.fakes.triton_kernels import increment

    recorder.trigger = Trigger(batch_id=3, shape="decode batch 8", phase="serving")
    values = torch.zeros(4096, device="cuda")
    met = []
    for count, kind in ((1000, torch.float32), (1001, torch.float32), (1000, torch.float32), (1000, torch.float16)):
        increment[(64,)](values.to(kind), count, BLOCK=64)
        met.append([(event.kind, event.batch_id, event.phase) for event in recorder.drain()])
    new = [("jit", 3, "serving")]
    # 16 does not divide 1000 nor 1001: they are one variant
    assert met == [new, [], [], new]
    increment[(64,)](values, 1008, BLOCK=64)
    (event,) = recorder.drain()
    assert event.frame.startswith("fakes/triton_kernels.py:")
    assert "BLOCK=64, num_warps=4" in event.reason
    assert event.reason.endswith("multiples of 16: values count")
    assert event.cache in ("hit", "miss")
    assert event.end_ns > event.start_ns


def test_a_tuning_is_one_event_for_each_key(recorder: CompileRecorder) -> None:
    from tests.fakes.triton_kernels import tuned_increment

    values = torch.zeros(4096, device="cuda")
    events = []
    for count in (1100, 1100, 1200):
        tuned_increment[(64,)](values, count)
        events.append(recorder.drain())
    assert [len(caused) for caused in events] == [1, 0, 1]
    (first,), _, (second,) = events
    assert {first.kind, second.kind} == {"jit"}
    assert "triton tuned increment for (1100" in first.reason


def test_a_decode_kernel_that_no_warm_up_compiled_is_an_event_under_traffic(recorder: CompileRecorder) -> None:
    from tailgate.servers.engine import decode_kernel

    engine = EngineConfig(slots=3, max_prompt_tokens=700, max_new_tokens=12, step_tokens=256)
    arm = arm_from("eager", model=ModelConfig(device="cuda", dtype="bfloat16"), engine=engine)
    minimal = arm.replace(compile=arm.compile.replace(warmup="minimal"))
    decode_kernel._decode.device_caches.clear()  # other tests of this process may have made these variants
    runner = ModelRunner(minimal, recorder)
    runner.load()
    _, caused = serve_long_prompts(runner, recorder)
    assert {(event.kind, event.frame.partition(":")[0]) for event in caused} == {("jit", "engine/decode_kernel.py")}
    assert serve_long_prompts(runner, recorder)[1] == []
