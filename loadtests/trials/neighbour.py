"""Weigh on this host: `python -m loadtests.trials.neighbour --gib 20 --gpus 0 1 --processors 4`.

Holds so many GiB on each GPU and keeps so many processors busy until it is killed. Says `Weighs` once it does, or
why it does not. loadtests/trials/pressure.py starts it.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from servers.clock import now_ns
from servers.processes import say

_BLOCK = bytes(1 << 20)


@dataclass(frozen=True, slots=True)
class Weighs:
    """Since when the pressure is on, or why it is not."""

    at_ns: int | None = None
    error: str = ""


def hold(gpus: Sequence[int], size: int) -> None:
    """Take `size` bytes on each GPU by the driver, which makes them resident at once. Raises OSError."""
    cuda = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *arguments: Any) -> None:
        if code := getattr(cuda, name)(*arguments):
            text = ctypes.c_char_p()
            cuda.cuGetErrorString(code, ctypes.byref(text))
            raise OSError(f"{name}: {(text.value or b'unknown error').decode()}")

    call("cuInit", 0)
    for gpu in gpus:
        device, context, pointer = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
        call("cuDeviceGet", ctypes.byref(device), gpu)
        call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        call("cuCtxSetCurrent", context)
        call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))


def burn() -> None:
    """Keep one processor busy for ever. A digest of a large block runs without the interpreter's lock."""
    while True:
        hashlib.sha256(_BLOCK)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program, which ends by itself only where it fails."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.trials.neighbour", description=__doc__)
    parser.add_argument("--gib", type=float, default=0.0)
    parser.add_argument("--gpus", type=int, nargs="*", default=())
    parser.add_argument("--processors", type=int, default=0)
    options = parser.parse_args(arguments)
    try:
        if options.gib:
            hold(options.gpus, int(options.gib * (1 << 30)))
    except OSError as error:
        say(Weighs(error=str(error)))
        return 1
    for _ in range(options.processors):
        threading.Thread(target=burn, daemon=True).start()
    say(Weighs(at_ns=now_ns()))
    threading.Event().wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
