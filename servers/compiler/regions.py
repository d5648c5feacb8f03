"""Regional compilation: the repeated block of a model is compiled instead of the whole, and what its calls ran."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import nn

from tailgate.servers.compiler.policy import compile_step
from tailgate.servers.compiler.recorder import EagerCanary
from tailgate.servers.complaint import ConfigError
from tailgate.servers.config import CompileConfig


def repeated_blocks(model: nn.Module) -> Sequence[nn.Module]:
    """Return the model's layers: its longest list of modules. Raises ConfigError where it has none."""
    blocks = max(([*module] for module in model.modules() if isinstance(module, nn.ModuleList)), key=len, default=[])
    if not blocks:
        raise ConfigError("compile.regional is true but the model repeats no block: set it to false")
    return blocks


class CompiledBlocks:
    """Runs every block compiled when a step calls it, over its own layer of `cache` where there is one, which ignores
    its number: a shape costs one compile for all blocks of a class."""

    def __init__(self, blocks: Sequence[nn.Module], policy: CompileConfig, *, cache: Any = None) -> None:
        self._canary = EagerCanary()
        self._calls = self._eager_writes = 0
        layers = cache.layers if cache is not None else []
        if len(layers) != len(blocks):  # not the layers that the cache belongs to
            layers = [None] * len(blocks)
        functions: dict[type, Callable[..., Any]] = {}
        for block, layer in zip(blocks, layers, strict=True):
            kind = type(block)
            if kind not in functions:
                functions[kind] = compile_step(_function_of(kind, self._canary), policy)
            compiled: Any = block
            compiled._compiled_call_impl = self._call(block, functions[kind], cache, layer)

    def ran_compiled(self) -> bool:
        """Return whether blocks were called since the last time and every call ran compiled code."""
        called, self._calls = self._calls, 0
        wrote_eagerly, self._eager_writes = self._eager_writes, 0
        began_eagerly = self._canary.ran_eagerly()
        return called > 0 and not began_eagerly and not wrote_eagerly

    def _call(self, block: Any, compiled: Callable[..., Any], cache: Any, layer: Any) -> Callable[..., Any]:
        # Layers that are not compiled write their tokens as plain Python too, so only what a block writes counts.
        writes = cache.window.canary if cache is not None else EagerCanary()

        def call(*args: Any, **kwargs: Any) -> Any:
            self._calls += 1
            if layer is not None and kwargs.get("past_key_values") is cache:
                kwargs["past_key_values"] = layer
            before = writes.steps
            answer = compiled(block, *args, **kwargs)
            self._eager_writes += writes.steps - before
            return answer

        return call


def _function_of(kind: type, canary: EagerCanary) -> Callable[..., Any]:
    """Return the function to compile for the blocks of one class. It has its own code object, since the compiler keeps
    graphs by code, and the name of the class."""

    def block(module: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            canary.steps += 1
        return module.forward(*args, **kwargs)

    code = block.__code__.replace(co_name=kind.__name__)
    return FunctionType(code, block.__globals__, kind.__name__, None, block.__closure__)
