from __future__ import annotations

import pytest

from servers.config import PRESETS, ArmConfig, CompileConfig, ConfigError, EngineConfig, ShapeConfig, override


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
        ({"engine": 5}, ("arm.engine", "table")),
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
