"""The oracle sees what it is there to see, and the inputs are the same every time."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fuzz.oracle import Reader, hunted


def refuse(message: str) -> None:
    raise KeyError(message) if message == "key" else ValueError(message)


def spin() -> None:
    while True:
        pass


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (lambda: refuse("key"), "KeyError at"),
        (lambda: refuse("two\nlines"), "is no line"),
        (lambda: refuse("x" * 5000), "is no line"),
        (lambda: refuse(""), "is no line"),
        (lambda: len(b"x" * (80 << 20)), "too much memory"),
        (lambda: len(b"x" * (8 << 30)), "MemoryError at"),
        (spin, "_TooLongError at"),
    ],
)
def test_a_fault_is_found(tmp_path: Path, fault: Callable[[], object], told: str) -> None:
    def read(folder: Path, content: bytes, draws: random.Random) -> None:
        if content != b"seed":
            fault()

    reader = Reader(name="faulty", seeds=lambda folder: [b"seed"], read=read, refuses=(ValueError,))
    (place,) = hunted(reader, tmp_path, count=1).faults
    assert told in place
