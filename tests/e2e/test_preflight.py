"""What the real torch knows is asked before anything starts."""

from __future__ import annotations

import pytest

from loadtests.trials.preflight import check_arm
from servers.config import ArmConfig, CompileConfig, ModelConfig
from servers.fields import ConfigError


def arm(**policy: object) -> ArmConfig:
    compiling = CompileConfig(enabled=True, **policy)  # type: ignore[arg-type]
    return ArmConfig(model=ModelConfig(id="random:tiny", device="cpu"), compile=compiling)


def test_what_torch_lists_and_cannot_use_is_refused() -> None:
    """torch lists backends whose packages nobody installed."""
    with pytest.raises(ConfigError, match=r"compile\.backend.*tvm.*ImportError"):
        check_arm(arm(backend="tvm"))
    for options, words in (
        ({"cpp.threads": "abc"}, "compile.options.cpp.threads.*abc"),
        ({"max_autotune": "x"}, "compile.options.max_autotune.*x"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_arm(arm(backend="inductor", options=options))
    check_arm(arm(backend="inductor", options={"cpp.threads": 2, "max_autotune": True}))


def test_regions_that_the_model_does_not_have_are_refused_before_anything_starts() -> None:
    named = ArmConfig(
        model=ModelConfig(device="cpu"),
        compile=CompileConfig(enabled=True, backend="eager", regions=("model.layers.*.ffn",)),
    )
    with pytest.raises(ConfigError, match=r"regions.*model\.layers\.\*\.ffn"):
        check_arm(named)


def test_regions_that_the_model_has_pass() -> None:
    policy = CompileConfig(enabled=True, backend="eager", regions=("model.layers.*.mlp",), eager_regions=("lm_head",))
    check_arm(ArmConfig(model=ModelConfig(device="cpu"), compile=policy))
