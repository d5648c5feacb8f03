"""Kernels that are compiled outside of torch.compile, when they are first called: by Triton, CuTe or any other JIT.

`watch_triton` reports Triton's. Any other compiler is reported by the code that calls it, in `with jit_compile(...)`.

No torch here, so that a plug-in may import it anywhere. Outside of a tailgate server it costs nothing and does nothing.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePath
from types import CodeType
from typing import Any

from tailgate.servers.clock import now_ns
from tailgate.servers.rpc.telemetry_pb2 import CompileEvent

_LONGEST_TEXT = 400

# Is given a kernel that was compiled, or tuned by running its variants against each other, and whether it was tuned.
Listener = Callable[[CompileEvent, bool], object]

# Compilers are called from code that knows no recorder, so the listeners of this process are kept here.
_listeners: list[Listener] = []


def listen(listener: Listener) -> Callable[[], None]:
    """Call `listener` with every compile that `jit_compile` encloses, on the thread that compiled. Returns what ends
    it."""
    _listeners.append(listener)
    return lambda: _listeners.remove(listener)


@contextlib.contextmanager
def jit_compile(kernel: str, *, variant: str = "", compiler: str = "jit") -> Iterator[None]:
    """Record the enclosed code as one JIT compile of `kernel`, whether it succeeds or raises. `variant` sets it apart
    from others: sizes, types, tiles."""
    start_ns = now_ns()
    try:
        yield
    finally:
        for listener in tuple(_listeners):
            listener(_event(compiler, str(kernel), variant, start_ns=start_ns, end_ns=now_ns()), False)


def _event(
    compiler: str,
    kernel: str,
    variant: str,
    *,
    start_ns: int,
    end_ns: int,
    where: str = "",
    cache: str = "",
    tuned: bool = False,
) -> CompileEvent:
    """Return the event of a kernel, whose source is at the place `where`. Its reason names the compiler, the kernel and
    what this variant is for: "triton compiled _decode for SPLITS=8, BLOCK_N=64"."""
    reason = f"{compiler} {'tuned' if tuned else 'compiled'} {kernel}{f' for {variant}' if variant else ''}"
    frame = where or kernel
    return CompileEvent(kind="jit", start_ns=start_ns, end_ns=end_ns, frame=frame, reason=cut(reason), cache=cache)


def cut(text: str) -> str:
    return text if len(text) <= _LONGEST_TEXT else text[: _LONGEST_TEXT - 1] + "…"


def place(filename: str | None, line: int | None, function: str | None) -> str:
    """Shorten a place in source to "models/llama/modeling_llama.py:300 in forward": the path below site-packages, or
    its last two parts."""
    if not filename:
        return f"an unknown place in {function}" if function else ""
    _, packages, inside = filename.rpartition("site-packages/")
    shown = inside if packages else "/".join(PurePath(filename).parts[-2:])
    return f"{shown}:{line} in {function}"


def watch_triton(listener: Listener) -> Callable[[], None]:
    """Call `listener` with each kernel that Triton compiles or fetches from its disk cache, and each tuning. Returns
    what ends it. The autotuner reports nothing, so its `run` is wrapped. Raises where this Triton lacks either."""
    knobs = importlib.import_module("triton.knobs").compilation
    autotuner = importlib.import_module("triton.runtime.autotuner").Autotuner
    earlier, run = knobs.listener, autotuner.run

    def on_compile(**compiled: Any) -> None:
        if earlier is not None:
            earlier(**compiled)
        listener(_compiled(now_ns(), **compiled), False)

    def tuned(tuner: Any, *args: Any, **options: Any) -> Any:
        known, start_ns = len(tuner.cache), now_ns()
        try:
            return run(tuner, *args, **options)
        finally:
            if len(tuner.cache) > known:
                listener(_tuned(tuner, start_ns, now_ns()), True)

    def stop() -> None:
        knobs.listener, autotuner.run = earlier, run

    knobs.listener, autotuner.run = on_compile, tuned
    return stop


def compile_empty_kernel() -> None:
    """Have Triton compile an empty kernel, or fetch it from its disk cache."""
    triton, compiler = importlib.import_module("triton"), importlib.import_module("triton.compiler")
    triton.compile(compiler.ASTSource(fn=triton.jit(_empty), signature={}))


def _empty():  # type: ignore[no-untyped-def]  # Triton reads the source
    pass


def _compiled(end_ns: int, *, src: Any, metadata: Any, times: Any, cache_hit: bool, **_: Any) -> CompileEvent:
    """Read one call of Triton's listener; `times` are microseconds."""
    function = getattr(src, "fn", None)
    name, where = _kernel(function)
    is_inductors = str(getattr(function, "__module__", "")).startswith("torch._inductor")
    names = getattr(function, "arg_names", ())
    constants: Mapping[Any, Any] = getattr(src, "constants", None) or {}
    variant = [f"{_argument(key, names)}={value}" for key, value in constants.items()]
    variant += [f"{key}={metadata[key]}" for key in ("num_warps", "num_stages") if key in metadata]
    # Two variants may differ in nothing but the types of their arguments, or in what is known to divide them.
    signature: Mapping[Any, Any] = getattr(src, "signature", None) or {}
    variant += [f"{_argument(key, names)} {kind}" for key, kind in signature.items() if kind != "constexpr"]
    attributes: Mapping[Any, Any] = getattr(src, "attrs", None) or {}
    if divisible := [_argument(key, names) for key, known in attributes.items() if known]:
        variant.append(f"multiples of 16: {' '.join(divisible)}")
    return _event(
        "inductor" if is_inductors else "triton",
        name or str(getattr(src, "name", "a kernel")),
        ", ".join(variant),
        start_ns=end_ns - int(getattr(times, "total", 0)) * 1000,
        end_ns=end_ns,
        where=where,
        cache="hit" if cache_hit else "miss",
    )


def _tuned(tuner: Any, start_ns: int, end_ns: int) -> CompileEvent:
    name, where = _kernel(getattr(tuner, "base_fn", None))
    variant = str(next(reversed(tuner.cache), ""))
    return _event("triton", name or "a kernel", variant, start_ns=start_ns, end_ns=end_ns, where=where, tuned=True)


def _kernel(function: Any) -> tuple[str, str]:
    """Return (name, place) of a kernel from its Python function, which Triton may have wrapped."""
    while function is not None and not isinstance(getattr(function, "__code__", None), CodeType):
        function = getattr(function, "fn", None)
    if function is None:
        return "", ""
    code = function.__code__
    return function.__name__, place(code.co_filename, code.co_firstlineno, function.__name__)


def _argument(key: Any, names: Sequence[str]) -> str:
    """Return the name of the argument of a constant's key: a position, a path that begins with it, or a name."""
    position = key[0] if isinstance(key, tuple) and key else key
    return names[position] if isinstance(position, int) and position < len(names) else str(key)
