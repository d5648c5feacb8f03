"""Kernels that are compiled outside of torch.compile, when they are first called: by Triton, CuTe or any other JIT.

Triton is watched by itself (`internals.Taps`). Whoever brings another such compiler says when it works:

    from servers.compiler.jit import jit_compile

    with jit_compile("attention_sm90", variant="head_dim=128, bf16", compiler="cute"):
        kernel = cute.compile(...)

No torch here, so that a plug-in may import it anywhere. Outside of a tailgate server it costs nothing and does nothing.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from servers.clock import now_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class JitCompile:
    """A kernel that was compiled, or tuned by running its variants against each other (`tuned`), on one thread."""

    compiler: str
    kernel: str
    start_ns: int
    end_ns: int
    thread: int
    variant: str = ""
    place: str = ""  # where the kernel stands: "engine/decode_kernel.py:25 in _decode"
    cache: str = ""  # hit | miss | empty where unknown
    tuned: bool = False
    kernels: int = 1
    compile_ns: int = 0  # what of the time went into compiling; the rest of a tuning went into running


JitListener = Callable[[JitCompile], object]

# Compilers are called from code that knows no recorder. Those that listen in this process are therefore kept here.
_listeners: list[JitListener] = []


def listen(listener: JitListener) -> None:
    """From now on `listener` gets every compile that `jit_compile` encloses, on the thread that compiled."""
    _listeners.append(listener)


def stop_listening(listener: JitListener) -> None:
    """`listener` gets no more of them."""
    with contextlib.suppress(ValueError):
        _listeners.remove(listener)


@contextlib.contextmanager
def jit_compile(kernel: str, *, variant: str = "", compiler: str = "jit") -> Iterator[None]:
    """The enclosed code compiles `kernel`, and is recorded as one JIT compile whether it succeeds or raises.

    `variant` says what this compile is for and another would not be: sizes, types, tiles. `compiler` is its name.
    """
    start_ns = now_ns()
    try:
        yield
    finally:
        end_ns = now_ns()
        compiled = JitCompile(
            compiler=compiler,
            kernel=kernel,
            variant=variant,
            start_ns=start_ns,
            end_ns=end_ns,
            thread=threading.get_ident(),
            compile_ns=end_ns - start_ns,
        )
        for listener in tuple(_listeners):
            listener(compiled)


def outermost(compiles: Iterable[JitCompile]) -> list[JitCompile]:
    """The compiles without those that happened inside another one, which has their number and time.

    A tuning compiles every variant that it tries: that is one wait of the requests, and one event.
    """
    merged: list[JitCompile] = []
    for item in sorted(compiles, key=lambda item: (item.thread, item.start_ns, -item.end_ns)):
        last = merged[-1] if merged else None
        if last is None or last.thread != item.thread or (item.start_ns + item.end_ns) // 2 >= last.end_ns:
            merged.append(item)
        elif last.tuned:
            inside = last.compile_ns + item.compile_ns
            merged[-1] = replace(last, kernels=last.kernels + item.kernels, compile_ns=inside)
    return sorted(merged, key=lambda item: item.start_ns)
