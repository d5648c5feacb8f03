"""Damaged and hostile inputs, made of valid ones: the same for the same seed, on every machine."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from itertools import pairwise

LONGEST = 1 << 17  # bytes of an input

_NUMBERS = (
    *(b"0", b"-1", b"1e308", b"-1e999", b"NaN", b"Infinity", b"-Infinity", b"0.5", b"1e-320", b"-0.0", b"1e15"),
    *(b"2147483648", b"9223372036854775808", b"18446744073709551616", b"-9223372036854775809", b"1" * 5000),
)
_VALUES = (
    *(
        b"null",
        b"true",
        b"[]",
        b"{}",
        b'""',
        b"[[]]",
        b'{"a":null}',
        b'"\\ud800"',
        b'"\\u0000"',
        b'"\\u202e"',
        b'"x\\ny"',
    ),
    *_NUMBERS,
)
_TEXTS = (
    *(b"\xff", b"\xc3", b"\xed\xa0\x80", b"\x00", b"\r", b"\n", b"\xe2\x80\xa8", b"\xef\xbb\xbf", b"\x1b[2J", b"\x85"),
    *(b"[", b"]", b"{", b"}", b'"', b"'", b"\\", b",", b":", b"=", b"#", b".", b"%s", b"{0}"),
)
_LENGTHS = (
    *(b"\x00\x00\x00\x00", b"\x7f\xff\xff\xff", b"\xff\xff\xff\x7f", b"\xff\xff\xff\xff", b"\x00\xff\xff\xff"),
    *(
        b"\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01",
        b"\xff\xff\xff\xff\x0f",
        b"\xff" * 9 + b"\x01",
        b"\x7f\x80\x80\x80\x80",
    ),
)
_OPENINGS = (b"[", b'{"a":', b"a.", b"((", b"[{", b"\x0a\x7f")
_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
_VALUE = re.compile(rb'"[^"\n]{0,64}"|-?\d+(?:\.\d+)?|true|false|null|\[\]|\{\}')

Change = Callable[[bytearray, random.Random, Sequence[bytes]], None]


def mutated(seeds: Sequence[bytes], draws: random.Random) -> bytes:
    """One of the seeds with one to four changes."""
    content = bytearray(draws.choice(seeds))
    for _ in range(draws.choice((1, 1, 1, 2, 2, 3, 4))):
        draws.choice(_CHANGES)(content, draws, seeds)
        del content[LONGEST:]
    return bytes(content)


def pieces(content: bytes, draws: random.Random) -> list[bytes]:
    """The content as reads from a socket may bring it: whole half the time."""
    if len(content) < 2 or draws.random() < 0.5:
        return [content]
    borders = sorted({0, len(content), *(draws.randrange(len(content)) for _ in range(draws.randint(1, 8)))})
    return [content[start:end] for start, end in pairwise(borders)]


def _flip(content: bytearray, draws: random.Random, seeds: Sequence[bytes]) -> None:
    for _ in range(draws.choice((1, 1, 2, 8, 32))):
        if content:
            content[draws.randrange(len(content))] ^= 1 << draws.randrange(8)


def _overwrite(content: bytearray, draws: random.Random, seeds: Sequence[bytes]) -> None:
    at = draws.randrange(len(content) + 1)
    new = draws.choice((*_LENGTHS, bytes((draws.randrange(256),))))
    content[at : at + len(new)] = new


def _insert(content: bytearray, draws: random.Random, seeds: Sequence[bytes]) -> None:
    at = draws.randrange(len(content) + 1)
    content[at:at] = draws.choice((*_TEXTS, *_VALUES, *_LENGTHS, draws.randbytes(draws.randint(1, 64))))


def _cut(content: bytearray, draws: random.Random, seeds: Sequence[bytes]) -> None:
    start, end = _stretch(content, draws)
    if draws.random() < 0.5:
        end = len(content)
    del content[start:end]


def _repeat(content: bytearray, draws: random.Random, seeds: Sequence[bytes]) -> None:
    start, end = _stretch(content, draws)
    content[end:end] = bytes(content[start:end]) * draws.choice((1, 1, 2, 7, 100))


def _swap(content: bytearray, draws: random.Random, seeds: Sequence[bytes]) -> None:
    start, end = _stretch(content, draws)
    later = min(len(content), end + max(1, end - start))
    content[start:later] = content[end:later] + content[start:end]


def _splice(content: bytearray, draws: random.Random, seeds: Sequence[bytes]) -> None:
    other = draws.choice(seeds)
    start, end = _stretch(content, draws)
    there = draws.randrange(len(other) + 1)
    content[start:end] = other[there : there + draws.randint(1, 256)]


def _nest(content: bytearray, draws: random.Random, seeds: Sequence[bytes]) -> None:
    at = draws.randrange(len(content) + 1)
    content[at:at] = draws.choice(_OPENINGS) * draws.choice((3, 40, 2000, 20_000))


def _new_number(content: bytearray, draws: random.Random, seeds: Sequence[bytes]) -> None:
    _replace_one(content, draws, _NUMBER, _NUMBERS)


def _new_value(content: bytearray, draws: random.Random, seeds: Sequence[bytes]) -> None:
    _replace_one(content, draws, _VALUE, _VALUES)


def _replace_one(content: bytearray, draws: random.Random, old: re.Pattern[bytes], new: Sequence[bytes]) -> None:
    found = [match.span() for match in old.finditer(content[: 1 << 16])]
    if found:
        start, end = draws.choice(found)
        content[start:end] = draws.choice(new)


def _stretch(content: bytearray, draws: random.Random) -> tuple[int, int]:
    """Somewhere, of a third of the whole at most; half the time on the borders of lines."""
    start = draws.randrange(len(content) + 1)
    end = min(len(content), start + draws.randint(1, 1 + len(content) // 3))
    if draws.random() < 0.5:
        start, end = content.rfind(b"\n", 0, start) + 1, content.find(b"\n", end) + 1 or len(content)
    return start, end


_CHANGES: Sequence[Change] = (
    *(_flip, _flip, _overwrite, _insert, _cut, _repeat, _swap, _splice, _nest),
    *(_new_number, _new_number, _new_value, _new_value, _new_value),
)
