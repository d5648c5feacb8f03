"""What parity measures of an encoder, by the engine itself, and that it finds what a broken one does."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from analysis.parity.judge import Parity
from analysis.parity.vectors import Embedded, TextRows, judge_vectors
from servers.compiler.recorder import CompileRecorder
from servers.config import PRESETS, ArmConfig, CompileConfig, EngineConfig, ModelConfig
from servers.engine.borders import batch_borders
from servers.engine.encoder import EncoderRunner
from servers.fields import ConfigError
from servers.parity import NothingBelowFloat64, load_reference, make_plan, run_arm
from servers.vectors import make_batches, reference_vectors, served_vectors
from tests.servers.compiler.reset import reset_compiler

MODEL = ModelConfig(id="random:bert-tiny", task="embed", dtype="float32", device="cpu")
ENGINE = EngineConfig(slots=4, max_prompt_tokens=24, max_wait_ms=50.0, threads=1)
ARMS = [ArmConfig.from_preset(preset, model=MODEL, engine=ENGINE) for preset in ("eager", "eager-padded")]
PLAN = make_plan(ARMS, vocab_size=30522, prompts=0, tokens=1, seed=3)
BATCHES = make_batches(ARMS, len(PLAN.prompts))


def quietly(stage: str, done: int, total: int) -> None:
    assert done <= total


def vectors_of(arm: ArmConfig, fault: Callable[[EncoderRunner], None] = lambda runner: None) -> Embedded:
    recorder = CompileRecorder()
    runner = EncoderRunner(arm, recorder)
    runner.load()
    fault(runner)
    return Embedded(name=arm.name, vectors=served_vectors(arm, runner, recorder, PLAN.prompts, BATCHES, quietly))


@pytest.fixture(scope="module")
def reference() -> np.ndarray:
    return reference_vectors(load_reference(MODEL), "mean", PLAN.prompts, NothingBelowFloat64, quietly)


@pytest.fixture(scope="module")
def control() -> Embedded:
    return vectors_of(ARMS[0])


def judged(control: Embedded, arm: Embedded, reference: np.ndarray) -> Parity:
    texts, sizes = zip(*BATCHES.rows, strict=True)
    rows = TextRows(texts=texts, batches=sizes, lengths=[len(prompt) for prompt in PLAN.prompts])
    return judge_vectors(control, [arm], reference, rows=rows, dtype="float32")


@pytest.mark.parametrize("preset", PRESETS)
def test_every_text_stands_alone_and_every_border_of_the_batch_is_visited(preset: str) -> None:
    arms = [ARMS[0], ArmConfig.from_preset(preset, model=MODEL, engine=replace(ENGINE, slots=20))]
    batches = make_batches(arms, 7).batches
    assert batches[:7] == tuple((text,) for text in range(7))
    assert {len(batch) for batch in batches} == set().union(*map(batch_borders, arms))
    assert {text for batch in batches[7:] for text in batch} == set(range(7))


def test_one_slot_has_no_company() -> None:
    arm = replace(ARMS[0], engine=replace(ENGINE, slots=1))
    assert make_batches([arm], 3).batches == ((0,), (1,), (2,))


def test_a_padded_arm_has_the_vectors_of_the_control_and_of_float64(control: Embedded, reference: np.ndarray) -> None:
    outcome = judged(control, vectors_of(ARMS[1]), reference)
    assert outcome.verdict == "PASS"
    assert outcome.control.figures["cosine"]["least"] > 1 - 1e-9


def forget_the_mask(runner: EncoderRunner) -> None:
    encode = runner._steps["encode"]
    runner._steps["encode"] = lambda ids, mask: encode(ids, torch.ones_like(mask))


def swap_two_rows(runner: EncoderRunner) -> None:
    encode = runner._steps["encode"]

    def swapping(ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (vectors,) = encode(ids, mask)
        return (vectors.flip(0),)

    runner._steps["encode"] = swapping


def pool_the_first_token(runner: EncoderRunner) -> None:
    step = runner._steps["encode"]
    step.pooling = "cls"  # type: ignore[attr-defined]


def lose_a_direction(runner: EncoderRunner) -> None:
    encode = runner._steps["encode"]

    def losing(ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (vectors,) = encode(ids, mask)
        return (vectors * (ids.shape[0] < 4),)

    runner._steps["encode"] = losing


@pytest.mark.parametrize("fault", [forget_the_mask, swap_two_rows, pool_the_first_token, lose_a_direction])
def test_parity_finds_what_a_broken_encoder_does(
    fault: Callable[[EncoderRunner], None], control: Embedded, reference: np.ndarray
) -> None:
    arm = ARMS[1] if fault is forget_the_mask else ARMS[0]
    assert judged(control, vectors_of(replace(arm, name="broken"), fault), reference).verdict == "FAIL"


def measured(arm: ArmConfig, folder: Path, **more: int) -> None:
    """`folder` holds what the measuring process leaves of the arm; the plan is there already, or the arm makes it."""
    task = {"plan": str(folder / "plan.json"), "texts": "", "on_texts": [], "arms": [ARMS[0].to_dict(), arm.to_dict()]}
    reset_compiler()
    try:
        run_arm(arm, {**task, "prompts": 0, "tokens": 24, "seed": 3, "least": 0, **more}, folder)
    finally:
        reset_compiler()


STRICT = replace(
    ARMS[0],
    name="strict",
    compile=CompileConfig(enabled=True, dynamic=False, backend="eager", strict=True, warmup="minimal"),
)


def test_a_strict_encoder_that_was_not_warmed_at_a_border_is_refused_with_the_reason(tmp_path: Path) -> None:
    PLAN.write(tmp_path / "plan.json")
    measured(STRICT, tmp_path)
    reason = json.loads((tmp_path / "refused.json").read_text())["reason"]
    assert f" of {len(BATCHES.rows)} vectors are refused, first of text " in reason
    assert "no graph fits" in reason
    assert not (tmp_path / "vectors.npy").exists()


def test_an_encoder_that_refuses_is_no_control(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the control refuses what it is asked: .* that is not strict"):
        measured(STRICT, tmp_path)


@pytest.mark.parametrize(("prompts", "unasked"), [(0, 0), (3, 1)])
def test_an_encoder_leaves_which_of_its_borders_no_text_asked(prompts: int, unasked: int, tmp_path: Path) -> None:
    measured(ARMS[0], tmp_path, prompts=prompts)
    borders = json.loads((tmp_path / "borders.json").read_text())
    assert borders["prompts"] == [1, 2, 3, 24]
    assert (len(borders["unasked_prompts"]), borders["enough"]) == (unasked, 4)
    # every text stands in a batch of every size, however few there are
    assert borders["batches"] == {"encode": [1, 2, 3, 4]}
    assert borders["unasked_batches"] == {"encode": []}
