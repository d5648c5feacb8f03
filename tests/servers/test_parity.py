"""Arms that are right pass, planted faults are caught: tiny models, a light backend, the real judgement."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from tailgate.analysis.parity.judge import Answers, Places, Task, judge
from tailgate.analysis.parity.outcome import Parity
from tailgate.analysis.parity.vectors import LEAST_COSINE, TextRows, judge_vectors
from tailgate.servers import parity
from tailgate.servers.compiler.policy import UnforeseenShapeError
from tailgate.servers.compiler.recorder import CompileRecorder
from tailgate.servers.complaint import ConfigError
from tailgate.servers.config import ArmConfig, CompileConfig, EngineConfig, ModelConfig, ShapeConfig
from tailgate.servers.engine import in_process
from tailgate.servers.engine.encoder import EncoderRunner
from tailgate.servers.engine.engine import Engine
from tailgate.servers.engine.model import load_model
from tailgate.servers.engine.runner import ModelRunner
from tailgate.servers.engine.scheduler import Move
from tailgate.servers.engine.shapes import prompt_borders
from tests.servers.compiler.test_recorder import reset_compiler
from tests.servers.test_config import arm_from

ENGINE = EngineConfig(slots=4, max_prompt_tokens=40, max_new_tokens=12, threads=1)
LIGHT = CompileConfig(enabled=True, backend="aot_eager", dynamic=False, fullgraph=True)

Fault = Callable[[ModelRunner], None]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def arm_for(preset: str, dtype: str, **engine: Any) -> ArmConfig:
    model = ModelConfig(dtype=dtype, device="cpu")  # type: ignore[arg-type]
    arm = arm_from(preset, model=model, engine=ENGINE.replace(**engine))
    if not arm.compile.enabled:
        return arm
    # few buckets, as each costs a compile
    ladders = ShapeConfig(kind="buckets", batch_ladder=(2, 4), length_ladder=(16, 44))
    return arm.replace(compile=LIGHT, shapes=ladders)


def load_reference(model: ModelConfig) -> torch.nn.Module:
    return load_model(model.replace(quantisation="none"), plain=True)


def quiet(*_: object) -> None:
    """Progress is not shown."""


def answers(
    arm: ArmConfig, plan: parity.Plan | None, fault: Fault | None = None, *, prompts: int = 10
) -> tuple[Answers, parity.Plan]:
    """What the arm says, by the way that the measuring process goes. Without a plan it makes one, as the control."""
    reset_compiler()
    with ExitStack() as stack:
        stack.callback(reset_compiler)
        runner = stack.enter_context(in_process.warm_runner(arm, quiet))
        assert isinstance(runner, ModelRunner)
        assert not [event for event in runner.recorder.drain() if event.phase == "serving"]
        if fault is not None:
            fault(runner)
        plan_of = plan or parity.make_plan(
            [arm, arm_for("compiled-bucketed", arm.model.dtype)],
            vocab_size=runner.vocab_size,
            prompts=prompts,
            tokens=12,
            seed=3,
        )
        free = parity.free_run(runner, plan_of)
        plan_of = plan_of.answered(free) if plan is None else plan_of
        logits = np.zeros((len(plan_of.rows), runner.vocab_size), dtype=np.float32)
        parity.forced_logits(runner, plan_of, logits)
        return Answers(name=arm.name, tokens=free, logits=logits), plan_of


def loaded(arm: ArmConfig) -> ModelRunner:
    runner = ModelRunner(arm, CompileRecorder())
    runner.load()
    return runner


@functools.cache
def control(dtype: str, prompts: int) -> tuple[Answers, parity.Plan, np.ndarray[Any, Any]]:
    arm = arm_for("eager", dtype)
    said, plan = answers(arm, None, prompts=prompts)
    reference = np.zeros(said.logits.shape)
    parity.reference_logits(load_reference(arm.model), plan, reference)
    return said, plan, reference


def parity_of(arm: ArmConfig, fault: Fault | None = None, *, prompts: int = 10, **quantised: str) -> Parity:
    said, plan, reference = control(arm.model.dtype, prompts)
    mine, _ = answers(arm, plan, fault)
    lengths, prompt_lengths = zip(*((len(item.places), len(item.prompt)) for item in plan.requests), strict=True)
    place = Places(lengths=lengths, prompts=prompt_lengths)
    task = Task(control=said, reference=reference, place=place, dtype=arm.model.dtype, seed=1, max_kl=0.05, source="")
    return judge(task, [replace(mine, quantised=quantised.get(mine.name, ""))])


def verdicts(outcome: Parity) -> dict[str, str]:
    return {finding.name: finding.verdict for finding in outcome.arms[0].findings}


def test_prompts_in_chunks_have_parity_with_whole_ones() -> None:
    outcome = parity_of(arm_for("eager-padded", "float32", step_tokens=16))
    assert outcome.verdict == "PASS", outcome.arms[0].reasons


def perturb_a_weight(runner: ModelRunner) -> None:
    weight = runner.model.model.layers[1].mlp.down_proj.weight
    with torch.no_grad():
        weight[:8] *= 1.25


def round_the_weights(runner: ModelRunner) -> None:
    """What a checkpoint that was stored in bfloat16 would do to a float32 arm."""
    with torch.no_grad():
        for weight in runner.model.parameters():
            weight.copy_(weight.to(torch.bfloat16))


def forget_the_moves(runner: ModelRunner) -> None:
    def nothing(move: Move) -> None:
        """The row stays where it was."""

    runner.move = nothing  # type: ignore[method-assign]


def show_one_position_too_many(runner: ModelRunner) -> None:
    make = runner._inputs

    def inputs(step: Any, shape: Any) -> Any:
        varying, fixed = make(step, shape)
        if step.kind == "prefill":
            varying[4][:, 2] += 1  # where the pieces of prompts begin
        else:
            varying[1] += varying[1] < runner.cache.window.padding  # where the new tokens stand
        return varying, fixed

    runner._inputs = inputs  # type: ignore[method-assign]


def change_outputs(change: Callable[[Any, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> Fault:
    """The logits and greedy tokens of each step become those that `change` makes of them."""

    def fault(runner: ModelRunner) -> None:
        run = runner.run
        runner.run = lambda step, shape: change(step, *run(step, shape))  # type: ignore[method-assign]

    return fault


def take_the_second_best_once(runner: ModelRunner) -> None:
    """The logits are right and the token is not: only the free run can show it."""
    steps = iter(range(10**6))
    change_outputs(
        lambda step, logits, greedy: (logits, logits.argsort(dim=-1)[:, -40] if next(steps) == 9 else greedy)
    )(runner)


def flip_where(is_wrong: Callable[[Any], bool], rows: slice) -> Fault:
    def flip(step: Any, logits: torch.Tensor, greedy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if step.kind == "decode" and is_wrong(step):
            logits[rows] = logits[rows].flip(-1)
        return logits, greedy

    return change_outputs(flip)


at_the_longest_context = flip_where(lambda step: max(job.context for job in step.jobs) - 1 >= 51, slice(None))
of_three_rows = flip_where(lambda step: len(step.jobs) == 3, slice(2, 3))


@pytest.mark.parametrize(
    ("fault", "dtype", "finding"),
    [
        (perturb_a_weight, "float32", "error"),
        (perturb_a_weight, "bfloat16", "error"),
        (round_the_weights, "float32", "error"),
        (forget_the_moves, "float32", "tail error"),
        (forget_the_moves, "bfloat16", "tail error"),
        (show_one_position_too_many, "float32", "error"),
        (show_one_position_too_many, "bfloat16", "error"),
        (at_the_longest_context, "bfloat16", "worst error"),
        (of_three_rows, "bfloat16", "worst error"),
        (take_the_second_best_once, "float32", "flips"),
        (take_the_second_best_once, "bfloat16", "flips"),
    ],
)
def test_a_planted_fault_fails(fault: Fault, dtype: str, finding: str) -> None:
    outcome = parity_of(arm_for("eager-padded", dtype), fault)
    assert (outcome.control.verdict, outcome.verdict) == ("PASS", "FAIL"), outcome.arms[0]
    assert verdicts(outcome)[finding] == "FAIL", outcome.arms[0]
    assert finding != "flips" or verdicts(outcome)["error"] == "PASS"


def quantised(preset: str) -> ArmConfig:
    arm = arm_for(preset, "float32")
    return arm.replace(name="int8", model=arm.model.replace(quantisation="int8-weight-only"))


def test_facts_name_the_dtype_and_the_weights_before_they_are_quantised() -> None:
    runners = {dtype: loaded(arm_for("eager", dtype)) for dtype in ("float32", "bfloat16")}
    sums = {dtype: parity.checksum(runner.model) for dtype, runner in runners.items()}
    facts = {dtype: parity.arm_facts(runner, sums[dtype]) for dtype, runner in runners.items()}
    assert {dtype: facts[dtype]["dtypes"] for dtype in facts} == {dtype: dtype for dtype in facts}
    assert facts["float32"]["weights"] != facts["bfloat16"]["weights"]
    assert facts["float32"]["attention"] == facts["bfloat16"]["attention"]
    model = quantised("eager").model
    assert parity.weights_of(model) == sums["float32"] != parity.weights_of(model.replace(seed=1))


def test_a_device_too_small_for_float64_leaves_the_reference_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    double = Mock(side_effect=[torch.OutOfMemoryError("no room"), "wide"])
    monkeypatch.setattr(torch.nn.Module, "double", double)
    assert parity.widened(torch.nn.Linear(2, 2)) == "wide"  # type: ignore[comparison-overlap]


def plan_for(*arms: ArmConfig, **how: int) -> parity.Plan:
    return parity.make_plan(list(arms), **{"vocab_size": 259, "prompts": 0, "tokens": 12, "seed": 3, **how})


def test_a_strict_arm_that_was_not_warmed_at_a_border_is_refused_with_the_reason() -> None:
    policy = CompileConfig(enabled=True, dynamic=False, backend="eager", strict=True, warmup="minimal")
    with pytest.raises(UnforeseenShapeError, match=r"first request \d+ \(prompt of .* no graph fits"):
        answers(ArmConfig(name="strict", compile=policy, engine=ENGINE), None)


def test_the_longest_context_is_asked() -> None:
    arm = arm_for("eager-padded", "float32")
    plan = plan_for(arm, tokens=3, seed=1)
    late = plan.requests[-1]
    assert [len(late.prompt) + place for place in late.places] == [51]
    assert len(late.prompt) == ENGINE.max_prompt_tokens
    said, _ = answers(arm, plan=plan)
    assert len(said.logits) == len(plan.rows)
    assert np.ptp(said.logits[-1]) > 0, "it was computed"


def test_every_bucket_of_an_arm_is_met() -> None:
    arm = arm_for("eager", "float32", max_prompt_tokens=300).replace(shapes=ShapeConfig(kind="buckets"))
    runner, met = loaded(arm), set[object]()
    run = runner.run
    runner.run = lambda step, shape: met.add(shape) or run(step, shape)  # type: ignore[func-returns-value, method-assign]
    plan = plan_for(arm)
    parity.forced_logits(runner, plan, np.zeros((len(plan.rows), runner.vocab_size), dtype=np.float32))
    assert met == set(runner.shapes.planned())


def measured(arm: ArmConfig, folder: Path, **task: Any) -> parity.Plan:
    """The plan that the measuring process answers; it is there already, or the arm makes it."""
    paths = {"plan": str(folder / "plan.json"), "texts": []}
    arms = [(ENCODERS[0] if arm.model.task == "embed" else arm).to_dict(), arm.to_dict()]
    reset_compiler()
    try:
        parity.run_arm(arm, {**paths, "arms": arms, "prompts": 0, "tokens": 24, "seed": 3, **task}, folder)
    finally:
        reset_compiler()
    return parity.read_plan(folder / "plan.json")


def test_lost_tokens_large_logits_and_other_texts_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Losing(Engine):
        def advance(self) -> Any:
            outputs, events = super().advance()
            return [replace(output, tokens=output.tokens[1:]) for output in outputs], events

    arm = arm_for("eager", "float32")
    with pytest.raises(ConfigError, match=r"parity\.texts .*259"):
        measured(arm, tmp_path, texts=[[[1, 259], [2]]])
    monkeypatch.setattr(parity, "MAX_LOGITS_BYTES", 0)
    with pytest.raises(ConfigError, match=r"parity\.prompts"):
        measured(arm, tmp_path, prompts=3)
    monkeypatch.setattr(in_process, "Engine", Losing)
    with pytest.raises(RuntimeError, match="instead of"):
        measured(arm, tmp_path, prompts=3)


def test_a_plan_reaches_every_border_and_fills_the_slots_without_a_count() -> None:
    few = [arm_for("eager", "float32"), arm_for("compiled-bucketed", "float32")]
    plan = plan_for(*few, prompts=24, tokens=99)
    assert plan_for(*few, prompts=24, tokens=99) == plan != plan_for(*few, prompts=24, tokens=99, seed=4)
    assert {token for prompt in plan.prompts for token in prompt} <= set(range(259))
    counts = {len(request.tokens) for request in plan.requests[:24]}
    assert len(counts) > 3
    assert counts <= set(range(6, ENGINE.max_new_tokens + 1))
    shapes = ShapeConfig(kind="buckets", length_ladder=(*range(3, 200, 4), 208))
    many = ArmConfig(name="many", shapes=shapes, engine=EngineConfig(max_prompt_tokens=200))
    assert len(plan_for(arm_for("eager", "float32", slots=24), tokens=2).prompts) == 36
    plan = plan_for(many, tokens=2)
    assert len(plan.prompts) > 64
    assert {len(prompt) for prompt in plan.prompts} >= prompt_borders(many)
    assert {len(prompt) for prompt in plan_for(many, tokens=2, prompts=3).prompts} == prompt_borders(many)
    assert len(plan_for(many, tokens=2, prompts=500).prompts) == 500


def test_the_checksum_sees_a_change_of_any_element_and_of_their_order() -> None:
    def of(values: list[float], dtype: torch.dtype) -> str:
        module = torch.nn.Module()
        module.register_buffer("values", torch.tensor(values).to(dtype))
        return parity.checksum(module)

    base = [0.0, 1.0, -2.0, 3.0]
    changed = [[*base[:index], base[index] + 4.0, *base[index + 1 :]] for index in range(4)]
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        assert len({of(values, dtype) for values in (base, [1.0, 0.0, -2.0, 3.0], *changed)}) == 6
        assert of(base, dtype) == of(list(base), dtype)


def test_nothing_in_the_reference_is_rounded_to_float32() -> None:
    model = load_reference(ModelConfig(dtype="bfloat16", device="cpu"))
    seen: list[torch.dtype] = []
    for module in model.modules():
        if not list(module.children()):
            module.register_forward_hook(
                lambda module, inputs, output: seen.extend(
                    item.dtype for item in (output if isinstance(output, tuple) else (output,))
                )
            )
    plan = parity.Plan(asked=1, texts=0, requests=(parity.Request.whole((1, 2, 3), (4, 5)),))
    out = np.zeros((2, 259))
    parity.reference_logits(model, plan, out)
    assert set(seen) == {torch.float64}
    with parity.NothingBelowFloat64():
        half = torch.ones(2, dtype=torch.float64)
        assert half.float().dtype == torch.float64
        assert half.to(torch.float32).dtype == torch.float64
        assert torch.nn.functional.softmax(half, dim=-1, dtype=torch.float32).dtype == torch.float64
        assert half.to(torch.bfloat16).dtype == torch.bfloat16
    assert np.ptp(out) > 1.0


ENCODER = ModelConfig(id="random:bert-tiny", task="embed", dtype="float32", device="cpu")
TEXTS = EngineConfig(slots=4, max_prompt_tokens=24, max_wait_ms=50.0, threads=1)
ENCODERS = [arm_from(preset, model=ENCODER, engine=TEXTS) for preset in ("eager", "eager-padded")]
PLAN = parity.make_plan(ENCODERS, vocab_size=30522, prompts=0, tokens=1, seed=3)
BATCHES = parity.make_batches(TEXTS.slots, len(PLAN.prompts))


def vectors_of(arm: ArmConfig, fault: Callable[[EncoderRunner], None] = lambda runner: None) -> np.ndarray[Any, Any]:
    runner = EncoderRunner(arm, CompileRecorder())
    runner.load()
    fault(runner)
    return parity.served_vectors(runner, PLAN.prompts, BATCHES)


@functools.cache
def control_vectors() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    model = load_reference(ENCODER)
    reference = parity.reference_vectors(model, "mean", PLAN.prompts)
    return vectors_of(ENCODERS[0]), reference


def judged_vectors(arm: np.ndarray[Any, Any]) -> Parity:
    said, reference = control_vectors()
    texts, sizes = zip(*parity.rows_of(BATCHES), strict=True)
    rows = TextRows(texts=texts, batches=sizes, lengths=[len(prompt) for prompt in PLAN.prompts])
    return judge_vectors("eager", {"eager": said, "arm": arm}, reference, rows=rows, limit=LEAST_COSINE["float32"])


def test_every_text_is_embedded_alone_and_in_batches_of_growing_size() -> None:
    batches = parity.make_batches(20, 7)
    assert batches[:7] == [(text,) for text in range(7)]
    sizes = {len(batch) for batch in batches}
    assert sizes == {1, 2, 3, 4, 5, 8, 9, 16, 17, 20}
    assert all({text for batch in batches if len(batch) == size for text in batch} == set(range(7)) for size in sizes)
    assert parity.make_batches(1, 3) == [(0,), (1,), (2,)]


def test_a_padded_arm_has_the_vectors_of_the_control_and_of_float64() -> None:
    outcome = judged_vectors(vectors_of(ENCODERS[1]))
    assert outcome.verdict == "PASS"
    assert outcome.control.findings[0].value > 1 - 1e-9  # type: ignore[operator]


def changed_step(change: Callable[[Any, torch.Tensor], torch.Tensor]) -> Callable[[EncoderRunner], None]:
    def fault(runner: EncoderRunner) -> None:
        encode = runner._steps["encode"]
        runner._steps["encode"] = lambda ids: (change(encode, ids),)

    return fault


def pool_the_first_token(runner: EncoderRunner) -> None:
    runner._steps["encode"].pooling = "cls"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("arm", "fault"),
    [
        (ENCODERS[1], changed_step(lambda encode, ids: encode(ids.clamp(min=0))[0])),
        (ENCODERS[0], changed_step(lambda encode, ids: encode(ids)[0].flip(0))),
        (ENCODERS[0], changed_step(lambda encode, ids: encode(ids)[0] * (ids.shape[0] < 4))),
        (ENCODERS[0], pool_the_first_token),
    ],
    ids=["no mask", "swapped rows", "no direction", "first token"],
)
def test_a_broken_encoder_fails(arm: ArmConfig, fault: Callable[[EncoderRunner], None]) -> None:
    assert judged_vectors(vectors_of(arm.replace(name="broken"), fault)).verdict == "FAIL"


def test_a_strict_encoder_that_was_not_warmed_at_a_border_is_refused_and_no_control(tmp_path: Path) -> None:
    policy = CompileConfig(enabled=True, dynamic=False, backend="eager", strict=True, warmup="minimal")
    strict = ENCODERS[0].replace(name="strict", compile=policy)
    with pytest.raises(ConfigError, match=r"the control refuses"):
        measured(strict, tmp_path)
    (tmp_path / "plan.json").write_text(PLAN.model_dump_json())
    measured(strict, tmp_path)
    reason = json.loads((tmp_path / "refused.json").read_text())["reason"]
    assert "no graph fits" in reason
    assert not (tmp_path / "outputs.npy").exists()
