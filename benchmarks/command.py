"""What the measuring commands share: their flags, how they end, and their result as the last line on stdout."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable
from typing import Any


def count(text: str) -> int:
    """Parse a whole number of at least one."""
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is no count: give 1 to {10**9 - 1}")
    return int(text)


def several(kind: Callable[[str], Any], example: str) -> Callable[[str], tuple[Any, ...]]:
    """Return the type of a list of `kind` between commas; what comes twice is taken once."""

    def parse(text: str) -> tuple[Any, ...]:
        items = tuple(dict.fromkeys(kind(item) for item in text.split(",") if item.strip()))
        if not items:
            raise argparse.ArgumentTypeError(f"the list is empty: give for example {example}")
        return items

    return parse


def parser_of(script: str, description: str | None, *, repeats: int) -> argparse.ArgumentParser:
    """Return the parser of `python benchmarks/SCRIPT` with the flags that all such commands take."""
    parser = argparse.ArgumentParser(
        prog=f"python benchmarks/{script}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--repeats", type=count, default=repeats, help="measured repeats (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="for what is drawn (default %(default)s)")
    return parser


def finish(result: dict[str, Any]) -> int:
    """Print the result as one JSON line; return the exit code."""
    print(json.dumps(result), flush=True)
    return 0 if result["ok"] else 1


def end_in_order() -> None:
    """Have SIGTERM end the run as Ctrl-C does, once: the processes are gone and what was measured is shown."""

    def stop(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit(143)

    signal.signal(signal.SIGTERM, stop)
