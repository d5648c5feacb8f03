"""A model's steps: what they answer, what compiles, and weights in fewer bits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torchao.quantization
from torch._dynamo.backends import registry
from torch._inductor.graph import GraphLowering
from transformers import AutoConfig, AutoModelForCausalLM

from tailgate.servers.compiler.recorder import CompileRecorder
from tailgate.servers.complaint import ConfigError
from tailgate.servers.config import ArmConfig, CompileConfig, EngineConfig, ModelConfig, ShapeConfig
from tailgate.servers.engine import step_runner
from tailgate.servers.engine.engine import Engine
from tailgate.servers.engine.in_process import ask, requests_of
from tailgate.servers.engine.model import load_model
from tailgate.servers.engine.quantisation import is_quantised, quantise
from tailgate.servers.engine.runner import ModelRunner
from tailgate.servers.engine.scheduler import Job, Scheduler, Step
from tailgate.servers.engine.shapes import StepShape
from tailgate.servers.engine.step_runner import filling_step
from tailgate.servers.front.service import first_request
from tests.servers.compiler.test_recorder import reset_compiler
from tests.servers.test_config import arm_from, refusal

ENGINE = EngineConfig(slots=4, max_prompt_tokens=40, max_new_tokens=12)
PLAIN = ModelConfig(device="cpu")
INT8 = ModelConfig(device="cpu", quantisation="int8-weight-only")
FLOAT8 = ModelConfig(device="cpu", quantisation="float8-weight-only")


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
    plain: Any = load_model(runner.arm.model, plain=True)
    for job in jobs:
        expected = plain.generate(
            torch.tensor([job.prompt], device=runner.device),
            max_new_tokens=job.max_tokens,
            min_new_tokens=job.max_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[0, len(job.prompt) :].tolist()
        assert job.output == expected
    assert len({token for job in jobs for token in job.output}) > 10, "the model repeats itself: nothing was compared"


def assert_answers_like_generate(arm: ArmConfig, recorder: CompileRecorder, *, seed: int, count: int = 12) -> None:
    runner = runner_for(arm, recorder)
    jobs = jobs_for(runner.vocab_size, seed=seed, count=count)
    serve(runner, jobs)
    assert_greedy_like_generate(runner, jobs)


def compiling(**settings: Any) -> CompileConfig:
    return CompileConfig(enabled=True, dynamic=False, backend="eager", **settings)


@pytest.mark.parametrize("step_tokens", [0, 16])
@pytest.mark.parametrize("preset", ["eager", "eager-padded"])
def test_eager_arms_decode_exactly_like_generate(preset: str, step_tokens: int, recorder: CompileRecorder) -> None:
    arm = arm_from(preset, engine=ENGINE.replace(step_tokens=step_tokens))
    assert_answers_like_generate(arm, recorder, seed=7)
    assert recorder.drain() == []


def test_every_prefill_step_has_as_many_tiles_as_a_graph_is_recorded_with(recorder: CompileRecorder) -> None:
    runner = runner_for(arm_from("eager-padded", engine=EngineConfig(slots=48, max_prompt_tokens=1)), recorder)
    shape = StepShape("prefill", 1, 48, 48)
    warmed = filling_step(shape, runner.arm, runner.vocab_size)
    served = Step("prefill", (), warmed.prompts[:1], warmed.chunks[:1])
    sizes = [[tensor.shape for tensor in runner._inputs(step, shape)[0]] for step in (warmed, served)]
    assert sizes[0] == sizes[1]


def test_buckets_may_be_larger_than_anything_that_comes(recorder: CompileRecorder) -> None:
    shapes = ShapeConfig(kind="buckets", batch_ladder=(8,), length_ladder=(64,))
    arm = ArmConfig(name="roomy", shapes=shapes, engine=ENGINE.replace(step_tokens=20))
    assert_answers_like_generate(arm, recorder, seed=3, count=6)


# A model that is made in no time and whose greedy answers vary.
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
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 9},
    "gemma3_text": {
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention"],
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
    },
    "phi3": {"pad_token_id": 0},
}


def assert_answers_for_one_position_a_row(
    preset: str, folder: object, recorder: CompileRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    config = AutoConfig.for_model(
        "gemma3_text", **{**SMALL, **FAMILIES["gemma3_text"], "tie_word_embeddings": True}, final_logit_softcapping=2.0
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(str(folder))
    load, computed = step_runner.load_model, set()

    def watched(settings: ModelConfig) -> Any:
        model: Any = load(settings)
        model.lm_head.register_forward_hook(lambda _, given, logits: computed.add(logits.shape[1]))
        return model

    monkeypatch.setattr(step_runner, "load_model", watched)
    arm = arm_from(preset, engine=ENGINE, model=ModelConfig(id=str(folder), dtype="float32"))
    others = {"backend": "eager", "mode": "default", "options": {}, "join_projections": False, "row_kernels": False}
    policy = arm.compile.replace(**others) if arm.compile.enabled else arm.compile
    runner = runner_for(arm.replace(compile=policy), recorder)
    recorder.drain()
    jobs = [job for job in jobs_for(runner.vocab_size, seed=5) if len(job.prompt) <= 16][:3]
    for row, job in enumerate(jobs):
        job.row = row
    step = Step("prefill", (), tuple(jobs), tuple((0, len(job.prompt)) for job in jobs))
    logits, greedy = runner.run(step, runner.shape_of(step))
    assert computed == {1, ENGINE.slots}
    assert recorder.drain() == []
    plain: Any = load_model(runner.arm.model, plain=True)
    expected = torch.stack([plain(torch.tensor([job.prompt])).logits[0, -1] for job in jobs])
    torch.testing.assert_close(logits[: len(jobs)], expected)
    assert greedy[: len(jobs)].tolist() == expected.argmax(-1).tolist()


def test_an_answer_goes_on_after_a_prompt_that_failed_midway(
    recorder: CompileRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = runner_for(ArmConfig(engine=ENGINE), recorder)
    (alone,) = ask(runner, requests_of([[5, 6, 7]], [12])).tokens.values()
    last, was = runner.cache.layers[-1], runner.cache.layers[-1].update
    steps = iter(range(99))

    def fail(*states: Any) -> Any:
        if next(steps) == 1:  # the second step reads the second prompt
            monkeypatch.setattr(last, "update", was)
            raise torch.OutOfMemoryError
        return was(*states)

    monkeypatch.setattr(last, "update", fail)
    engine = Engine(Scheduler(ENGINE), runner, recorder.drain)
    first, second = requests_of([[5, 6, 7], [8, 9]], [12, 12])
    engine.submit(first)
    outputs, _ = engine.advance()
    engine.submit(second)
    while not engine.idle:
        outputs += engine.advance()[0]
    assert [token for output in outputs for _, token in output.tokens] == alone
    assert [item.status for output in outputs for item in output.finished] == ["RESOURCE_EXHAUSTED", "OK"]


@pytest.mark.parametrize("preset", ["eager", "eager-padded"])
def test_a_prefill_computes_the_logits_of_one_position_a_row_as_the_model_scales_them(
    preset: str, tmp_path: object, recorder: CompileRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_answers_for_one_position_a_row(preset, tmp_path, recorder, monkeypatch)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_from_disk_keeps_its_own_attention(family: str, tmp_path: object, recorder: CompileRecorder) -> None:
    torch.manual_seed(1)
    config = AutoConfig.for_model(family, **{**SMALL, **FAMILIES[family]})
    AutoModelForCausalLM.from_config(config).save_pretrained(str(tmp_path))
    arm = ArmConfig(model=ModelConfig(id=str(tmp_path), dtype="float32"), engine=ENGINE, shapes=ShapeConfig(kind="pad"))
    assert_answers_like_generate(arm, recorder, seed=2)


def test_a_block_past_the_recompile_limit_is_seen_to_run_eagerly(recorder: CompileRecorder) -> None:
    policy = compiling(regional=True, recompile_limit=2, warmup="minimal")
    runner = runner_for(ArmConfig(name="limited", compile=policy, engine=ENGINE), recorder)
    recorder.drain()
    serve(runner, jobs_for(runner.vocab_size, seed=4, count=4))
    events = recorder.drain()
    (limit,) = (event for event in events if event.kind == "limit_hit")
    assert "mismatch" in limit.reason
    assert "eager_fallback" in {event.kind for event in events}


def test_an_arm_warmed_by_one_request_recompiles_while_serving_and_says_why(recorder: CompileRecorder) -> None:
    arm = ArmConfig(name="naive", compile=compiling(regional=True, warmup="minimal"), engine=ENGINE)
    runner = runner_for(arm, recorder)
    recorder.drain()
    serve(runner, [own_request(arm)])
    assert recorder.drain() == []
    jobs = jobs_for(runner.vocab_size, seed=3, count=4)
    serve(runner, jobs)
    events = [event for event in recorder.drain() if event.kind == "recompile"]
    assert len(events) >= 3
    for event in events:
        assert (event.phase, event.batch_id >= 0) == ("serving", True)
        assert "size mismatch" in event.reason
        assert event.shape.startswith(("prefill ", "decode "))
    assert_greedy_like_generate(runner, jobs)


@pytest.mark.parametrize("backend", ["failing", "inductor"])
def test_a_backend_that_fails_leaves_the_script_that_reproduces_it(
    backend: str, recorder: CompileRecorder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def failing(graph: Any, *inputs: Any) -> Any:
        raise ValueError("no tile fits\nof any")

    monkeypatch.setattr(GraphLowering, "run", failing)
    for known in (registry._BACKENDS, registry._COMPILER_FNS):
        monkeypatch.setitem(known, "failing", failing)
    for name, value in (("TAILGATE_LOGS", str(tmp_path)), ("DYNAMO_TOKEN", "a\nsecret"), ("TORCH_KEPT", "1")):
        monkeypatch.setenv(name, value)
    runner = ModelRunner(ArmConfig(name="a", compile=compiling().replace(backend=backend), engine=ENGINE), recorder)
    runner.load()
    with pytest.raises(ConfigError, match=rf'compile.backend is "{backend}".*\(ValueError: no tile fits\)') as raised:
        runner.warm_up(lambda *at: None)
    with pytest.raises(RuntimeError, match=r"ended INTERNAL: ConfigError: compile\.backend"):
        ask(runner, requests_of([[7] * 9], [2]))
    first, *_ = sorted(tmp_path.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    assert str(first) in str(raised.value)
    assert [word in first.read_text() for word in ("secret", "TORCH_KEPT", "run_repro(mod")] == [False, True, True]


def test_weights_that_lack_parameters_of_their_config_are_refused(tmp_path: Path) -> None:
    model: Any = load_model(PLAIN)
    model.save_pretrained(tmp_path)
    saved = PLAIN.replace(id=str(tmp_path))
    assert torch.equal(load_model(saved).state_dict()["lm_head.weight"], model.state_dict()["lm_head.weight"])
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3, "layer_types": None}))
    with pytest.raises(ConfigError, match=r"lack \d+ parameters of its config.json, such as model\.layers\.2\."):
        load_model(saved)


def test_the_linear_layers_of_the_blocks_alone_are_quantised() -> None:
    model: Any = load_model(INT8)
    held = {name for name, item in model.named_parameters() if is_quantised(item)}
    parts = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert {name.split(".")[-2] for name in held} == set(parts)
    assert len(held) == len(parts) * 2
    assert not is_quantised(model.get_output_embeddings().weight)
    assert not is_quantised(model.get_input_embeddings().weight)


@pytest.mark.parametrize(
    ("quantisation", "world", "words"),
    [
        # torchao skips layers that it cannot hold, with a log line at most
        ("int8-weight-only", "skips", ("14 of 14", "model.layers.0.self_attn.q_proj (64 × 64)")),
        ("int8-weight-only", "raises", ("torchao", "(no such kernel)")),
        ("int8-weight-only", "quantised files", ("random:tiny", "already")),
        ("int4-weight-only", "plain", ("CPU", "float8-weight-only", "int8-weight-only")),
    ],
)
def test_bad_quantisation_is_refused(
    quantisation: Any, world: str, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(*_: object, **__: object) -> None:
        if world == "raises":
            raise AssertionError("no such kernel\nand more")

    model: Any = load_model(PLAIN)
    if world in ("skips", "raises"):
        monkeypatch.setattr(torchao.quantization, "quantize_", change)
    elif world == "quantised files":
        model.config.quantization_config = {"quant_method": "gptq"}
    refusal(quantise, model, ModelConfig(quantisation=quantisation), words=words)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_step_has_a_graph_if_one_was_captured_or_its_size_has_run_in_a_graph_tree(mode: str) -> None:
    arm = arm_from("compiled-padded")
    arm = arm.replace(compile=arm.compile.replace(capture=mode == "default", mode=mode))
    runner = ModelRunner(arm, CompileRecorder())
    step = filling_step(StepShape("decode", 2, 1, 9), arm, 100)
    assert not runner.has_graph(step)
    runner._seen.add(runner.shape_of(step))
    assert runner.has_graph(step) is (mode == "reduce-overhead")
    runner._graphs[runner.shape_of(step)] = None  # type: ignore[assignment]
    assert runner.has_graph(step)
