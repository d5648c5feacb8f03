"""The repeated block of a model, compiled by itself, and what its calls ran."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import nn

from servers.compiler.policy import compile_step
from servers.compiler.recorder import EagerCanary
from servers.complaint import ConfigError
from servers.config import CompileConfig


def repeated_blocks(model: nn.Module) -> Sequence[nn.Module]:
    """Return the longest list of modules, the model's layers. Raises ConfigError where there is none."""
    lists = [[*module] for module in model.modules() if isinstance(module, nn.ModuleList)]
    blocks: Sequence[nn.Module] = max(lists, key=len, default=[])
    if not blocks:
        raise ConfigError("compile.regional is true but the model repeats no block: set it to false")
    return blocks


class CompiledRegions:
    """Runs every block compiled when a step calls it, over `cache` where there is one; the rest of the model stays as
    it is.

    Modules of one class have one code, so that a shape costs one compile and not one for each layer: each layer's
    module is given its own view of the cache, which ignores the layer's number.
    """

    def __init__(self, blocks: Sequence[nn.Module], policy: CompileConfig, *, cache: Any = None) -> None:
        self._window = cache.window if cache is not None else None
        self._canary = EagerCanary()
        self._calls = 0
        views = cache.views() if cache is not None else []
        if len(views) != len(blocks):  # the blocks are not the layers of the cache
            views = [None] * len(blocks)
        functions: dict[type, Callable[..., Any]] = {}
        for block, view in zip(blocks, views, strict=True):
            kind = type(block)
            if kind not in functions:
                functions[kind] = compile_step(_function_of(kind, self._canary), policy)
            region: Any = block
            region._compiled_call_impl = self._call(region, functions[kind], cache, view)

    def ran_compiled(self) -> bool:
        """Whether blocks were called since the last time, and every call ran compiled code."""
        called, self._calls = self._calls, 0
        began_eagerly = self._canary.ran_eagerly()
        wrote_eagerly = self._window is not None and self._window.canary.ran_eagerly()
        return called > 0 and not began_eagerly and not wrote_eagerly

    def _call(self, module: Any, compiled: Callable[..., Any], cache: Any, view: Any) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._window is not None and self._window.positions is None:  # somebody else's call of the model
                return module._call_impl(*args, **kwargs)
            self._calls += 1
            if view is not None and kwargs.get("past_key_values") is cache:
                kwargs["past_key_values"] = view
            return compiled(module, *args, **kwargs)

        return call


def _function_of(kind: type, canary: EagerCanary) -> Callable[..., Any]:
    """What is compiled for the modules of one class. Its code is its own, since the compiler keeps graphs by code; it
    bears the name of the class."""

    def region(module: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            canary.steps += 1
        return module.forward(*args, **kwargs)

    code = region.__code__.replace(co_name=kind.__name__)
    return FunctionType(code, region.__globals__, kind.__name__, None, region.__closure__)
