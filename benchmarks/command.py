"""The form of the measuring commands: bad usage is one line and exit code 2, the result the last line on stdout."""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from servers.complaint import ConfigError, one_line


def count(text: str) -> int:
    """Parse a whole number of at least one."""
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is no count: give 1 to {10**9 - 1}")
    return int(text)


class BenchmarkParser(argparse.ArgumentParser):
    """The flags of `python benchmarks/SCRIPT` and those that all such commands take. Errors are ConfigErrors."""

    def __init__(self, script: str, description: str | None, *, repeats: int) -> None:
        super().__init__(
            prog=f"python benchmarks/{script}",
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.add_argument("--repeats", type=count, default=repeats, help="measured repeats (default %(default)s)")
        self.add_argument("--seed", type=int, default=0, help="for what is drawn (default %(default)s)")

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def several(kind: Callable[[str], Any], example: str) -> Callable[[str], tuple[Any, ...]]:
    """The type of a list of `kind` between commas; what comes twice is taken once."""

    def parse(text: str) -> tuple[Any, ...]:
        items = tuple(dict.fromkeys(kind(item) for item in text.split(",") if item.strip()))
        if not items:
            raise argparse.ArgumentTypeError(f"the list is empty: give for example {example}")
        return items

    return parse


def command_line(script: str, arguments: Sequence[str]) -> str:
    """The command as one would type it again."""
    return shlex.join(["python", f"benchmarks/{script}", *arguments])


def run_command(
    script: str, measure: Callable[[Sequence[str]], dict[str, Any]], arguments: Sequence[str] | None = None
) -> int:
    """The result of `measure` is on stdout as one JSON line; returns the exit code."""
    try:
        result = measure(sys.argv[1:] if arguments is None else arguments)
    except ConfigError as error:
        print(f"benchmarks/{script}: {one_line(str(error))}", file=sys.stderr)
        return 2
    print(json.dumps(result), flush=True)
    return 0 if result["ok"] else 1


def end_in_order() -> None:
    """SIGTERM ends the run as Ctrl-C does, once: the processes are gone and what was measured is shown."""

    def stop(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit(143)

    signal.signal(signal.SIGTERM, stop)
