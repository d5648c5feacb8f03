"""Waits, refusals and processes. Waits are long: machines are busy, and a wait that succeeds costs nothing."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

PATIENCE_S = 120.0


def free_port() -> int:
    """Return a port of this machine that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def wait_for(
    condition: Callable[[], Any],
    within_s: float = PATIENCE_S,
    *,
    sleep: Callable[[float], object] = time.sleep,
    every_s: float = 0.02,
    otherwise: Callable[[], object] = str,
) -> Any:
    """Return the first answer of `condition` that is true.

    Raise AssertionError after `within_s` seconds, with what `otherwise` then returns. Greenlets run meanwhile where
    `sleep` is theirs.
    """
    end = time.monotonic() + within_s
    while not (answer := condition()):
        assert time.monotonic() < end, f"not within {within_s:g} s: {otherwise()}"
        sleep(every_s)
    return answer


def refusal(error: type[Exception], call: Callable[..., object], *arguments: Any, **options: Any) -> str:
    """Return why the call is refused: the one line of the `error` that it raises."""
    with pytest.raises(error) as caught:
        call(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


_ACCEPTS = 0x10000  # __SO_ACCEPTCON


@dataclass(frozen=True, slots=True)
class Listener:
    """A socket that accepts connections. `address` is that of an interface, or the path of a Unix socket."""

    pid: int
    command: str
    address: str
    port: int = 0


def family(pid: int) -> list[int]:
    """Return the process and all below it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    return [pid]


def command_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""


def listeners(pid: int) -> set[Listener]:
    """Return what the process and all below it listen on. A process that ends meanwhile has no command and is left
    out."""
    accepting = {row[7] for row in _unix_sockets() if int(row[3], 16) & _ACCEPTS}
    found = set()
    for member, item in _sockets(pid):
        command = command_of(member)
        if not command:
            continue
        if item.status == psutil.CONN_LISTEN:
            found.add(Listener(member, command, item.laddr.ip.removeprefix("::ffff:"), item.laddr.port))
        elif item.family == socket.AF_UNIX and item.laddr in accepting:
            found.add(Listener(member, command, item.laddr))
    return found


def unix_names(pid: int) -> set[str]:
    """Return the names of Unix sockets that the process and all below it hold, listening or connected."""
    return {item.laddr for _, item in _sockets(pid) if item.family == socket.AF_UNIX and item.laddr}


def _sockets(pid: int) -> Iterator[tuple[int, Any]]:
    for member in family(pid):
        with contextlib.suppress(psutil.Error):
            for item in psutil.Process(member).net_connections("all"):
                yield member, item


def _unix_sockets() -> list[list[str]]:
    """Return the rows of named Unix sockets in the kernel's table; psutil does not tell which of them accept."""
    rows = (line.split(maxsplit=7) for line in Path("/proc/net/unix").read_text().splitlines()[1:])
    return [row for row in rows if len(row) == 8]
