"""The compile policy: what torch.compile is asked for."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch._inductor.config as inductor
import torch.fx.experimental._config as symbolic_shapes
from torch._dynamo.exc import BackendCompilerFailed as BackendError
from torch._dynamo.repro.after_dynamo import WrapBackendDebug, generate_dynamo_fx_repro_string
from torch._inductor.custom_graph_pass import CustomGraphPass

# A graph has a condition that the compiler cannot show to hold within the promised bounds, whether it does or not.
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError as UnprovenBounds

from tailgate.servers.compiler import products
from tailgate.servers.compiler.products import join_linears, multiply_rows, scale_products
from tailgate.servers.complaint import LOGS, ConfigError, named
from tailgate.servers.config import CompileConfig

__all__ = ["BackendError", "UnprovenBounds"]

_OPERATORS = "\nimport torch\nimport tailgate.servers.engine.runner  # its operators\n"
# Torch writes all variables with TORCH, DYNAMO, INDUCTOR or TRITON in their name, and secrets may be among them.
_OTHERS = re.compile(r"(?ms)^os\.environ\['(?!TORCH).*?'\n")


class UnforeseenShapeError(RuntimeError):
    """A strict policy refuses a step: no graph fits its shape, and none is compiled while serving."""


def configure_compiler(policy: CompileConfig, *, planned_shapes: int, closed: bool, regions: int) -> None:
    """Set the process-wide compiler options that the policy needs. Raises ConfigError for what torch does not know.

    A warm-up visits `planned_shapes`; where they are `closed`, no other one can come. As many `regions` are compiled
    separately, 1 where it is the whole model.
    """
    if not policy.enabled:
        return
    load_backend(policy)
    for name, value in policy.options.items() if policy.backend == "inductor" else ():
        setattr(inductor, name, value)
    # regions of one kind share their graphs, and the kinds (windowed or not) are few; a model that shares none has
    # one for each region
    known = 2 * planned_shapes * regions
    # a bucket is a graph; the limit guards against unplanned shapes, not against the ladder
    if limit := policy.recompile_limit or (max(8, known) if closed else None):
        torch._dynamo.config.recompile_limit = limit
    torch._dynamo.config.accumulated_recompile_limit = max(256, known, policy.recompile_limit)
    if policy.backend == "inductor":
        inductor.pre_grad_custom_pass = _GraphPass(graph_changes(policy))
    if policy.mark_dynamic:
        # two dimensions that happen to be equal in the first batch are not one dimension
        symbolic_shapes.use_duck_shape = False


def load_backend(policy: CompileConfig) -> None:
    """Load the policy's backend, and check inductor's options. Raises ConfigError, one line that says what is wrong."""
    try:
        torch._dynamo.lookup_backend(policy.backend)  # a package's entry point is only loaded here
    except (Exception, SystemExit) as error:
        known = ", ".join(sorted(torch._dynamo.list_backends(exclude_tags=())))
        raise ConfigError(
            f'compile.backend is "{policy.backend}", which cannot be used ({named(error)}): install or repair the '
            f"package that announces it, or use one of {known}"
        ) from None
    for name, value in policy.options.items() if policy.backend == "inductor" else ():
        try:
            torch.compile(lambda: None, options={name: value})  # type: ignore[dict-item]  # compiles nothing yet
        except RuntimeError as error:
            problem = str(error).partition(", known options")[0]
            raise ConfigError(f"compile.options.{name} is {value!r} ({problem}): see torch._inductor.config") from None


GraphChange = Callable[[torch.fx.Graph], None]


def graph_changes(policy: CompileConfig) -> tuple[GraphChange, ...]:
    """Return the changes to make to a graph before the compiler reads it, in order."""
    changes = {multiply_rows: policy.row_kernels, scale_products: True, join_linears: policy.join_projections}
    return tuple(change for change, wanted in changes.items() if wanted)


class _GraphPass(CustomGraphPass):
    """Changes as inductor takes them: with a name under which compiled code is kept, another one for other changes."""

    def __init__(self, changes: Sequence[GraphChange]) -> None:
        self._changes = changes

    def __call__(self, graph: torch.fx.Graph) -> None:
        for change in self._changes:
            change(graph)

    def uuid(self) -> str:
        return " ".join((*(change.__name__ for change in self._changes), _source_digest()))


@functools.cache
def _source_digest() -> str:
    """Digest the source of the changes: torch may look up compiled code by the graph as it was before them."""
    return hashlib.sha256(Path(str(products.__file__)).read_bytes()).hexdigest()


def compile_step(step: Callable[..., Any], policy: CompileConfig) -> Callable[..., Any]:
    """Return `step` under torch.compile as the policy sets it, or `step` itself if compiling is off."""
    if not policy.enabled:
        return step
    # other backends are given a mode and read none, so the configuration allows them the default alone
    mode = policy.mode if policy.mode != "default" else None
    compiled: Callable[..., Any] = torch.compile(
        step, mode=mode, dynamic=policy.dynamic, fullgraph=policy.fullgraph, backend=policy.backend
    )
    return compiled


def mark_dimension(tensor: torch.Tensor, dimension: int, bounds: Sequence[int], *, promised: bool = True) -> None:
    """Tell the compiler that this dimension varies within `bounds` (low, high). One possible size stays static.

    A promised graph fits all of the bounds or the compiler raises UnprovenBounds; otherwise it may fit a part of them.
    """
    low, high = bounds
    if low >= high or tensor.shape[dimension] < low:
        return
    if promised:
        torch._dynamo.mark_dynamic(tensor, dimension, min=low, max=high)
    else:
        torch._dynamo.maybe_mark_dynamic(tensor, dimension)


def fix_address(tensor: torch.Tensor) -> None:
    """Tell the compiler that this memory stays where it is, so that graphs may change it in place."""
    torch._dynamo.mark_static_address(tensor)


def refusal(error: RuntimeError) -> str | None:
    """Return why a strict policy refused the call: the first guard that failed. None for other errors."""
    text = str(error)
    if "stance is 'fail_on_recompile'" not in text:
        return None
    failures = [line.strip().removeprefix("- ") for line in text.splitlines() if line.strip().startswith("- ")]
    return failures[0] if failures else "nothing was compiled for it"


def failure(error: BackendError, arm: str) -> ConfigError:
    """Return an error that names why the backend failed, and the script that reproduces it, which is written now: torch
    writes it for its minifier, of a graph that the failed compile holds, with random numbers for weights."""
    what = f'compile.backend is "{error.backend_name}", which failed ({named(error.inner_exception)})'
    try:
        script = _OTHERS.sub("", _reproducer(error)).replace("\nimport torch\n", _OPERATORS, 1)
        name = f"repro-{arm}-{hashlib.sha256(script.encode()).hexdigest()[:8]}.py"
        path = Path(os.environ.get(LOGS) or tempfile.gettempdir(), name)
        path.write_text(script, encoding="utf-8")
    except Exception as problem:  # the graph cannot be written as text, or the disk is full
        return ConfigError(f"{what}, and no reproducer is written ({named(problem)}): use another one")
    return ConfigError(f"{what}: report it with the reproducer {path}, or use another one")


def _reproducer(error: BackendError) -> str:
    """Return inductor's own script, of the graph that it lowers, or that of the graph which the backend is given."""
    for frame, _ in reversed([*traceback.walk_tb(error.inner_exception.__traceback__)]):
        held = frame.f_locals
        if "runnable_graph_str" in held:
            return str(held["runnable_graph_str"])
        if frame.f_code is WrapBackendDebug.__call__.__code__:
            return generate_dynamo_fx_repro_string(held["gm"], held["example_inputs"], held["self"]._compiler_name)
    raise LookupError("no graph is held")
