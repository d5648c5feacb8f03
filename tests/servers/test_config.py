from __future__ import annotations

from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servers.config import PRESETS, ArmConfig, CompileConfig, EngineConfig, ModelConfig, ShapeConfig
from servers.engine.shapes import StepShape, shape_policy
from servers.fields import ConfigError, build, override

BERT = {"id": "random:bert-tiny", "task": "embed"}


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_serves_an_encoder(preset: str) -> None:
    arm = ArmConfig.from_preset(preset, model=ModelConfig(id="random:bert-tiny", task="embed", pooling="cls"))
    assert ArmConfig.from_dict(arm.to_dict()) == arm
    assert arm.compile == replace(ArmConfig.from_preset(preset).compile, join_projections=False)


def test_a_model_in_a_package_reads_as_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "some_weights" / "model"
    folder.mkdir(parents=True)
    (tmp_path / "some_weights" / "__init__.py").write_text("raise AssertionError('nobody imports this')")
    monkeypatch.syspath_prepend(tmp_path)
    model = ModelConfig(id="package:some_weights/model")
    assert model.id == str(folder)
    assert ModelConfig(**asdict(model)) == model
    for model_id, words in (
        ("package:some_weights/other", "has no folder other: look into"),
        ("package:no_such_weights/model", "the Python package no_such_weights is not installed"),
        ("package:some_weights", "is not of the form package:NAME/FOLDER"),
    ):
        with pytest.raises(ConfigError, match=words):
            ModelConfig(id=model_id)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_survives_the_way_through_plain_tables(preset: str) -> None:
    arm = ArmConfig.from_preset(preset)
    assert ArmConfig.from_dict(arm.to_dict()) == arm


def test_presets_differ_in_the_policy_alone() -> None:
    arms = [ArmConfig.from_preset(preset) for preset in PRESETS]
    assert len({(arm.model, arm.engine) for arm in arms}) == 1
    assert len({(arm.shapes, arm.compile) for arm in arms}) == len(PRESETS)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"speed": 1}, ("arm.speed", "preset")),
        ({"engine": {"slots": 0}}, ("engine.slots", "0", "1")),
        ({"engine": {"slots": True}}, ("engine.slots", "int")),
        ({"engine": {"prefill_batch": 9}}, ("engine.prefill_batch", "9", "8")),
        ({"model": {"id": ""}}, ("model.id",)),
        ({"model": {"id": "random:huge"}}, ("random:huge", "llama-3.2-1b")),
        ({"shapes": {"kind": "round"}}, ("shapes.kind", "round", "buckets")),
        ({"shapes": {"kind": "buckets", "batch_ladder": [4, 2]}}, ("batch_ladder", "[4, 2]")),
        ({"shapes": {"kind": "buckets", "batch_ladder": [1, 2]}}, ("2", "engine.slots", "8")),
        ({"shapes": {"batch_ladder": [8]}}, ("batch_ladder", 'kind = "buckets"')),
        ({"compile": {"mode": "turbo"}}, ("compile.mode", "turbo", "reduce-overhead")),
        ({"compile": {"mark_dynamic": True, "dynamic": False}}, ("mark_dynamic",)),
        ({"name": "a b"}, ('"a b"',)),
        ({"name": "größe"}, ('"größe"', "A to Z")),
        ({"name": ".hidden"}, ('".hidden"', "begin with a letter")),
        ({"name": "-v"}, ('"-v"', "begin with a letter")),
        ({"name": "x" * 300}, ("300 characters", "at most 64")),
        ({"model": {"device": "tpu"}}, ("model.device", '"tpu"', "cuda:N")),
        ({"model": {"device": "cuda:one"}}, ('"cuda:one"', "cuda:N")),
        ({"model": {"device": "cpu:1"}}, ('"cpu:1"',)),
        ({"shapes": {"min_size": 4}, "engine": {"slots": 2}}, ("shapes.min_size is 4", "engine.slots is 2")),
        ({"engine": 5}, ("arm.engine", "table")),
        ({"model": {"task": "sing"}}, ("model.task", "sing", "embed")),
        ({"model": {"task": "embed"}}, ('"random:tiny" generates', "random:bert-base")),
        ({"model": {"id": "random:bert-tiny"}}, ('"random:bert-tiny" embeds', 'model.task = "embed"')),
        ({"model": {"pooling": "cls"}}, ('model.pooling is "cls"', "only embeddings")),
        ({"model": {**BERT, "quantisation": "int8-weight-only"}}, ("model.quantisation", "own weights alone")),
        ({"engine": {"max_wait_ms": 5}}, ("engine.max_wait_ms is 5", "join while others run")),
        ({"model": BERT, "engine": {"prefill_chunk": 64}}, ("engine.prefill_chunk is 64", "whole")),
        ({"model": BERT, "engine": {"prefill_batch": 2}}, ("engine.prefill_batch is 2", "engine.slots")),
        ({"model": BERT, "engine": {"max_prompt_tokens": 513}}, ("513", "512", "bert-tiny")),
        ({"model": BERT, "compile": {"enabled": True, "join_projections": True}}, ("join_projections", "biases")),
        (
            {"model": BERT, "shapes": {"kind": "buckets", "context_ladder": [256, 384]}},
            ("shapes.context_ladder", "no context"),
        ),
        (
            {"model": BERT, "compile": {"enabled": True, "mark_dynamic": True, "unbacked": ["context"]}},
            ("compile.unbacked", "no context"),
        ),
    ],
)
def test_a_bad_table_is_named_in_one_line(table: dict[str, object], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        ArmConfig.from_dict(table)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_an_unknown_preset_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="compiled-naive"):
        ArmConfig.from_preset("fast")


def test_override_replaces_only_what_it_names() -> None:
    base = CompileConfig(enabled=True, dynamic=True)
    changed = override(base, {"mode": "max-autotune"}, where="arms[1].compile")
    assert changed == CompileConfig(enabled=True, dynamic=True, mode="max-autotune")
    with pytest.raises(ConfigError, match=r"arms\[1\].compile.speed"):
        override(base, {"speed": 1}, where="arms[1].compile")


def test_max_length_is_prompt_plus_generated() -> None:
    assert EngineConfig(max_prompt_tokens=10, max_new_tokens=5).max_length == 15
    assert ShapeConfig(min_size=2).min_size == 2


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"capture": True}, "compile.capture is true but compile.enabled is false"),
        ({"enabled": True, "capture": True, "mode": "reduce-overhead"}, "records CUDA graphs of its own"),
        ({"enabled": True, "batch_bounds": [2, 8]}, "compile.mark_dynamic is false"),
        ({"enabled": True, "mark_dynamic": True, "batch_bounds": [1, 8]}, "low at least 2"),
        ({"enabled": True, "options": 3}, "give a table"),
        ({"enabled": True, "backend_module": "not/a.module"}, 'backend_module is "not/a.module": give the dotted name'),
        ({"enabled": True, "regions": ["model..mlp"]}, r'compile.regions holds "model..mlp": give qualified names'),
        ({"enabled": True, "eager_regions": [""]}, 'compile.eager_regions holds ""'),
        ({"enabled": True, "regional": True, "regions": ["lm_head"]}, "regional is the repeated block alone"),
        ({"enabled": True, "fullgraph": True, "eager_regions": ["lm_head"]}, "a graph ends where an eager module"),
        ({"enabled": True, "unbacked": ["batch"]}, "compile.mark_dynamic is false: set it to true"),
        ({"enabled": True, "mark_dynamic": True, "unbacked": ["length"]}, "use one of batch, context"),
        ({"enabled": True, "guarded": True, "strict": True}, "compile.guarded and compile.strict are both true"),
        ({"background": True}, "compile.background is true but compile.enabled is false"),
        ({"enabled": True, "background": True, "backend": "aot_eager"}, 'but compile.backend is "aot_eager", and only'),
        ({"enabled": True, "background": True, "mode": "max-autotune"}, 'is "max-autotune", which tunes .* "default"'),
        ({"enabled": True, "background": True, "capture": True}, "but compile.capture is true, and a captured graph"),
        ({"enabled": True, "background": True, "artifact": "a"}, "but compile.artifact is set, and code .* nowhere"),
    ],
)
def test_compile_settings_that_cannot_be_meant_are_refused(table: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(CompileConfig, table, where="compile")


def test_capture_needs_planned_shapes() -> None:
    policy = CompileConfig(enabled=True, capture=True)
    with pytest.raises(ConfigError, match=r'shapes\.kind is "exact"'):
        ArmConfig(name="a", compile=policy)
    with pytest.raises(ConfigError, match=r'warmup is "minimal"'):
        ArmConfig(name="a", shapes=ShapeConfig(kind="pad"), compile=replace(policy, warmup="minimal"))


EVEN = ShapeConfig(kind="exact", min_size=2)
MARKED = CompileConfig(enabled=True, dynamic=True, mark_dynamic=True)


def test_bounds_that_the_engine_can_exceed_are_refused() -> None:
    policy = replace(MARKED, batch_bounds=(2, 4))
    with pytest.raises(ConfigError, match=r"batch_bounds ends at 4 but engine\.slots is 8"):
        ArmConfig(name="a", engine=EngineConfig(slots=8), shapes=EVEN, compile=policy)
    assert ArmConfig(name="a", engine=EngineConfig(slots=4), shapes=EVEN, compile=policy).compile.has_bounds


def test_bounds_below_a_bucket_that_is_served_are_refused() -> None:
    shapes = ShapeConfig(kind="buckets", length_ladder=(32, 512))
    with pytest.raises(ConfigError, match=r"length_bounds ends at 256 but steps of 512 are served.*give \[2, 512\]"):
        ArmConfig(name="a", shapes=shapes, compile=replace(MARKED, length_bounds=(2, 256)))
    ArmConfig(name="a", shapes=shapes, compile=replace(MARKED, length_bounds=(2, 512)))


@pytest.mark.parametrize("preset", ["compiled-dynamic", "compiled-strict"])
@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        ({"batch_bounds": (4, 8)}, "batch_bounds begins at 4 but steps of 2 are served.*give \\[2, 8\\]"),
        ({"length_bounds": (3, 256)}, "length_bounds begins at 3 but steps of 2 are served.*give \\[2, 256\\]"),
        ({"context_bounds": (8, 384)}, "context_bounds begins at 8 but steps of 2 are served.*give \\[2, 384\\]"),
    ],
)
def test_bounds_above_the_smallest_size_that_is_served_are_refused(
    preset: str, bounds: dict[str, tuple[int, int]], words: str
) -> None:
    arm = ArmConfig.from_preset(preset)
    policy = replace(arm.compile, **bounds)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=words) as caught:
        replace(arm, compile=policy)
    assert "\n" not in str(caught.value)
    assert ("is refused" if arm.compile.strict else "compiles apart") in str(caught.value)
    replace(arm, compile=policy, shapes=ShapeConfig(kind="exact", min_size=8))
    replace(arm, compile=replace(policy, strict=False, guarded=True))


def test_bounds_leave_size_1_out_unless_it_is_padded() -> None:
    policy = replace(MARKED, batch_bounds=(2, 8), length_bounds=(2, 256))
    with pytest.raises(ConfigError, match=r"steps of 1 are served.*give \[2, 8\] and shapes\.min_size = 2"):
        ArmConfig(name="a", compile=policy)
    ArmConfig(name="a", shapes=EVEN, compile=policy)
    # an answer of two tokens to a prompt of one is decoded from two positions
    ArmConfig(name="a", compile=replace(MARKED, context_bounds=(2, 384)))


def test_bounds_may_begin_above_planned_shapes_which_are_warmed() -> None:
    ArmConfig(name="a", shapes=ShapeConfig(kind="buckets"), compile=replace(MARKED, batch_bounds=(4, 8)))


def test_a_hidden_size_below_what_the_compiler_is_told_is_refused() -> None:
    policy = replace(MARKED, unbacked=("batch", "context"))
    with pytest.raises(ConfigError, match=r'names "batch" but shapes\.min_size is 1, and a hidden size may not be 1'):
        ArmConfig(name="a", compile=policy)
    with pytest.raises(ConfigError, match=r"context_bounds begins at 64, and steps of 2 are served: give \[2, 400\]"):
        ArmConfig(name="a", shapes=EVEN, compile=replace(policy, context_bounds=(64, 400)))
    ArmConfig(name="a", shapes=EVEN, compile=replace(policy, context_bounds=(2, 400)))


@pytest.mark.parametrize(
    ("shapes", "prefill_batch", "fits"),
    [
        (ShapeConfig(kind="buckets"), 1, False),
        (ShapeConfig(kind="buckets", batch_ladder=(2, 8)), 1, True),
        (ShapeConfig(kind="buckets", batch_ladder=(2, 8)), 2, False),
        (ShapeConfig(kind="pad"), 1, True),
        (ShapeConfig(kind="pad"), 2, True),
    ],
)
def test_a_bucket_of_one_row_is_no_hidden_size(shapes: ShapeConfig, prefill_batch: int, fits: bool) -> None:
    policy, engine = replace(MARKED, unbacked=("batch",)), EngineConfig(prefill_batch=prefill_batch)
    if fits:
        ArmConfig(name="a", engine=engine, shapes=shapes, compile=policy)
    else:
        with pytest.raises(ConfigError, match="steps of 1 are served, and a hidden size may not be 1: begin batch_"):
            ArmConfig(name="a", engine=engine, shapes=shapes, compile=policy)


def test_options_of_a_preset_stay_unless_they_are_named() -> None:
    preset = ArmConfig.from_preset("compiled-bucketed").compile
    changed = override(preset, {"options": {"combo_kernels": False, "epilogue_fusion": True}}, where="compile")
    assert changed.options == {**preset.options, "combo_kernels": False, "epilogue_fusion": True}


def test_a_chunk_is_never_longer_than_the_longest_prompt() -> None:
    assert EngineConfig(max_prompt_tokens=100).prefill_tokens == 100
    assert EngineConfig(max_prompt_tokens=100, prefill_chunk=64).prefill_tokens == 64
    assert EngineConfig(max_prompt_tokens=100, prefill_chunk=640).prefill_tokens == 100


def shapes_of_prompt(arm: ArmConfig, length: int) -> set[StepShape]:
    """The shapes of the steps that take a prompt, in chunks where it is longer than one."""
    policy, chunk = shape_policy(arm.shapes, arm.engine), arm.engine.prefill_tokens
    ends = [*range(chunk, length, chunk), length]
    later = {policy.extend(1, end - start, end) for start, end in pairwise(ends)}
    return {policy.prefill(1, ends[0]), *later}


@settings(max_examples=60)
@given(
    preset=st.sampled_from(["compiled-padded", "compiled-bucketed"]),
    longest=st.integers(1, 300),
    chunk=st.just(0) | st.integers(20, 300),
    ladder=st.booleans(),
)
def test_the_ladder_says_which_prompts_have_the_same_shapes(
    preset: str, longest: int, chunk: int, ladder: bool
) -> None:
    engine = EngineConfig(max_prompt_tokens=longest, prefill_chunk=chunk)
    arm = ArmConfig.from_preset(preset, engine=engine)
    if ladder and preset == "compiled-bucketed":
        arm = replace(arm, shapes=ShapeConfig(kind="buckets", length_ladder=(5, 50, 350)))
    assert arm.length_ladder[-1] == longest
    by_step: dict[int, set[StepShape]] = {}
    for length in range(1, longest + 1):
        step = next(step for step in arm.length_ladder if step >= length)
        assert by_step.setdefault(step, shapes_of_prompt(arm, length)) == shapes_of_prompt(arm, length)
    shapes = list(by_step.values())
    assert all(one != other for index, one in enumerate(shapes) for other in shapes[:index])


def test_exact_shapes_have_no_ladder() -> None:
    assert ArmConfig.from_preset("eager").length_ladder == ()


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"])
def test_a_mode_that_the_backend_would_not_read_is_refused(mode: str) -> None:
    with pytest.raises(ConfigError, match=f'compile.mode is "{mode}" but compile.backend is "late"'):
        CompileConfig(enabled=True, mode=mode, backend="late", backend_module="late.torch")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f'compile.mode is "{mode}" but compile.backend is "aot_eager"'):
        CompileConfig(enabled=True, mode=mode, backend="aot_eager")  # type: ignore[arg-type]
