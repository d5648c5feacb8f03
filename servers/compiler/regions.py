"""Regions of a model: which of its modules are compiled separately, and what their calls ran."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import nn

from tailgate.servers.compiler.policy import compile_step
from tailgate.servers.compiler.recorder import EagerCanary
from tailgate.servers.complaint import ConfigError
from tailgate.servers.config import CompileConfig

_MOST_SHOWN = 8


def select_regions(model: nn.Module, policy: CompileConfig) -> dict[str, nn.Module]:
    """Return the modules to compile separately, by name: those of compile.regions, or every repeated block.

    Of modules inside each other the outermost is compiled. Raises ConfigError for a name that no module has, and where
    the model repeats no block.
    """
    modules = {name: module for name, module in model.named_modules() if name}
    names: Sequence[str] = policy.regions
    if policy.regional:
        blocks = _layers(model)
        names = [name for name, module in modules.items() if module in blocks]
        if not names:
            raise ConfigError("compile.regional is true but the model repeats no block: set it to false")
    for name in names:
        if name not in modules:
            shown = ", ".join(sorted(modules, key=lambda known: known.count("."))[:_MOST_SHOWN])
            raise ConfigError(f'compile.regions holds "{name}", which is no module of the model: it has {shown}, …')
    return {name: modules[name] for name in names if not any(name.startswith(f"{other}.") for other in names)}


def _layers(model: nn.Module) -> Sequence[nn.Module]:
    """Return the longest list of modules: the model's layers."""
    lists = [[*module] for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=[])


class CompiledRegions:
    """Runs every region compiled when a step calls it, over `cache` where there is one; the rest of the model stays as
    it is.

    Modules of one class have one code, so that a shape costs one compile and not one for each layer: each layer's
    modules are given the layer's own view of the cache, which ignores the layer's number.
    """

    def __init__(
        self, model: nn.Module, regions: Mapping[str, nn.Module], policy: CompileConfig, *, cache: Any = None
    ) -> None:
        self._window = cache.window if cache is not None else None
        self._canary = EagerCanary()
        self._calls = self._eager_writes = 0
        self._uncalled = dict.fromkeys(regions)
        views = _views(model, cache) if cache is not None else {}
        functions: dict[type, Callable[..., Any]] = {}
        for name, module in regions.items():
            kind = type(module)
            if kind not in functions:
                functions[kind] = compile_step(_function_of(kind, self._canary), policy)
            region: Any = module
            region._compiled_call_impl = self._call(name, region, functions[kind], cache, views.get(id(module)))

    def check_called(self) -> None:
        """Raise ConfigError if no step has called one of the regions."""
        for name in self._uncalled:
            raise ConfigError(
                f'"{name}" of compile.regions was called by no step of the warm-up: name modules that the model calls'
            )

    def ran_compiled(self) -> bool:
        """Return whether regions were called since the last time and every call ran compiled code."""
        called, self._calls = self._calls, 0
        wrote_eagerly, self._eager_writes = self._eager_writes, 0
        began_eagerly = self._canary.ran_eagerly()
        return called > 0 and not began_eagerly and not wrote_eagerly

    def _call(self, name: str, module: Any, compiled: Callable[..., Any], cache: Any, view: Any) -> Callable[..., Any]:
        # Layers that are not compiled write their tokens as plain Python too, so only what a region writes counts.
        writes = self._window.canary if self._window is not None else EagerCanary()

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._window is not None and self._window.positions is None:  # a call of the model that is no step
                return module._call_impl(*args, **kwargs)
            self._calls += 1
            self._uncalled.pop(name, None)
            if view is not None and kwargs.get("past_key_values") is cache:
                kwargs["past_key_values"] = view
            before = writes.steps
            answer = compiled(module, *args, **kwargs)
            self._eager_writes += writes.steps - before
            return answer

        return call


def _function_of(kind: type, canary: EagerCanary) -> Callable[..., Any]:
    """Return the function to compile for the modules of one class. It has its own code object, since the compiler keeps
    graphs by code, and the name of the class."""

    def region(module: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            canary.steps += 1
        return module.forward(*args, **kwargs)

    code = region.__code__.replace(co_name=kind.__name__)
    return FunctionType(code, region.__globals__, kind.__name__, None, region.__closure__)


def _views(model: nn.Module, cache: Any) -> dict[int, Any]:
    """Return the cache's view for each module of a layer, by id of the module; {} if the layers are not found."""
    blocks, views = _layers(model), cache.views()
    if len(blocks) != len(views):
        return {}
    return {id(module): view for block, view in zip(blocks, views, strict=True) for module in block.modules()}
