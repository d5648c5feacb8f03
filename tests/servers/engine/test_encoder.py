"""The steps of an encoder: its vectors, what compiles, and what it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModel, RobertaConfig

from tailgate.servers.compiler.policy import UnforeseenShapeError
from tailgate.servers.compiler.recorder import CompileRecorder
from tailgate.servers.config import ArmConfig, EngineConfig, ModelConfig
from tailgate.servers.engine import step_runner
from tailgate.servers.engine.encoder import EncoderRunner
from tailgate.servers.engine.in_process import Answers, ask, requests_of
from tailgate.servers.engine.model import check_task, load_model, readable_tokens
from tailgate.servers.engine.runner import runner_for
from tailgate.servers.engine.scheduler import Job, Step
from tailgate.servers.engine.shapes import prompt_borders
from tests.servers.engine.test_runner import compiling, recorder
from tests.servers.test_config import arm_from, refusal

__all__ = ["recorder"]

MODEL = ModelConfig(id="random:bert-tiny", task="embed", dtype="float32", device="cpu")
ENGINE = EngineConfig(slots=5, max_prompt_tokens=40, threads=1)


def arm_of(preset: str, *, backend: str = "eager", **model: Any) -> ArmConfig:
    """On a backend that runs traced graphs as they are, so that tracing alone takes time."""
    arm = arm_from(preset, model=MODEL.replace(**model), engine=ENGINE)
    if arm.compile.enabled and backend != "inductor":
        arm = arm.replace(
            compile=arm.compile.replace(backend=backend, mode="default", options={}, join_projections=False)
        )
    return arm


def warm(arm: ArmConfig, recorder: CompileRecorder) -> EncoderRunner:
    runner = runner_for(arm, recorder)
    assert isinstance(runner, EncoderRunner)
    runner.load()
    runner.warm_up(lambda done, total, detail: None)
    return runner


def job(length: int, seed: int = 0) -> Job:
    generator = torch.Generator().manual_seed(seed * 1000 + length)
    ids = torch.randint(3, 30522, (length,), generator=generator).tolist()
    return Job(request_id=f"{seed}-{length}", prompt=ids, max_tokens=0, recv_ns=0)


@torch.no_grad()
def plain(model: nn.Module, text: Sequence[int], pooling: str) -> torch.Tensor:
    """What the Hugging Face model alone gives, without padding, mask or batch."""
    hidden = model(input_ids=torch.tensor([list(text)])).last_hidden_state[0].double()
    return hidden[0] if pooling == "cls" else hidden.mean(dim=0)


def cosine(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(nn.functional.cosine_similarity(one.double(), other.double(), dim=0))


def batches(arm: ArmConfig) -> list[list[Job]]:
    """Every border of the length with small and full batches, the texts of a batch of unequal length."""
    return [
        [job(max(1, length - 3 * row), seed=row) for row in range(size)]
        for length in sorted(prompt_borders(arm))
        for size in sorted({1, 2, 3, arm.engine.slots - 1, arm.engine.slots} - {0})
    ]


def vectors_of(runner: EncoderRunner, texts: Sequence[Job]) -> torch.Tensor:
    """The vectors [texts, width] of texts that run as one step."""
    step = Step("encode", prompts=tuple(texts), chunks=tuple((0, len(text.prompt)) for text in texts))
    return runner.run(step, runner.shape_of(step))[0][: len(texts)].clone()


def assert_as_plain(runner: EncoderRunner) -> None:
    reference = load_model(runner.arm.model, plain=True)
    for texts in batches(runner.arm):
        vectors = vectors_of(runner, texts)
        assert torch.allclose(vectors.norm(dim=1), torch.ones(len(texts)), atol=1e-5)
        for text, vector in zip(texts, vectors, strict=True):
            assert cosine(vector, plain(reference, text.prompt, runner.arm.model.pooling)) >= 0.9999


@pytest.mark.parametrize("preset", ["eager", "compiled-padded"])
def test_the_first_tokens_vector_is_taken_where_pooling_says_so(preset: str, recorder: CompileRecorder) -> None:
    assert_as_plain(warm(arm_of(preset, pooling="cls"), recorder))


def served(runner: EncoderRunner, lengths: Sequence[int]) -> Answers:
    return ask(runner, requests_of([job(length).prompt for length in lengths], [0] * len(lengths)))


@pytest.mark.parametrize("how", ["strict", "limited"])
def test_an_encoder_refuses_or_runs_eagerly_what_was_not_warmed(how: str, recorder: CompileRecorder) -> None:
    policy = compiling(warmup="minimal", strict=how == "strict", recompile_limit=2)
    runner = warm(ArmConfig(name=how, model=MODEL, engine=ENGINE, compile=policy), recorder)
    assert served(runner, [5]).ended["0"].status == "OK"
    for length in (10, 11, 12):
        with pytest.raises(UnforeseenShapeError) if how == "strict" else nullcontext():
            step = served(runner, [length]).outputs[-1].step
    if how == "limited":
        assert step is not None
        assert not step.compiled


def test_compiled_code_that_no_step_calls_is_seen(recorder: CompileRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_runner.compiler_policy, "compile_step", lambda step, policy: step)
    outputs = served(warm(arm_of("compiled-padded"), recorder), [3, 5]).outputs
    assert [output.step.compiled for output in outputs if output.step] == [False]


@pytest.mark.parametrize("broken", [0.0, float("nan")])
def test_a_text_whose_vector_has_no_direction_fails_alone(broken: float, recorder: CompileRecorder) -> None:
    runner = warm(arm_of("eager"), recorder)
    encode = runner._steps["encode"]

    def breaking(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (vectors,) = encode(*inputs)
        vectors[1] = broken
        return (vectors,)

    runner._steps["encode"] = breaking
    ended = served(runner, [5, 6, 7]).ended
    assert [ended[name].status for name in "012"] == ["OK", "INTERNAL", "OK"]


@pytest.mark.parametrize(
    ("task", "table", "words"),
    [
        ("embed", {"model_type": "llama"}, "which generates"),
        ("embed", {"model_type": "t5", "is_encoder_decoder": True}, "two texts"),
        ("generate", {"model_type": "gemma2", "attn_logit_softcapping": 50.0}, "external arm"),
        ("embed", {"model_type": "bert", "is_decoder": True}, "which generates"),
        ("generate", {"model_type": "bert"}, "which embeds"),
    ],
)
def test_models_that_cannot_do_the_task_are_refused(task: Any, table: dict[str, Any], words: str) -> None:
    config = type("Config", (), {"is_encoder_decoder": False, **table})
    refusal(check_task, ModelConfig(id="some/model", task=task), config, words=(words,))
    bert = type("Config", (), {"is_encoder_decoder": False, "model_type": "bert"})
    check_task(ModelConfig(id="some/model", task="embed"), bert)  # type: ignore[arg-type]


def test_texts_longer_than_the_models_positions_are_refused_and_those_of_the_padding_do_not_count() -> None:
    """RoBERTa numbers positions from the padding's id on."""
    long = ArmConfig(name="long", model=MODEL, engine=ENGINE.replace(max_prompt_tokens=513))
    refusal(runner_for(long, CompileRecorder()).load, words=("max_prompt_tokens is 513", "512", "bert-tiny"))
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    config = RobertaConfig(vocab_size=300, pad_token_id=1, max_position_embeddings=20, **sizes)
    assert readable_tokens(AutoModel.from_config(config, add_pooling_layer=False)) == 18
    assert readable_tokens(load_model(MODEL)) == 512
