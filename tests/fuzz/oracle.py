"""Hostile inputs made of valid ones, the same for the same seed, and what a reader may do with any input."""

from __future__ import annotations

import contextlib
import random
import re
import resource
import signal
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from tailgate.servers.complaint import LONGEST

MOST_S = 2.0  # of the processor, for one input
_STUCK_S = 60.0
_MEMORY = 2 << 30  # bytes of addresses that one input may ask for before it fails


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """A reader of foreign bytes. `read` takes a folder of its own, an input and draws; it raises `refuses` for what it
    refuses, and AssertionError where it accepted what it should not."""

    name: str
    seeds: Callable[[Path], Sequence[bytes]]
    read: Callable[[Path, bytes, random.Random], object]
    refuses: tuple[type[Exception], ...] = ()
    most_mib: int = 64  # more than before, for one input
    one_in: int = 1  # of the inputs that are asked for, as a slow reader takes


class _Low(random.Random):
    """Draws with which a seed is read whole."""

    def random(self) -> float:
        return 0.0


class _TooLongError(BaseException):
    """Not an Exception, so that no reader catches it."""


def examine(reader: Reader, folder: Path, *, count: int) -> dict[str, list[str]]:
    """Give `reader` its seeds and `count` mutated inputs; input n does not depend on the count.

    Return the faults by place.
    """
    faults: dict[str, list[str]] = defaultdict(list)
    seeds = reader.seeds(folder)
    for number in range(-len(seeds), count):  # the seeds first, as they are
        draws = _Low() if number < 0 else random.Random(f"1/{reader.name}/{number}")
        content = seeds[number] if number < 0 else mutated(seeds, draws)
        if (fault := _fault(reader, folder, content, draws, must_take=number < 0)) is not None:
            place, example = fault
            faults[place].append(f"{reader.name}, input {number}, {len(content)} bytes {content[:200]!r}: {example}")
    return faults


def _fault(
    reader: Reader, folder: Path, content: bytes, draws: random.Random, *, must_take: bool
) -> tuple[str, str] | None:
    """Return the place of a fault with this input, and what there is to say of it."""
    try:
        with _limits(), _peak() as peak:
            reader.read(folder, content, draws)
    except reader.refuses as error:
        message = str(error)
        if must_take:
            return f"a valid input is refused: {message}", ""
        if not message or len(message) > LONGEST + 100 or len(message.splitlines()) != 1:
            return f"{type(error).__name__} of {len(message)} characters is no line", repr(message[:300])
    except (Exception, _TooLongError) as error:
        frames = traceback.extract_tb(error.__traceback__)
        last = next((item for item in reversed(frames) if "tests/fuzz" not in item.filename), frames[-1])
        place = f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}"
        return place, "".join(traceback.format_exception(error))[-3000:]
    else:
        if peak[0] > reader.most_mib:
            return "too much memory", f"{peak[0]:.0f} MiB; the limit is {reader.most_mib}"
    return None


@contextlib.contextmanager
def _limits() -> Iterator[None]:
    """Limit the code within to `MOST_S` of the processor, `_STUCK_S` of time and `_MEMORY` of memory."""

    def end(number: int, frame: Any) -> None:
        raise _TooLongError(f"more than {MOST_S if number == signal.SIGPROF else _STUCK_S:g} s")

    before = {number: signal.signal(number, end) for number in (signal.SIGPROF, signal.SIGALRM)}
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + _MEMORY, hard))
    signal.setitimer(signal.ITIMER_PROF, MOST_S)
    signal.setitimer(signal.ITIMER_REAL, _STUCK_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _peak() -> Iterator[list[float]]:
    """Yield a list whose only value is the growth of memory within, in MiB."""
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    most = [0.0]
    yield most
    most[0] = (_status("VmHWM") - before) / 1024


def _status(name: str) -> int:
    text = Path("/proc/self/status").read_text()
    return int(text[text.index(name) :].split(maxsplit=2)[1])


_LONGEST_INPUT = 1 << 17  # bytes of an input

_NUMBERS = (
    *(b"0", b"-1", b"1e308", b"-1e999", b"NaN", b"Infinity", b"-Infinity", b"0.5", b"1e-320", b"-0.0", b"1e15"),
    *(b"2147483648", b"9223372036854775808", b"18446744073709551616", b"-9223372036854775809", b"1" * 5000),
)
_VALUES = (
    *(b"null", b"true", b"[]", b"{}", b'""', b"[[]]", b'{"a":null}'),
    *(b'"\\ud800"', b'"\\u0000"', b'"\\u202e"', b'"x\\ny"'),
    *_NUMBERS,
)
_TEXTS = (
    *(b"\xff", b"\xc3", b"\xed\xa0\x80", b"\x00", b"\r", b"\n", b"\xe2\x80\xa8", b"\xef\xbb\xbf", b"\x1b[2J", b"\x85"),
    *(b"[", b"]", b"{", b"}", b'"', b"'", b"\\", b",", b":", b"=", b"#", b".", b"%s", b"{0}"),
)
_LENGTHS = (
    *(b"\x00\x00\x00\x00", b"\x7f\xff\xff\xff", b"\xff\xff\xff\x7f", b"\xff\xff\xff\xff", b"\x00\xff\xff\xff"),
    *(b"\x80" * 9 + b"\x01", b"\xff" * 4 + b"\x0f", b"\xff" * 9 + b"\x01", b"\x7f\x80\x80\x80\x80"),
)
_OPENINGS = (b"[", b'{"a":', b"a.", b"((", b"[{", b"\x0a\x7f")
_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
_VALUE = re.compile(rb'"[^"\n]{0,64}"|-?\d+(?:\.\d+)?|true|false|null|\[\]|\{\}')


def mutated(seeds: Sequence[bytes], draws: random.Random) -> bytes:
    """Return one of the seeds with one to four changes."""
    content = bytearray(draws.choice(seeds))
    for _ in range(draws.choice((1, 1, 1, 2, 2, 3, 4))):
        _change(content, seeds, draws)
        del content[_LONGEST_INPUT:]
    return bytes(content)


def _change(content: bytearray, seeds: Sequence[bytes], draws: random.Random) -> None:
    start, end = _stretch(content, draws)
    match draws.randrange(14):
        case 0 | 1:
            for _ in range(draws.choice((1, 1, 2, 8, 32)) if content else 0):
                content[draws.randrange(len(content))] ^= 1 << draws.randrange(8)
        case 2:
            new = draws.choice((*_LENGTHS, draws.randbytes(1)))
            content[start : start + len(new)] = new
        case 3:
            content[start:start] = draws.choice((*_TEXTS, *_VALUES, *_LENGTHS, draws.randbytes(draws.randint(1, 64))))
        case 4:
            del content[start : draws.choice((end, len(content)))]
        case 5:
            content[end:end] = bytes(content[start:end]) * draws.choice((1, 1, 2, 7, 100))
        case 6:
            later = min(len(content), end + max(1, end - start))
            content[start:later] = content[end:later] + content[start:end]
        case 7:
            other = draws.choice(seeds)
            there = draws.randrange(len(other) + 1)
            content[start:end] = other[there : there + draws.randint(1, 256)]
        case 8:
            content[start:start] = draws.choice(_OPENINGS) * draws.choice((3, 40, 2000, 20_000))
        case kind:
            old, new_values = (_NUMBER, _NUMBERS) if kind < 11 else (_VALUE, _VALUES)
            if found := [match.span() for match in old.finditer(content[: 1 << 16])]:
                start, end = draws.choice(found)
                content[start:end] = draws.choice(new_values)


def _stretch(content: bytearray, draws: random.Random) -> tuple[int, int]:
    """Draw a range of a third of the whole at most; half the time on the borders of lines."""
    start = draws.randrange(len(content) + 1)
    end = min(len(content), start + draws.randint(1, 1 + len(content) // 3))
    if draws.random() < 0.5:
        start, end = content.rfind(b"\n", 0, start) + 1, content.find(b"\n", end) + 1 or len(content)
    return start, end


def pieces(content: bytes, draws: random.Random) -> list[bytes]:
    """Split the content as reads from a socket may: whole half the time."""
    if len(content) < 2 or draws.random() < 0.5:
        return [content]
    borders = sorted({0, len(content), *(draws.randrange(len(content)) for _ in range(draws.randint(1, 8)))})
    return [content[start:end] for start, end in pairwise(borders)]
