"""What the relay does to a connection."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.faults.relay import FAIR, Weather, order


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


def test_all_bytes_pass_in_fair_weather_and_the_end_too(echo: Echo) -> None:
    text = bytes(range(256)) * 4096
    with echo.connect() as wire:
        sender = threading.Thread(target=wire.sendall, args=(text,))
        sender.start()
        heard = b""
        while len(heard) < len(text):
            heard += wire.recv(1 << 16)
        assert heard == text
        sender.join()
        wire.shutdown(socket.SHUT_WR)
        assert wire.recv(1) == b""


def test_a_delay_counts_both_ways_and_loses_nothing(echo: Echo) -> None:
    with echo.connect() as wire:
        order(echo.orders, Weather(delay_s=0.2))
        began_s = time.monotonic()
        assert said(wire, b"slowly") == b"slowly"
        assert time.monotonic() - began_s >= 0.4


def test_what_is_held_comes_once_it_is_lifted(echo: Echo) -> None:
    with echo.connect() as wire:
        assert said(wire, b"x") == b"x"
        order(echo.orders, Weather(held=True))
        wire.sendall(b"held")
        wire.settimeout(0.3)
        with pytest.raises(TimeoutError):
            wire.recv(10)
        order(echo.orders, FAIR)
        wire.settimeout(30)
        assert wire.recv(10) == b"held"


def test_a_reset_ends_connections_and_new_ones_are_taken(echo: Echo) -> None:
    with echo.connect() as wire:
        assert said(wire, b"x") == b"x"
        order(echo.orders)
        with pytest.raises(ConnectionResetError):
            wire.recv(1)
    with echo.connect() as wire:
        assert said(wire, b"again") == b"again"


def test_nobody_is_taken_while_connections_are_refused(echo: Echo) -> None:
    order(echo.orders, Weather(refused=True))
    with pytest.raises(ConnectionRefusedError):
        echo.connect()
    order(echo.orders, FAIR)
    with echo.connect() as wire:
        assert said(wire, b"again") == b"again"


def test_a_slow_reader_takes_as_much_as_it_says(echo: Echo) -> None:
    with echo.connect() as wire:
        order(echo.orders, Weather(bytes_per_s=10_000))
        began_s = time.monotonic()
        assert said(wire, bytes(4_000)) == bytes(4_000)
        assert time.monotonic() - began_s >= 0.35
