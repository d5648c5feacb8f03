from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from servers import parity
from servers.config import ArmConfig, CompileConfig
from servers.fields import ConfigError
from tests.servers.compiler.test_recorder import reset_compiler
from tests.servers.test_parity import (
    ENGINE,
    accuracy_of,
    arm_for,
    parity_of,
    quantised,
)


@pytest.mark.parametrize(("preset", "dtype"), [("eager-padded", "bfloat16"), ("compiled-bucketed", "float32")])
def test_a_padded_or_bucketed_arm_has_parity(preset: str, dtype: str) -> None:
    outcome = parity_of(arm_for(preset, dtype))
    assert outcome.control.verdict == "PASS", outcome.control
    assert outcome.verdict == "PASS", outcome.arms[0].reasons
    findings = {finding.name: finding for finding in outcome.arms[0].findings}
    assert findings["error"].value == pytest.approx(1.0, abs=0.2)
    assert ("tokens" in findings) == (dtype == "float32")


@pytest.mark.parametrize("preset", ["eager", "compiled-bucketed"])
def test_an_arm_with_eight_bits_a_weight_is_accurate_though_its_tokens_are_others(preset: str) -> None:
    outcome = accuracy_of(quantised(preset))
    assert outcome.verdict == "PASS", outcome.arms[0].reasons
    figures = outcome.arms[0].figures
    assert figures["answers_same"] < figures["answers"] == figures["texts"] == 41


@pytest.mark.parametrize("is_control", [False, True])
def test_a_refusal_is_an_answer_of_an_arm_and_no_control(is_control: bool, tmp_path: Path) -> None:
    policy = CompileConfig(enabled=True, dynamic=False, backend="eager", strict=True, warmup="minimal")
    arm = ArmConfig(name="strict", compile=policy, engine=ENGINE)
    plan = replace(
        parity.make_plan([arm], vocab_size=259, prompts=2, tokens=2, seed=1),
        continuations=((1, 2), (1, 2)),
        counts=(2, 2),
    )
    task = {"plan": str(tmp_path / "plan.json"), "texts": "", "on_texts": [], "arms": [arm.to_dict()]}
    task |= {"prompts": 2, "tokens": 2, "seed": 1, "least": 0}
    reset_compiler()
    try:
        if is_control:
            with pytest.raises(ConfigError, match=r"the control refuses what it is asked: .* that is not strict"):
                parity.run_arm(arm, task, tmp_path)
        else:
            plan.write(tmp_path / "plan.json")
            parity.run_arm(arm, task, tmp_path)
            assert "no graph fits" in json.loads((tmp_path / "refused.json").read_text())["reason"]
    finally:
        reset_compiler()
