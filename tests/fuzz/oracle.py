"""What a reader may do with any input: take it, or refuse it in one line, within its time and its memory."""

from __future__ import annotations

import contextlib
import random
import resource
import signal
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from servers.complaint import LONGEST
from tests.fuzz.mutation import mutated

MOST_S = 2.0  # of the processor, for one input
_STUCK_S = 60.0
_MIB = 1 << 20
_ROOM = 2 << 30  # bytes of addresses that one input may ask for before it fails


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """What reads the bytes of others. `read` is given a folder to itself, an input and draws; it raises `refuses` for
    what it does not take, and AssertionError where it took something for what it is not."""

    name: str
    seeds: Callable[[Path], Sequence[bytes]]
    read: Callable[[Path, bytes, random.Random], object]
    refuses: tuple[type[Exception], ...] = ()
    most_mib: int = 64  # more than before, for one input


@dataclass(slots=True)
class Findings:
    """What came of the inputs. `faults` are told once for each place that they come from."""

    taken: int = 0
    refused: int = 0
    largest_mib: float = 0.0
    slowest_s: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    faults: dict[str, str] = field(default_factory=dict)

    def add(self, place: str, told: str) -> None:
        self.counts[place] += 1
        self.faults.setdefault(place, told)


class _Low(random.Random):
    """Draws for a seed, which is read whole and as it is."""

    def random(self) -> float:
        return 0.0


class _TooLongError(BaseException):
    """Not an Exception, so that no reader takes it for an input that it refuses."""


def hunted(reader: Reader, folder: Path, *, count: int, seed: int = 1, first: int = 0) -> Findings:
    """What `reader` did with `count` inputs. Input n is the same whatever the count is."""
    findings = Findings()
    seeds = reader.seeds(folder)
    for number, content in enumerate(seeds):
        _try(reader, folder, content, _Low(), findings, f"seed {number}", must_take=True)
    for number in range(first, first + count):
        draws = random.Random(f"{seed}/{reader.name}/{number}")
        _try(reader, folder, mutated(seeds, draws), draws, findings, f"input {number}")
    return findings


def _try(
    reader: Reader,
    folder: Path,
    content: bytes,
    draws: random.Random,
    findings: Findings,
    label: str,
    *,
    must_take: bool = False,
) -> None:
    where = f"{reader.name}, {label}, {len(content)} bytes {content[:200]!r}"
    before_s = _cpu_s()
    try:
        with _limits(), _peak() as peak:
            reader.read(folder, content, draws)
        findings.taken += 1
    except reader.refuses as error:
        findings.refused += 1
        told = str(error)
        if must_take:
            findings.add(f"a valid input is refused: {told}", where)
        elif not told or len(told) > LONGEST + 100 or len(told.splitlines()) != 1:
            findings.add(f"{type(error).__name__} of {len(told)} characters is no line", f"{where}: {told[:300]!r}")
    except (Exception, _TooLongError) as error:
        frames = traceback.extract_tb(error.__traceback__)
        last = next((item for item in reversed(frames) if "tests/fuzz" not in item.filename), frames[-1])
        place = f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}"
        findings.add(place, f"{where}:\n{''.join(traceback.format_exception(error))[-3000:]}")
    else:
        findings.largest_mib = max(findings.largest_mib, peak[0])
        if peak[0] > reader.most_mib:
            findings.add("too much memory", f"{where}: {peak[0]:.0f} MiB; the limit is {reader.most_mib}")
    findings.slowest_s = max(findings.slowest_s, _cpu_s() - before_s)


@contextlib.contextmanager
def _limits() -> Iterator[None]:
    """Code within has `MOST_S` of the processor, `_STUCK_S` of time, and an end of its memory."""

    def end(number: int, frame: Any) -> None:
        raise _TooLongError(f"more than {MOST_S if number == signal.SIGPROF else _STUCK_S:g} s")

    before = {number: signal.signal(number, end) for number in (signal.SIGPROF, signal.SIGALRM)}
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + _ROOM, hard))
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
    """MiB that the process held at most within, more than before."""
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    most = [0.0]
    yield most
    most[0] = (_status("VmHWM") - before) / 1024


def _status(name: str) -> int:
    """KiB."""
    text = Path("/proc/self/status").read_text()
    return int(text[text.index(name) :].split(maxsplit=2)[1])


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
