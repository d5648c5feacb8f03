"""What the relay does to a connection."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.faults.relay import order


@dataclass(frozen=True, slots=True)
class Echo:
    """A relay in front of a server that repeats what it hears."""

    port: int
    orders: int

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)


def _repeat(listener: socket.socket) -> None:
    while True:
        try:
            wire, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=_answer, args=(wire,), daemon=True).start()


def _answer(wire: socket.socket) -> None:
    try:
        while piece := wire.recv(1 << 16):
            wire.sendall(piece)
        wire.close()
    except OSError:
        return


@pytest.fixture
def echo() -> Iterator[Echo]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_repeat, args=(listener,), daemon=True).start()
        command = [sys.executable, "-m", "tests.faults.relay", f"127.0.0.1:{listener.getsockname()[1]}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            yield Echo(**json.loads(process.stdout.readline()))
            process.terminate()


def said(wire: socket.socket, text: bytes) -> bytes:
    wire.sendall(text)
    heard = b""
    while len(heard) < len(text):
        heard += wire.recv(1 << 16)
    return heard


def test_a_reset_ends_connections_and_new_ones_are_taken(echo: Echo) -> None:
    with echo.connect() as wire:
        assert said(wire, b"x") == b"x"
        order(echo.orders)
        with pytest.raises(ConnectionResetError):
            wire.recv(1)
    with echo.connect() as wire:
        assert said(wire, b"again") == b"again"
