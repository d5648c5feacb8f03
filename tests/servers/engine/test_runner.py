from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from servers.compiler.recorder import CompileRecorder
from servers.config import ArmConfig, CompileConfig, EngineConfig, ModelConfig, ShapeConfig
from servers.engine import attention
from servers.engine import runner as runner_module
from servers.engine.runner import ModelRunner
from servers.engine.scheduler import Job, Scheduler
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
