"""The oracle sees what it is there to see, and the inputs are the same every time."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fuzz.mutation import LONGEST, mutated, pieces
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


def test_a_seed_must_be_taken_and_a_refusal_of_one_line_is_none(tmp_path: Path) -> None:
    reader = Reader(
        name="strict", seeds=lambda folder: [b"seed"], read=lambda *_: refuse("no: give another"), refuses=(ValueError,)
    )
    findings = hunted(reader, tmp_path, count=3)
    assert findings.refused == 4
    assert list(findings.faults) == ["a valid input is refused: no: give another"]


def test_inputs_are_drawn_by_their_seed_alone() -> None:
    seeds = [b'{"a": 1, "b": [2, null]}\n' * 3, b"\x00\x01\x02"]
    drawn = [mutated(seeds, random.Random(f"1/x/{number}")) for number in range(200)]
    assert drawn == [mutated(seeds, random.Random(f"1/x/{number}")) for number in range(200)]
    assert len(set(drawn)) > 150
    assert max(map(len, drawn)) <= LONGEST
    draws = random.Random(1)
    assert all(b"".join(pieces(content, draws)) == content for content in drawn)
