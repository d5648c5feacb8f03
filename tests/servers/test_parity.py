"""Arms that are right pass, planted faults are caught: the real tiny model, a light backend, real judgement."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from analysis.parity.accuracy import AccuracyLimits
from analysis.parity.flips import Answers
from analysis.parity.judge import Accuracy, Parity, judge
from servers import parity
from servers.compiler.events import CompileEvent
from servers.compiler.policy import UnforeseenShapeError
from servers.compiler.recorder import CompileRecorder
from servers.config import ArmConfig, CompileConfig, EngineConfig, ModelConfig, ShapeConfig
from servers.engine.borders import batch_borders, prefill_borders, prompt_borders
from servers.engine.runner import ModelRunner
from servers.engine.scheduler import Move
from tests.servers.compiler.reset import reset_compiler

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
    arm = ArmConfig.from_preset(preset, model=model, engine=replace(ENGINE, **engine))
    if not arm.compile.enabled:
        return arm
    # few buckets, as each costs a compile
    ladders = ShapeConfig(kind="buckets", batch_ladder=(2, 4), length_ladder=(16, 40), context_ladder=(52,))
    return replace(arm, compile=LIGHT, shapes=ladders)


def quiet(stage: str, done: int, total: int) -> None:
    """Nobody listens."""


def answers(
    arm: ArmConfig, plan: parity.Plan | None, fault: Fault | None = None, *, prompts: int = 10
) -> tuple[Answers, parity.Plan]:
    """What the arm says, by the way that the measuring process goes. Without a plan it makes one, as the control."""
    reset_compiler()
    recorder = CompileRecorder()
    recorder.install()
    try:
        runner = ModelRunner(arm, recorder)
        runner.load()
        runner.warm_up(quiet_warm_up)
        assert not [event for event in recorder.drain() if event.phase == "serving"]
        if fault is not None:
            fault(runner)
        plan_of = plan or parity.make_plan(
            [arm, arm_for("compiled-bucketed", arm.model.dtype)],
            vocab_size=runner.vocab_size,
            prompts=prompts,
            tokens=12,
            seed=3,
        )
        free = parity.free_run(arm, runner, recorder, plan_of)
        if plan is None:
            plan_of = replace(plan_of, continuations=tuple(map(tuple, free)))
        logits = np.zeros((plan_of.positions, runner.vocab_size), dtype=np.float32)
        parity.forced_logits(runner, plan_of, logits, quiet)
        late = parity.late_logits(runner, plan_of, logits[sum(plan_of.counts) :], quiet)
        free = [*free, late] if late else free
        if arm.compile.enabled and fault is None:
            assert not stalls(recorder.drain())
        return Answers(name=arm.name, tokens=free, logits=logits), plan_of
    finally:
        recorder.remove()
        reset_compiler()


def quiet_warm_up(done: int, total: int, detail: str) -> None:
    """Nobody listens."""


def stalls(events: list[CompileEvent]) -> list[CompileEvent]:
    return [event for event in events if event.kind in ("compile", "recompile", "limit_hit")]


@functools.cache
def control(dtype: str) -> tuple[Answers, parity.Plan, np.ndarray[Any, Any]]:
    arm = arm_for("eager", dtype)
    said, plan = answers(arm, None)
    reference = np.zeros(said.logits.shape)
    parity.reference_logits(parity.load_reference(arm.model), plan, reference, quiet)
    return said, plan, reference


def parity_of(arm: ArmConfig, fault: Fault | None = None) -> Parity:
    said, plan, reference = control(arm.model.dtype)
    mine, _ = answers(arm, plan, fault)
    prompts = [len(prompt) for prompt in (*plan.prompts, plan.late_prompt)]
    return judge(said, [mine], reference, dtype=arm.model.dtype, prompts=prompts, seed=1)


def verdicts(outcome: Parity) -> dict[str, str]:
    return {finding.name: finding.verdict for finding in outcome.arms[0].findings}


# --- Arms that are right ----------------------------------------------------------------------------------------------


def test_prompts_in_chunks_and_in_batches_have_parity_with_whole_ones() -> None:
    outcome = parity_of(arm_for("eager-padded", "float32", prefill_chunk=16, prefill_batch=2))
    assert outcome.verdict == "PASS", outcome.arms[0].reasons


# --- Planted faults ---------------------------------------------------------------------------------------------------


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


def take_the_second_best_once(runner: ModelRunner) -> None:
    """The logits are right and the token is not: only the free run can show it."""
    run, steps = runner.run, iter(range(10**6))

    def wrong(step: Any, shape: Any) -> Any:
        logits, greedy = run(step, shape)
        return (logits, logits.argsort(dim=-1)[:, -40]) if next(steps) == 25 else (logits, greedy)

    runner.run = wrong  # type: ignore[method-assign]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fault", [perturb_a_weight, forget_the_moves, take_the_second_best_once])
def test_a_planted_fault_fails_in_any_dtype(fault: Fault, dtype: str) -> None:
    outcome = parity_of(arm_for("eager-padded", dtype), fault)
    assert outcome.control.verdict == "PASS"
    assert outcome.verdict == "FAIL", outcome.arms[0]
    verdict_of = verdicts(outcome)
    if fault is take_the_second_best_once:
        assert verdict_of["error"] == "PASS"
        assert verdict_of["flips"] == "FAIL"
        assert "in its free run" in " ".join(outcome.arms[0].reasons)
    else:
        assert "FAIL" in (verdict_of["error"], verdict_of["tail error"], verdict_of["worst error"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_mask_that_shows_one_position_too_many_fails(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    control(dtype)  # before the fault
    right = torch.nn.functional.scaled_dot_product_attention

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **more: Any) -> torch.Tensor:
        mask = more.pop("attn_mask")
        return right(query, key, value, attn_mask=torch.maximum(mask, mask.roll(1, dims=-1)), **more)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    outcome = parity_of(arm_for("eager-padded", dtype))
    assert outcome.verdict == "FAIL"
    assert verdicts(outcome)["error"] == "FAIL"


def test_a_wrong_dtype_fails_and_is_told_by_the_facts() -> None:
    outcome = parity_of(arm_for("eager-padded", "float32"), round_the_weights)
    assert outcome.verdict == "FAIL"
    assert verdicts(outcome)["error"] == "FAIL"
    facts = {}
    for dtype in ("float32", "bfloat16"):
        runner = ModelRunner(arm_for("eager", dtype), CompileRecorder())
        runner.load()
        facts[dtype] = parity.arm_facts(runner, parity.checksum(runner.model))
    assert facts["float32"]["dtypes"] == "float32"
    assert facts["bfloat16"]["dtypes"] == "bfloat16"
    assert facts["float32"]["weights"] != facts["bfloat16"]["weights"]
    assert facts["float32"]["attention"] == facts["bfloat16"]["attention"]


def test_a_control_that_computes_another_model_is_no_measure() -> None:
    said, plan, reference = control("float32")
    wrong, _ = answers(arm_for("eager", "float32"), plan, perturb_a_weight)
    prompts = [len(prompt) for prompt in (*plan.prompts, plan.late_prompt)]
    outcome = judge(wrong, [said], reference, dtype="float32", prompts=prompts, seed=1)
    assert outcome.verdict == "INCONCLUSIVE"
    assert "it does not compute this model" in outcome.arms[0].reasons[0]


# --- Quantised weights ------------------------------------------------------------------------------------------------


@functools.cache
def yardstick() -> tuple[Answers, parity.Plan, np.ndarray[Any, Any]]:
    """The control's answers to as many prompts as set an interval, and the reference."""
    arm = arm_for("eager", "float32")
    said, plan = answers(arm, None, prompts=40)
    reference = np.zeros(said.logits.shape)
    parity.reference_logits(parity.load_reference(quantised("eager").model), plan, reference, quiet)
    return said, plan, reference


def quantised(preset: str) -> ArmConfig:
    arm = arm_for(preset, "float32")
    return replace(arm, name="int8", model=replace(arm.model, quantisation="int8-weight-only"))


def accuracy_of(arm: ArmConfig, fault: Fault | None = None) -> Parity:
    said, plan, reference = yardstick()
    mine, _ = answers(arm, plan, fault)
    accuracy = Accuracy(quantised={"int8": "int8-weight-only"}, limits=AccuracyLimits(perplexity_ratio=1.05, kl=0.05))
    prompts = [len(prompt) for prompt in (*plan.prompts, plan.late_prompt)]
    return judge(said, [mine], reference, dtype="float32", prompts=prompts, seed=1, accuracy=accuracy)


def stretch_the_scales(runner: ModelRunner) -> None:
    runner.model.model.layers[1].mlp.down_proj.weight.scale.mul_(1.5)


@pytest.mark.parametrize(
    ("fault", "finding"),
    [(stretch_the_scales, "kl"), (forget_the_moves, "kl"), (take_the_second_best_once, "answers")],
)
def test_a_planted_fault_fails_a_quantised_arm(fault: Fault, finding: str) -> None:
    outcome = accuracy_of(quantised("eager"), fault)
    assert outcome.control.verdict == "PASS"
    assert verdicts(outcome)[finding] == "FAIL", outcome.arms[0]


def test_quantised_arms_show_that_they_began_with_the_control_s_weights() -> None:
    plain = ModelRunner(arm_for("eager", "float32"), CompileRecorder())
    plain.load()
    model = quantised("eager").model
    assert parity.weights_of(model) == parity.checksum(plain.model)
    assert parity.weights_of(replace(model, seed=1)) != parity.checksum(plain.model)
    runner = ModelRunner(quantised("eager"), CompileRecorder())
    runner.load()
    held = parity.arm_facts(runner, "digest")["held"]
    assert held["quantisation"] == "int8-weight-only"
    assert 0 < held["quantised_bytes"] < held["bytes"]


# --- The parts --------------------------------------------------------------------------------------------------------


def test_the_plan_reaches_both_ends_and_both_sides_of_every_bucket() -> None:
    arms = [arm_for("eager", "float32"), arm_for("compiled-bucketed", "float32")]
    plan = parity.make_plan(arms, vocab_size=259, prompts=24, tokens=99, seed=3)
    lengths = {len(prompt) for prompt in plan.prompts}
    assert {1, 16, 17, 40} <= lengths
    assert max(lengths) == ENGINE.max_prompt_tokens
    assert len(plan.prompts) == 24
    assert {token for prompt in plan.prompts for token in prompt} <= set(range(259))
    assert set(plan.counts) <= set(range(6, ENGINE.max_new_tokens + 1))
    assert len(set(plan.counts)) > 3
    assert parity.make_plan(arms, vocab_size=259, prompts=24, tokens=99, seed=3) == plan
    assert parity.make_plan(arms, vocab_size=259, prompts=24, tokens=99, seed=4) != plan


def test_a_strict_arm_that_was_not_warmed_at_a_border_is_refused_with_the_reason() -> None:
    policy = CompileConfig(enabled=True, dynamic=False, backend="eager", strict=True, warmup="minimal")
    with pytest.raises(
        UnforeseenShapeError, match=r"requests are refused, first request \d+ \(prompt of .* no graph fits"
    ):
        answers(ArmConfig(name="strict", compile=policy, engine=ENGINE), None)


def test_every_decode_bucket_and_the_longest_context_are_asked() -> None:
    arm = arm_for("eager-padded", "float32")
    arm = replace(arm, shapes=ShapeConfig(kind="buckets", context_ladder=(16, 44, 48, 52)))
    plan = parity.make_plan([arm_for("eager", "float32"), arm], vocab_size=259, prompts=0, tokens=3, seed=1)
    assert [len(plan.late_prompt) + place for place in plan.late_places] == [44, 45, 48, 49, 51]
    assert len(plan.late_prompt) == ENGINE.max_prompt_tokens
    said, _ = answers(arm, plan=replace(plan, continuations=tuple((1,) * count for count in plan.counts)))
    assert len(said.tokens[-1]) == 5


def break_late_decodes(runner: ModelRunner) -> None:
    """Only decode steps from the longest context are wrong."""
    run = runner.run

    def wrong(step: Any, shape: Any) -> Any:
        logits, greedy = run(step, shape)
        if step.kind == "decode" and max(job.context for job in step.jobs) - 1 >= 51:
            logits = logits.flip(-1)
        return logits, greedy

    runner.run = wrong  # type: ignore[method-assign]


def test_a_fault_at_the_longest_context_alone_fails() -> None:
    outcome = parity_of(arm_for("eager-padded", "bfloat16"), break_late_decodes)
    assert verdicts(outcome)["worst error"] == "FAIL"
    assert "prompt of 40 tokens" in " ".join(outcome.arms[0].reasons)


def break_decodes_of_three_rows(runner: ModelRunner) -> None:
    """Only decode steps of three rows are wrong, and only the last of them."""
    run = runner.run

    def wrong(step: Any, shape: Any) -> Any:
        logits, greedy = run(step, shape)
        if step.kind == "decode" and len(step.jobs) == 3:
            logits[2] = logits[2].flip(-1)
        return logits, greedy

    runner.run = wrong  # type: ignore[method-assign]


def test_a_fault_in_decode_steps_of_one_number_of_rows_fails() -> None:
    outcome = parity_of(arm_for("eager-padded", "bfloat16"), break_decodes_of_three_rows)
    assert verdicts(outcome)["worst error"] == "FAIL"


def sizes_run(arm: ArmConfig, plan: parity.Plan) -> dict[str, set[int]]:
    """What the teacher forcing of the plan runs, whatever was answered."""
    runner = ModelRunner(arm, CompileRecorder())
    runner.load()
    plan = replace(plan, continuations=tuple((1,) * count for count in plan.counts))
    return parity.forced_logits(runner, plan, np.zeros((plan.positions, runner.vocab_size), dtype=np.float32), quiet)


@pytest.mark.parametrize("tokens", [2, 24])
def test_every_border_of_the_batches_of_every_arm_has_its_step(tokens: int) -> None:
    engine = replace(ENGINE, slots=20, prefill_batch=4, max_new_tokens=24)
    control = ArmConfig(name="eager", model=ModelConfig(device="cpu"), engine=engine)
    bounds = CompileConfig(enabled=True, mark_dynamic=True, batch_bounds=(5, 20), guarded=True)
    ladders = ShapeConfig(kind="buckets", batch_ladder=(6, 20))
    others = [replace(control, name="laddered", shapes=ladders), replace(control, name="bounded", compile=bounds)]
    plan = parity.make_plan([control, *others], vocab_size=259, prompts=0, tokens=tokens, seed=3)
    assert plan.borders["laddered"].batches == {"prefill": (1, 2, 3, 4), "decode": (1, 2, 6, 7, 20)}
    assert plan.borders["bounded"].unasked_batches == plan.borders["bounded"].batches
    assert {4, 5} <= set(plan.borders["bounded"].batches["decode"])
    sizes = sizes_run(control, plan)
    assert sizes["decode"] >= frozenset().union(*map(batch_borders, [control, *others]))
    assert sizes["prefill"] >= frozenset().union(*map(prefill_borders, [control, *others]))
    for borders in plan.borders.values():
        assert not any(borders.after(sizes).unasked_batches.values())


def test_a_batch_border_that_too_few_prompts_fill_is_unasked_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    arm = replace(arm_for("eager-padded", "float32", slots=8), shapes=ShapeConfig(kind="buckets"))
    plan = parity.make_plan([arm], vocab_size=259, prompts=7, tokens=12, seed=3)
    assert caplog.messages == ["7 prompts may not fill every border of batches: give parity.prompts = 9"]
    borders = plan.borders[arm.name].after(sizes_run(arm, plan))
    assert borders.batches["decode"] == (1, 2, 3, 4, 5, 8)
    assert borders.unasked_batches == {"prefill": (), "decode": (8,)}
    more = parity.make_plan([arm], vocab_size=259, prompts=borders.enough, tokens=12, seed=3)
    assert not any(more.borders[arm.name].after(sizes_run(arm, more)).unasked_batches.values())


def test_answers_of_one_token_have_no_decode_steps_to_ask() -> None:
    plan = parity.make_plan([arm_for("eager", "float32")], vocab_size=259, prompts=0, tokens=1, seed=3)
    assert plan.borders["eager"].batches == {"prefill": (1,)}


def test_a_measured_arm_leaves_which_of_its_borders_its_steps_asked(tmp_path: Path) -> None:
    arm = arm_for("eager", "float32")
    task = {"plan": str(tmp_path / "plan.json"), "texts": "", "on_texts": [], "arms": [arm.to_dict()]}
    parity.run_arm(arm, task | {"prompts": 3, "tokens": 2, "seed": 1, "least": 0}, tmp_path)
    borders = json.loads((tmp_path / "borders.json").read_text())
    assert borders["batches"] == {"prefill": [1], "decode": [1, 2, 3, 4]}
    assert borders["unasked_batches"] == {"prefill": [], "decode": [3, 4]}
    assert len(borders["unasked_prompts"]) == len(borders["prompts"]) - 3


def many_borders() -> ArmConfig:
    ladder = (*range(3, 200, 4), 200)
    shapes = ShapeConfig(kind="buckets", length_ladder=ladder)
    return ArmConfig(name="many", shapes=shapes, engine=EngineConfig(max_prompt_tokens=200))


def test_a_plan_with_too_few_prompts_says_how_many_reach_every_border(caplog: pytest.LogCaptureFixture) -> None:
    borders = len(prompt_borders(many_borders()))
    plan = parity.make_plan([many_borders()], vocab_size=9, prompts=20, tokens=2, seed=1)
    assert len(plan.prompts) == 20
    asked, own = {len(prompt) for prompt in plan.prompts}, plan.borders["many"]
    assert set(own.prompts) == prompt_borders(many_borders())
    assert set(own.unasked_prompts) == set(own.prompts) - asked
    assert len(own.unasked_prompts) == borders - 20
    assert caplog.messages == [f"20 prompts reach 20 of {borders} borders: give parity.prompts = {borders}"]


def test_a_plan_without_a_count_fills_the_slots(tmp_path: Path) -> None:
    plan = parity.make_plan([arm_for("eager", "float32", slots=24)], vocab_size=9, prompts=0, tokens=2, seed=1)
    assert len(plan.prompts) == 36
    plan = parity.make_plan([many_borders()], vocab_size=9, prompts=0, tokens=2, seed=1)
    assert len(plan.prompts) > 64
    assert {len(prompt) for prompt in plan.prompts} >= prompt_borders(many_borders())
    assert plan.borders["many"].unasked_prompts == ()
    many = parity.make_plan([many_borders()], vocab_size=9, prompts=0, tokens=2, seed=1, least=500)
    assert len(many.prompts) == 500
    few = parity.make_plan([arm_for("eager", "float32")], vocab_size=9, prompts=0, tokens=2, seed=1, least=64)
    assert len(few.prompts) == 64
    assert len(parity.make_plan([many_borders()], vocab_size=9, prompts=0, tokens=2, seed=1, least=64).prompts) > 64
    plan.write(tmp_path / "plan.json")
    assert parity.Plan.read(tmp_path / "plan.json") == plan


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_the_checksum_sees_a_change_of_any_element_and_of_their_order(dtype: torch.dtype) -> None:
    def of(values: list[float]) -> str:
        module = torch.nn.Module()
        module.register_buffer("values", torch.tensor(values).to(dtype))
        return parity.checksum(module)

    base = [0.0, 1.0, -2.0, 3.0]
    changed = [of([*base[:index], base[index] + 4.0, *base[index + 1 :]]) for index in range(4)]
    swapped = of([1.0, 0.0, -2.0, 3.0])
    assert len({of(base), swapped, *changed}) == 6
    assert of(base) == of(list(base))


def test_nothing_in_the_reference_is_rounded_to_float32() -> None:
    model = parity.load_reference(ModelConfig(dtype="bfloat16", device="cpu"))
    seen: list[torch.dtype] = []
    for module in model.modules():
        if not list(module.children()):
            module.register_forward_hook(
                lambda module, inputs, output: seen.extend(
                    item.dtype for item in (output if isinstance(output, tuple) else (output,))
                )
            )
    plan = parity.Plan(prompts=((1, 2, 3),), counts=(2,), continuations=((4, 5),))
    out = np.zeros((2, 259))
    parity.reference_logits(model, plan, out, quiet)
    assert set(seen) == {torch.float64}
    with parity.NothingBelowFloat64():
        half = torch.ones(2, dtype=torch.float64)
        assert half.float().dtype == torch.float64
        assert half.to(torch.float32).dtype == torch.float64
        assert torch.nn.functional.softmax(half, dim=-1, dtype=torch.float32).dtype == torch.float64
        assert half.to(torch.bfloat16).dtype == torch.bfloat16
    assert np.ptp(out) > 1.0
