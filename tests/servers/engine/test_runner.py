"""What the engine process holds, as it says once a second."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from servers.clock import now_ns
from servers.compiler.recorder import CompileRecorder
from servers.config import ArmConfig, CompileConfig, EngineConfig, ModelConfig, ShapeConfig
from servers.engine import attention
from servers.engine import runner as runner_module
from servers.engine.capture import uncollected
from servers.engine.memory import EVERY_NS, MemoryWatch, resident_bytes
from servers.engine.placement import device_name, platform_versions, product_name, resolve_device
from servers.engine.runner import ModelRunner
from servers.engine.scheduler import Job, Scheduler
from servers.engine.startup import itemised, memory_peaks, process_started_ns
from servers.fields import ConfigError
from servers.front.readiness import first_request
from tests.fakes.flash import varlen_flash
from tests.servers.compiler.reset import reset_compiler

ENGINE = EngineConfig(slots=4, max_prompt_tokens=40, max_new_tokens=12)


@pytest.fixture
def recorder() -> Iterator[CompileRecorder]:
    reset_compiler()
    recorder = CompileRecorder()
    recorder.install()
    yield recorder
    recorder.remove()
    reset_compiler()


def runner_for(arm: ArmConfig, recorder: CompileRecorder) -> ModelRunner:
    runner = ModelRunner(arm, recorder)
    runner.load()
    runner.warm_up(lambda done, total, detail: None)
    return runner


def jobs_for(vocab_size: int, *, seed: int, count: int = 12) -> list[Job]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 41, (count,), generator=generator).tolist()
    outputs = torch.randint(1, 13, (count,), generator=generator).tolist()
    return [
        Job(
            request_id=str(number),
            prompt=torch.randint(3, vocab_size, (length,), generator=generator).tolist(),
            max_tokens=output,
            recv_ns=0,
        )
        for number, (length, output) in enumerate(zip(lengths, outputs, strict=True))
    ]


def own_request(arm: ArmConfig) -> Job:
    """What a replica asks itself before it serves."""
    request = first_request(arm, 9)
    prompt = list(request.token_ids.ids)
    return Job(request_id="own", prompt=prompt, max_tokens=request.max_tokens, recv_ns=0)


def serve(runner: ModelRunner, jobs: list[Job]) -> int:
    """Run all jobs through scheduler and runner, joining and leaving as slots allow; returns the number of steps."""
    scheduler = Scheduler(runner.arm.engine)
    for job in jobs:
        scheduler.submit(job)
    steps = 0
    while (step := scheduler.next_step()) is not None:
        launched = runner.launch(step, steps)
        steps += 1
        for job, token, answers in zip(step.jobs, runner.collect(launched), launched.answers, strict=True):
            if answers and scheduler.record(job, token):
                move = scheduler.release(job.request_id)
                if move is not None:
                    runner.move(move)
    return steps


def assert_greedy_like_generate(runner: ModelRunner, jobs: list[Job]) -> None:
    for job in jobs:
        expected = runner.model.generate(
            torch.tensor([job.prompt], device=runner.device),
            max_new_tokens=job.max_tokens,
            min_new_tokens=job.max_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[0, len(job.prompt) :].tolist()
        assert job.output == expected
    assert len({token for job in jobs for token in job.output}) > 10, "the model repeats itself: nothing was compared"


@pytest.mark.parametrize("preset", ["eager", "eager-padded"])
def test_chunks_that_read_their_rows_in_place_change_no_answer(
    preset: str, recorder: CompileRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "flash", varlen_flash)
    monkeypatch.setattr(attention, "reads_in_place", lambda model: True)
    arm = ArmConfig.from_preset(preset, engine=replace(ENGINE, prefill_chunk=16))
    runner = runner_for(arm, recorder)
    jobs = jobs_for(runner.vocab_size, seed=7)
    serve(runner, jobs)
    assert_greedy_like_generate(runner, jobs)


@pytest.mark.parametrize("prefill_batch", [1, 3])
@pytest.mark.parametrize("preset", ["eager", "eager-padded"])
def test_eager_arms_decode_exactly_like_generate(preset: str, prefill_batch: int, recorder: CompileRecorder) -> None:
    arm = ArmConfig.from_preset(preset, engine=replace(ENGINE, prefill_batch=prefill_batch))
    runner = runner_for(arm, recorder)
    jobs = jobs_for(runner.vocab_size, seed=prefill_batch)
    serve(runner, jobs)
    assert_greedy_like_generate(runner, jobs)
    assert recorder.drain() == []


@pytest.mark.parametrize("preset", ["eager", "eager-padded"])
def test_prompts_taken_in_chunks_decode_exactly_like_generate(preset: str, recorder: CompileRecorder) -> None:
    engine = replace(ENGINE, prefill_chunk=7, prefill_batch=2)
    runner = runner_for(ArmConfig.from_preset(preset, engine=engine), recorder)
    jobs = jobs_for(runner.vocab_size, seed=6)
    serve(runner, jobs)
    assert_greedy_like_generate(runner, jobs)


def test_buckets_may_be_larger_than_anything_that_comes(recorder: CompileRecorder) -> None:
    shapes = ShapeConfig(kind="buckets", batch_ladder=(8,), length_ladder=(64,), context_ladder=(96,))
    engine = replace(ENGINE, prefill_chunk=20)
    runner = runner_for(ArmConfig(name="roomy", shapes=shapes, engine=engine), recorder)
    jobs = jobs_for(runner.vocab_size, seed=3, count=6)
    serve(runner, jobs)
    assert_greedy_like_generate(runner, jobs)


def test_layers_of_one_class_share_the_graphs_of_a_named_region(recorder: CompileRecorder) -> None:
    policy = CompileConfig(enabled=True, dynamic=False, backend="eager", regions=("model.layers.*.mlp",))
    arm = ArmConfig(name="mlp", shapes=ShapeConfig(kind="pad"), compile=policy, engine=ENGINE)
    runner = runner_for(arm, recorder)
    assert len(runner.cache.layers) > 1
    assert len(recorder.drain()) == len(list(runner.shapes.planned()))


def test_a_region_past_the_recompile_limit_is_seen_to_run_eagerly(recorder: CompileRecorder) -> None:
    policy = CompileConfig(
        enabled=True,
        dynamic=False,
        backend="eager",
        regions=("model.layers.*.mlp",),
        recompile_limit=2,
        warmup="minimal",
    )
    runner = runner_for(ArmConfig(name="limited", compile=policy, engine=ENGINE), recorder)
    recorder.drain()
    serve(runner, jobs_for(runner.vocab_size, seed=4, count=4))
    assert {"limit_hit", "eager_fallback"} <= {event.kind for event in recorder.drain()}


def test_a_region_that_no_step_calls_is_refused(recorder: CompileRecorder) -> None:
    policy = CompileConfig(enabled=True, backend="eager", regions=("aside", "lm_head"), warmup="minimal")
    runner = ModelRunner(ArmConfig(name="aside", compile=policy, engine=ENGINE), recorder)
    load = runner_module.load_model

    def with_a_module_aside(model: ModelConfig) -> torch.nn.Module:
        loaded = load(model)
        loaded.aside = torch.nn.Linear(2, 2)
        return loaded

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner_module, "load_model", with_a_module_aside)
        runner.load()
    with pytest.raises(ConfigError, match=r"compile\.regions names aside, which no step of the warm-up called"):
        runner.warm_up(lambda done, total, detail: None)


def test_a_backend_that_torch_does_not_know_is_refused(recorder: CompileRecorder) -> None:
    policy = CompileConfig(enabled=True, backend="nobody")
    runner = ModelRunner(ArmConfig(name="odd", compile=policy, engine=ENGINE), recorder)
    with pytest.raises(ConfigError, match=r'compile.backend is "nobody": torch knows .*inductor'):
        runner.load()


@pytest.mark.process
def test_the_naive_arm_recompiles_while_serving_and_says_why(recorder: CompileRecorder) -> None:
    arm = ArmConfig.from_preset("compiled-naive", engine=ENGINE)
    arm = replace(arm, compile=replace(arm.compile, backend="eager"))
    runner = runner_for(arm, recorder)
    recorder.drain()
    serve(runner, [own_request(arm)])
    assert recorder.drain() == []
    jobs = jobs_for(runner.vocab_size, seed=3, count=8)
    serve(runner, jobs)
    events = [event for event in recorder.drain() if event.kind == "recompile"]
    assert len(events) >= 3
    for event in events:
        assert event.phase == "serving"
        assert event.batch_id >= 0
        assert event.end_ns > event.start_ns
        assert "size mismatch" in event.reason or "size()" in event.reason
        assert event.shape.startswith(("prefill batch", "decode batch"))
    assert_greedy_like_generate(runner, jobs)


def test_a_sampled_answer_is_the_same_whoever_shares_its_batches(recorder: CompileRecorder) -> None:
    runner = runner_for(ArmConfig.from_preset("eager", engine=ENGINE), recorder)
    answers = []
    for neighbours in (0, 5):
        jobs = jobs_for(runner.vocab_size, seed=9, count=1 + neighbours)
        jobs[0].prompt, jobs[0].max_tokens = [5, 6, 7], 10
        jobs[0].temperature, jobs[0].seed = 1.0, 42
        serve(runner, jobs)
        answers.append(jobs[0].output)
    assert answers[0] == answers[1]


# A model that is made in no time and whose greedy answers wander.
SMALL = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}
FAMILIES = {
    "llama": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": 9},
    "gemma3_text": {
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention"],
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
    },
    "phi3": {"pad_token_id": 0},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_an_unchanged_hugging_face_model_loads_from_disk_and_keeps_its_attention(
    family: str, tmp_path: object, recorder: CompileRecorder
) -> None:
    torch.manual_seed(1)
    config = AutoConfig.for_model(family, **{**SMALL, **FAMILIES[family]})
    AutoModelForCausalLM.from_config(config).save_pretrained(str(tmp_path))
    arm = ArmConfig(model=ModelConfig(id=str(tmp_path), dtype="float32"), engine=ENGINE, shapes=ShapeConfig(kind="pad"))
    runner = runner_for(arm, recorder)
    jobs = jobs_for(runner.vocab_size, seed=2)
    serve(runner, jobs)
    assert_greedy_like_generate(runner, jobs)


class Cycle:
    """Garbage that only a collection finds."""

    def __init__(self, destroyed: list[str]) -> None:
        self.itself = self
        self.destroyed = destroyed

    def __del__(self) -> None:
        self.destroyed.append("destroyed")


def make_garbage() -> list[list[int]]:
    """More containers than a collection waits for."""
    return [[number] for number in range(10 * gc.get_threshold()[0])]


def test_nothing_is_destroyed_while_a_graph_is_recorded() -> None:
    destroyed: list[str] = []
    with uncollected():
        Cycle(destroyed)
        make_garbage()
        assert destroyed == []
    gc.collect()
    assert destroyed == ["destroyed"]


def test_collecting_goes_on_after_a_recording_that_failed() -> None:
    with pytest.raises(ValueError, match="broke"), uncollected():
        raise ValueError("the recording broke")
    assert gc.isenabled()


def test_a_process_that_collects_nothing_stays_so() -> None:
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_process_is_as_old_as_it_is() -> None:
    before_ns = now_ns()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        started_ns = process_started_ns(child.pid)
    assert before_ns - 20_000_000 <= started_ns <= now_ns()
    assert process_started_ns(os.getpid()) < before_ns


def test_a_process_that_is_gone_has_started_now_at_the_earliest() -> None:
    before_ns = now_ns()
    assert process_started_ns(2**22 + 1) >= before_ns


def test_the_items_of_a_start_leave_no_gap() -> None:
    items = itemised({"load": 40, "decode": 20}, started_ns=100, entered_ns=130, imported_ns=145, ready_ns=210)
    assert items == {"process": 30, "import": 15, "load": 40, "decode": 20, "other": 5}
    assert sum(items.values()) == 210 - 100


def test_memory_of_cuda_graphs_is_what_lies_in_pools_of_their_own() -> None:
    segments = [
        {"total_size": 100, "segment_pool_id": (0, 0)},
        {"total_size": 30, "segment_pool_id": (0, 1)},
        {"total_size": 4, "segment_pool_id": (2, 0)},
        {"total_size": 1},
    ]
    assert memory_peaks(segments)["graph_pools"] == 34
    peaks = memory_peaks([])
    assert set(peaks) == {"process_peak"}
    assert peaks["process_peak"] > 1 << 20


@pytest.mark.parametrize(
    ("name", "gpus", "words"),
    [
        ("gpu", 1, "use auto, cpu, cuda or cuda:N"),
        ("cuda", 0, "torch sees no GPU"),
        ("cuda:2", 2, "torch sees 2 GPUs: use cuda:0 to cuda:1"),
    ],
)
def test_a_device_that_is_not_there_is_refused_in_one_line(
    name: str, gpus: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(ConfigError, match=words) as refused:
        resolve_device(name)
    assert "\n" not in str(refused.value)


def test_the_last_gpu_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("cuda:1") == torch.device("cuda:1")
    assert resolve_device("auto").type == "cuda"


@pytest.mark.parametrize(("given", "name"), [("cpu", "cpu"), ("cuda", "cuda:0"), ("cuda:3", "cuda:3")])
def test_records_number_every_gpu(given: str, name: str) -> None:
    assert device_name(torch.device(given)) == name


@pytest.mark.parametrize(
    ("name", "expected"),
    [("AMD Instinct MI300X", "AMD Instinct MI300X (gfx942)"), ("", "AMD GPU (gfx942)")],
)
def test_a_rocm_device_is_called_what_it_is(name: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert product_name(torch.device("cuda:0")) == expected
    assert platform_versions() == {"rocm": "6.4.43482"}
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert product_name(torch.device("cuda:0")) == name
    assert platform_versions() == {"cuda": "13.0"}
    assert product_name(torch.device("cpu")) == "cpu"


CPU = torch.device("cpu")


def test_memory_is_read_at_once_and_then_once_a_second() -> None:
    times = iter([5, 6, EVERY_NS + 4, EVERY_NS + 5, EVERY_NS + 6])
    watch = MemoryWatch(CPU, clock=lambda: next(times))
    readings = [watch.due() for _ in range(5)]
    assert [reading.at_ns for reading in readings if reading is not None] == [5, EVERY_NS + 5]


def test_a_cpu_has_memory_of_the_process_and_no_allocator_to_ask() -> None:
    reading = MemoryWatch(CPU).due()
    assert reading is not None
    assert reading.memory_bytes is not None
    assert reading.memory_bytes > 50 << 20  # torch is loaded
    assert reading.allocated_bytes is reading.peak_bytes is reading.out_of_memory is None


def test_memory_of_the_process_grows_by_what_is_held() -> None:
    before = resident_bytes()
    size = 256 << 20  # too large for what an earlier test left free
    held = torch.ones(size, dtype=torch.uint8)
    after = resident_bytes()
    assert before is not None
    assert after is not None
    assert 0.9 * size < after - before < 1.3 * size
    assert held[-1] == 1
