"""A JIT compiler and its kernels, as Triton has them."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import SimpleNamespace
from typing import Any

import pytest


class Kernel:
    """A compiled function. `times` is called in each compile, as Triton's compiler would take its time."""

    def __init__(self, function: Callable[..., Any], knobs: Any) -> None:
        self.fn = function
        self.arg_names = list(function.__code__.co_varnames)
        self.made: set[tuple[tuple[str, Any], ...]] = set()
        self._knobs = knobs

    def run(self, **constants: Any) -> None:
        key = tuple(constants.items())
        if key in self.made:
            return
        self.fn()
        self.made.add(key)
        if self._knobs.compilation.listener is not None:
            by_position = {(self.arg_names.index(name),): value for name, value in constants.items()}
            self._knobs.compilation.listener(
                src=SimpleNamespace(fn=self, name=self.fn.__name__, constants=by_position),
                metadata={"num_warps": 4, "num_stages": 3},
                metadata_group={},
                times=SimpleNamespace(total=1000),  # µs
                cache_hit=False,
            )


class Autotuner:
    """Runs each of `configs` when it meets a new key, then the best one."""

    def __init__(self, kernel: Kernel, configs: list[dict[str, Any]]) -> None:
        self.fn = kernel
        self.base_fn = kernel.fn
        self.configs = configs
        self.cache: dict[tuple[Any, ...], dict[str, Any]] = {}

    def run(self, *key: Any) -> None:
        if key not in self.cache:
            for config in self.configs:
                self.fn.run(**config)
            self.cache[key] = self.configs[0]
        self.fn.run(**self.cache[key])


def install(patch: pytest.MonkeyPatch, *, reports: bool = True) -> Any:
    """Make `triton` importable until `patch` ends. Return its knobs. What `triton.compile` makes is heard of if it
    `reports`."""
    names = ("triton", "triton.compiler", "triton.knobs", "triton.runtime", "triton.runtime.autotuner")
    modules: dict[str, Any] = {name: types.ModuleType(name) for name in names}
    for name, module in modules.items():
        module.__spec__ = ModuleSpec(name, None)
        patch.setitem(sys.modules, name, module)
    knobs = modules["triton.knobs"]
    knobs.compilation = SimpleNamespace(listener=None)
    modules["triton"].__version__ = "3.6.0"
    modules["triton"].jit = lambda function: Kernel(function, knobs)
    modules["triton"].compile = lambda source: source.fn.run() if reports else None
    modules["triton.compiler"].ASTSource = SimpleNamespace
    modules["triton.runtime.autotuner"].Autotuner = type("Autotuner", (Autotuner,), {})
    return knobs
