"""Settings of an arm, their refusals, and how errors read."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailgate.servers.complaint import LOGS, LONGEST, ConfigError, fault, one_line, write_failure
from tailgate.servers.config import (
    ArmConfig,
    CompileConfig,
    ModelConfig,
    check_quantisation,
    with_preset,
)
from tailgate.servers.fields import Settings, read
from tailgate.servers.presets import PRESETS

BERT = {"id": "random:bert-tiny", "task": "embed"}
CAPTURE = {"enabled": True, "capture": True}


def refusal(make: Any, *arguments: Any, words: tuple[str, ...] = (), **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        make(*arguments, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert [word for word in words if word not in message] == [], message
    return message


def arm_from(preset: str, **parts: Settings) -> ArmConfig:
    """The arm of the preset, with these parts (model, engine)."""
    tables = {key: part.to_dict() for key, part in parts.items()}
    return read(ArmConfig, with_preset({"name": preset, "preset": preset, **tables}))


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_survives_the_way_through_plain_tables_and_serves_an_encoder(preset: str) -> None:
    arm = arm_from(preset)
    assert ArmConfig.from_dict(arm.to_dict()) == arm
    encoder = arm_from(preset, model=ModelConfig(id="random:bert-tiny", task="embed", pooling="cls"))
    assert ArmConfig.from_dict(encoder.to_dict()) == encoder
    assert encoder.compile == arm.compile.replace(join_projections=False, row_kernels=False)


def test_presets_differ_in_the_policy_alone() -> None:
    arms = [arm_from(preset) for preset in PRESETS]
    assert all((arm.model, arm.engine) == (arms[0].model, arms[0].engine) for arm in arms)
    assert len({str((arm.shapes, arm.compile)) for arm in arms}) == len(PRESETS)
    assert "compiled-naive" in refusal(arm_from, "fast")


def test_a_model_in_a_package_reads_as_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "some_weights" / "model"
    folder.mkdir(parents=True)
    (tmp_path / "some_weights" / "__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    model = ModelConfig(id="package:some_weights/model")
    assert model.id == str(folder)
    assert read(ModelConfig, model.to_dict()) == model
    for name, word in (("some_weights/other", "other"), ("absent/model", "not installed"), ("some_weights", "FOLDER")):
        assert word in refusal(read, ModelConfig, {"id": f"package:{name}"})


def test_an_arm_replaces_only_the_named_settings_of_its_preset() -> None:
    policy = {"options": {"combo_kernels": False, "epilogue_fusion": True}, "warmup": "minimal", "capture": False}
    preset = arm_from("compiled-bucketed").compile
    changed = read(ArmConfig, with_preset({"preset": "compiled-bucketed", "compile": policy})).compile
    assert changed == preset.replace(**{**policy, "options": {**preset.options, **policy["options"]}})  # type: ignore[dict-item]


def test_what_a_preset_says_goes_with_the_backend_and_with_compiling() -> None:
    def compiled(**own: Any) -> CompileConfig:
        return read(ArmConfig, with_preset({"preset": "compiled-bucketed", "compile": own})).compile

    assert compiled(enabled=False) == CompileConfig()
    eager = compiled(backend="eager")
    assert (eager.options, eager.join_projections, eager.capture) == ({}, False, True)


def test_a_name_with_dots_may_be_written_as_tables() -> None:
    """As TOML reads it without quotes."""
    options = {"combo_kernels": True, "triton": {"enable_pdl": True}, "triton.cudagraphs": False}
    found = read(CompileConfig, {"enabled": True, "options": options}).options
    assert found == {"combo_kernels": True, "triton.enable_pdl": True, "triton.cudagraphs": False}


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"colour": 1}, ("arm.colour is unknown", "preset")),
        ({"engine": {"slot": 1}}, ("arm.engine.slot is unknown: did you mean slots?",)),
        ({"engine": {"slots": 0}}, ("arm.engine.slots is 0: give 1 or more",)),
        ({"engine": {"slots": 5000}}, ("arm.engine.slots is 5000: give 4096 or less",)),
        ({"engine": {"max_wait_ms": "5"}}, ('arm.engine.max_wait_ms is "5": give a number',)),
        ({"engine": {"max_wait_ms": float("nan")}}, ("arm.engine.max_wait_ms is NaN: give a finite number",)),
        ({"preset": "fast"}, ('arm.preset is "fast"', "compiled-naive")),
        ({"engine": {"step_tokens": 8}}, ("engine.step_tokens", "8", "engine.slots")),
        ({"model": {"id": ""}}, ("model.id",)),
        ({"compile": CAPTURE}, ("arm.compile.capture is true", "shapes.kind", '"exact"')),
        ({"compile": {**CAPTURE, "warmup": "minimal"}, "shapes": {"kind": "pad"}}, ("compile.warmup", '"minimal"')),
        ({"model": {"id": "random:huge"}}, ("random:huge", "llama-3.2-1b")),
        ({"shapes": {"kind": "round"}}, ("shapes.kind", "round", "buckets")),
        ({"shapes": {"kind": "buckets", "batch_ladder": [4, 2]}}, ("batch_ladder", "[4, 2]")),
        ({"shapes": {"kind": "buckets", "batch_ladder": [1, 2]}}, ("2", "engine.slots", "8")),
        ({"shapes": {"batch_ladder": [8]}}, ("batch_ladder", 'kind = "buckets"')),
        ({"name": "größe"}, ('"größe"', "A to Z")),
        ({"name": "-v"}, ('"-v"', "begin with a letter")),
        ({"name": "x" * 300}, ("300 characters", "at most 64")),
        ({"model": {"device": "tpu"}}, ("model.device", '"tpu"', "cuda:N")),
        ({"engine": 5}, ("arm.engine", "table")),
        ({"model": {"task": "sing"}}, ("model.task", "sing", "embed")),
        ({"model": {"pooling": "cls"}}, ('model.pooling is "cls"', "only embeddings")),
        ({"model": {**BERT, "quantisation": "int8-weight-only"}}, ("model.quantisation",)),
        ({"engine": {"max_wait_ms": 5}}, ("engine.max_wait_ms is 5",)),
        ({"model": BERT, "engine": {"step_tokens": 64}}, ("engine.step_tokens is 64", "engine.slots")),
        ({"model": BERT, "compile": {"enabled": True, "join_projections": True}}, ("join_projections",)),
    ],
)
def test_a_bad_table_is_refused_with_key_value_and_remedy(table: dict[str, object], words: tuple[str, ...]) -> None:
    refusal(ArmConfig.from_dict, table, words=words)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"capture": True}, ("compile.capture", "compile.enabled")),
        ({"mode": "turbo"}, ("compile.mode", "turbo", "reduce-overhead")),
        ({"enabled": True, "mark_dynamic": True, "dynamic": False}, ("mark_dynamic",)),
        ({"enabled": True, "capture": True, "mode": "reduce-overhead"}, ("capture", "reduce-overhead")),
        ({"enabled": True, "row_kernels": True, "options": {"triton.enable_pdl": True}}, ("row_kernels", "enable_pdl")),
        ({"fullgraph": True}, ("compile.fullgraph is true", "compile.enabled is false", "enabled = true")),
        ({"enabled": True, "options": {"triton": {"x": [1]}}}, ("compile.options",)),
        ({"enabled": True, "options": {"x": 1}, "backend": "eager"}, ("compile.options", "inductor")),
        ({"enabled": True, "recompile_limit": -1}, ("compile.recompile_limit is -1: give 0 or more",)),
        ({"enabled": True, "options": 3}, ("options", "table")),
        ({"enabled": True, "artifact": "a", "backend": "aot_eager"}, ("compile.artifact", '"aot_eager"')),
        ({"enabled": True, "mode": "max-autotune", "backend": "aot_eager"}, ('"max-autotune"', '"aot_eager"')),
    ],
)
def test_contradicting_compile_settings_are_refused(table: dict[str, object], words: tuple[str, ...]) -> None:
    refusal(read, CompileConfig, table, where="compile", words=words)


def test_a_dtype_or_a_gpu_that_quantised_weights_cannot_use_is_refused() -> None:
    for model, words in (
        (ModelConfig(quantisation="int4-weight-only", dtype="float16"), ('"float16"', 'dtype = "bfloat16"')),
        (ModelConfig(quantisation="float8-weight-only"), ("capability 8.0", "8.9 on")),
    ):
        refusal(check_quantisation, model, on_gpu=True, capability=(8, 0), words=words)
        check_quantisation(model.replace(dtype="auto"), on_gpu=True, capability=(8, 9))


@given(st.text(max_size=50) | st.text(alphabet=st.characters(codec=None), max_size=50))
def test_every_message_becomes_one_printable_line(text: str) -> None:
    assert one_line(text).isprintable()
    assert str(ConfigError("traffic.a\nb\u2028c")) == "traffic.a b c"


def test_a_long_value_is_shortened_and_the_remedy_stays() -> None:
    message = refusal(read, ModelConfig, {"dtype": "x" * 20_000}, where="model")
    assert message.startswith('model.dtype is "xxx')
    assert message.endswith('use "auto", "float32", "float16" or "bfloat16"')
    assert len(message) < LONGEST + 100


def test_a_fault_names_the_file_of_its_traceback_or_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def raised() -> Exception:
        try:
            1 / 0  # noqa: B018
        except ZeroDivisionError as error:
            return error
        raise AssertionError

    message = fault(raised(), tmp_path)
    (path,) = tmp_path.iterdir()
    assert "ZeroDivisionError: division by zero" in message
    assert str(path) in message
    assert "in raised" in path.read_text()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    assert "raised at" in fault(raised(), tmp_path / "gone")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    library = ImportError("x.so: failed to map segment from shared object")
    for error in (MemoryError(), RuntimeError("can't start new thread"), library):
        message = fault(error, tmp_path / "gone")
        assert message.startswith("out of memory")
        assert str(os.getpid()) in message
    monkeypatch.setenv(LOGS, str(tmp_path))
    assert f"{tmp_path}/traceback-" in fault(raised(), tmp_path / "gone")


def test_a_failed_write_has_the_remedy_of_its_reason() -> None:
    for number, remedy in (
        (errno.ENOSPC, "free the disk"),
        (errno.EROFS, "written to"),
        (errno.ENOMEM, "free memory"),
        (errno.EIO, "disk"),
        (errno.ENOENT, "folder"),
    ):
        reason, _, shown = write_failure(OSError(number, os.strerror(number))).rpartition(": ")
        assert reason == f"[Errno {number}] {os.strerror(number)}"
        assert remedy in shown
