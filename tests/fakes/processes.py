"""Waits, refusals and processes. Waits are long: machines are busy, and a wait that succeeds costs nothing."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

PATIENCE_S = 120.0


def free_port() -> int:
    """Return a port of this machine that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def wait_for(
    condition: Callable[[], T],
    within_s: float = PATIENCE_S,
    *,
    sleep: Callable[[float], object] = time.sleep,
    every_s: float = 0.02,
    otherwise: Callable[[], object] = str,
) -> T:
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


_LISTENS = "0A"  # TCP_LISTEN
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
    found = [pid]
    with contextlib.suppress(OSError):  # it may end meanwhile
        for task in list(Path(f"/proc/{pid}/task").glob("*/children")):
            with contextlib.suppress(OSError):
                for child in map(int, task.read_text().split()):
                    found += family(child)
    return found


def command_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""


def listeners(pid: int) -> set[Listener]:
    """Return what the process and all below it listen on."""
    places = _places()
    return {
        Listener(member, command_of(member), *places[inode])
        for member in family(pid)
        for inode in _inodes(member)
        if inode in places
    }


def unix_names(pid: int) -> set[str]:
    """Return the names of Unix sockets that the process and all below it hold, listening or connected."""
    held = {inode for member in family(pid) for inode in _inodes(member)}
    rows = (line.split(maxsplit=7) for line in Path("/proc/net/unix").read_text().splitlines()[1:])
    return {row[7] for row in rows if len(row) == 8 and row[6] in held}


def _inodes(pid: int) -> set[str]:
    found = set()
    with contextlib.suppress(OSError):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                kind, _, inode = str(file.readlink()).partition(":")
                if kind == "socket":
                    found.add(inode.strip("[]"))
    return found


def _places() -> dict[str, tuple[str, int]]:
    """Return the address and port of all listening sockets, by inode."""
    found = {}
    for kind, table in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                _, local, _, state, *rest = line.split()
                host, _, port = local.partition(":")
                if state == _LISTENS:
                    words = struct.unpack(f">{len(host) // 8}I", bytes.fromhex(host))  # each in the machine's order
                    packed = struct.pack(f"={len(words)}I", *words)
                    address = socket.inet_ntop(kind, packed).removeprefix("::ffff:")  # IPv4 at a socket for both
                    found[rest[5]] = (address, int(port, 16))
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        _, _, _, flags, _, _, inode, *path = line.split(maxsplit=7)
        if int(flags, 16) & _ACCEPTS:
            found[inode] = (path[0] if path else "", 0)
    return found
