from __future__ import annotations

import pytest

from loadtests.trials.preflight import check_arm
from servers.config import ArmConfig, CompileConfig, ModelConfig
from servers.fields import ConfigError
from tests.loadtests.trials.test_preflight import arm


def test_what_torch_lists_and_cannot_use_is_refused() -> None:
    """torch lists backends whose packages nobody installed."""
    with pytest.raises(ConfigError, match=r'compile\.backend is "tvm" and cannot compile \(ImportError: .*tvm'):
        check_arm(arm(backend="tvm"))
    for options, words in (
        ({"cpp.threads": "abc"}, "compile.options.cpp.threads is 'abc' and this torch has a number there"),
        ({"max_autotune": "x"}, "compile.options.max_autotune is 'x' and this torch has true or false there"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_arm(arm(backend="inductor", options=options))
    check_arm(arm(backend="inductor", options={"cpp.threads": 2, "max_autotune": True}))


def test_regions_that_the_model_does_not_have_are_refused_before_anything_starts() -> None:
    named = ArmConfig(
        model=ModelConfig(device="cpu"),
        compile=CompileConfig(enabled=True, backend="eager", regions=("model.layers.*.ffn",)),
    )
    with pytest.raises(
        ConfigError, match=r'regions holds "model\.layers\.\*\.ffn", which matches no module of the model'
    ):
        check_arm(named)
