"""Regions of a model: which of its modules are compiled each by itself, which stay eager, and what their calls ran."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import FunctionType
from typing import Any

import torch
from torch import nn

from servers.compiler.policy import compile_step
from servers.compiler.recorder import EagerCanary
from servers.config import CompileConfig
from servers.fields import ConfigError

_MOST_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Modules by qualified name: those that are compiled each by itself, and those inside compiled code that stay
    eager."""

    compiled: Mapping[str, nn.Module]
    eager: Mapping[str, nn.Module]


def select_regions(model: nn.Module, policy: CompileConfig) -> Selection:
    """The modules that the policy's patterns name. Raises ConfigError where a pattern matches nothing.

    A pattern is matched part by part: `*` stands for one part or a piece of it, so model.layers.*.mlp is the mlp of
    every layer. Of regions inside each other the outermost is compiled, and what is inside an eager one stays eager.
    """
    modules = {name: module for name, module in model.named_modules() if name}
    patterns = (f"{_repeated(modules)}.*",) if policy.regional else policy.regions
    eager = _matched("eager_regions", policy.eager_regions, modules)
    chosen = _matched("regions", patterns, modules)
    compiled = [name for name in chosen if name not in eager and not _inside(name, (*chosen, *eager))]
    if patterns and not compiled:
        raise ConfigError(
            f"compile.eager_regions is {list(policy.eager_regions)}, which leaves nothing of compile.regions "
            f"{list(patterns)} to compile: drop one of them"
        )
    within = [name for name in eager if not patterns or _inside(name, compiled)]
    if within and policy.fullgraph:
        raise ConfigError(
            f"compile.eager_regions holds {within[0]}, which is inside a compiled module, but compile.fullgraph is "
            "true: a graph ends where an eager module begins, so set fullgraph = false or name regions around it"
        )
    return Selection(
        compiled={name: modules[name] for name in compiled}, eager={name: modules[name] for name in within}
    )


def _matched(key: str, patterns: Sequence[str], modules: Mapping[str, nn.Module]) -> list[str]:
    """The names that a pattern matches, in the model's order."""
    matched = set()
    for pattern in patterns:
        names = [name for name in modules if _matches(name, pattern)]
        if not names:
            raise ConfigError(
                f'compile.{key} holds "{pattern}", which matches no module of the model: it has {_shown(modules)}'
            )
        for name in names:
            if type(modules[name]).forward is nn.Module.forward:
                raise ConfigError(
                    f'compile.{key} holds "{pattern}", but {name} only lists modules and is never called: '
                    f"write {name}.*"
                )
        matched.update(names)
    return [name for name in modules if name in matched]


def _matches(name: str, pattern: str) -> bool:
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def _inside(name: str, others: Iterable[str]) -> bool:
    return any(name.startswith(f"{other}.") for other in others)


def _shown(modules: Mapping[str, nn.Module]) -> str:
    """Some of the names, with * for the numbers of layers, the shortest first."""
    kinds = dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) for name in modules)
    names = sorted(kinds, key=lambda name: name.count("."))
    return ", ".join(names[:_MOST_SHOWN]) + (", …" if len(names) > _MOST_SHOWN else "")


def _repeated(modules: Mapping[str, nn.Module]) -> str:
    """The name of the longest list of modules, the model's layers."""
    lists = {name: len(module) for name, module in modules.items() if isinstance(module, nn.ModuleList)}
    if not lists:
        raise ConfigError("compile.regional is true but the model repeats no block: name compile.regions")
    return max(lists, key=lambda name: lists[name])


def leave_eager(selection: Selection) -> None:
    """The selection's eager modules run as plain Python wherever compiled code calls them: a graph ends there."""
    for module in selection.eager.values():
        region: Any = module
        region.forward = torch.compiler.disable(region.forward)  # type: ignore[no-untyped-call]


class CompiledRegions:
    """Every selected module runs compiled when a step calls it, over `cache` where there is one; the rest of `model`
    stays as it is.

    Modules of one class have one code, so that a shape costs one compile and not one for each layer: each layer's
    module is given its own view of the cache, which ignores the layer's number.
    """

    def __init__(self, model: nn.Module, selection: Selection, policy: CompileConfig, *, cache: Any = None) -> None:
        self._window = cache.window if cache is not None else None
        self._canary = EagerCanary()
        self._calls = 0
        self._uncalled = dict.fromkeys(selection.compiled)
        views = _views(model, cache) if cache is not None else _Views({}, frozenset())
        # Where each layer's cache is written by compiled code, the cache sees what runs eagerly inside of a region.
        layers = [name for name, module in model.named_modules() if id(module) in views.blocks]
        compiled = (*selection.compiled,)
        self._sees_inside = not selection.eager and all(name in compiled or _inside(name, compiled) for name in layers)
        functions: dict[type, Callable[..., Any]] = {}
        for name, module in selection.compiled.items():
            kind = type(module)
            if kind not in functions:
                functions[kind] = compile_step(_function_of(kind, self._canary), policy)
            region: Any = module
            region._compiled_call_impl = self._call(name, region, functions[kind], cache, views.of.get(id(module)))

    @property
    def uncalled(self) -> tuple[str, ...]:
        """The regions that no step has called yet."""
        return tuple(self._uncalled)

    def ran_compiled(self) -> bool:
        """Whether regions were called since the last time, and every call ran compiled code."""
        called, self._calls = self._calls, 0
        began_eagerly = self._canary.ran_eagerly()
        wrote_eagerly = self._window is not None and self._window.canary.ran_eagerly()
        return called > 0 and not began_eagerly and not (wrote_eagerly and self._sees_inside)

    def _call(self, name: str, module: Any, compiled: Callable[..., Any], cache: Any, view: Any) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._window is not None and self._window.positions is None:  # somebody else's call of the model
                return module._call_impl(*args, **kwargs)
            self._calls += 1
            self._uncalled.pop(name, None)
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


@dataclass(frozen=True, slots=True)
class _Views:
    """The cache's view for each module of a layer, and the layers, by id of the module."""

    of: Mapping[int, Any]
    blocks: frozenset[int]


def _views(model: nn.Module, cache: Any) -> _Views:
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    blocks, views = max(lists, key=len, default=nn.ModuleList()), cache.views()
    if len(blocks) != len(views):
        return _Views({}, frozenset())
    of = {id(module): view for block, view in zip(blocks, views, strict=True) for module in block.modules()}
    return _Views(of, frozenset(map(id, blocks)))
