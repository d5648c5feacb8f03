"""Whether programs take argument lists: a process of its own reads them as JSON and says what each program said.

    python -m tests.docs.parsed < lists.json     # [["benchmarks/judging.py", "--help"], ...]

A program runs until its parser has taken the arguments, and no further; one without a parser is refused. Locust, which
patches the standard library, is ["locust", "-f", FILE, ...] and comes last.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

COUNTING = "benchmarks.simulation."


class TakenError(BaseException):
    """The parser took the arguments; nothing between here and there may hold it up."""


def complaint(words: Sequence[str]) -> str:
    """What the program says against its arguments; empty where it takes them."""
    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told), contextlib.redirect_stdout(told):
            if words[0] == "locust":
                _locust(list(words[1:]))
            elif words[0] == "-m" and words[1].startswith(COUNTING):
                return _counting(words)
            elif words[0] == "-m":
                sys.argv = [words[1], *words[2:]]
                runpy.run_module(words[1], run_name="__main__", alter_sys=True)
            else:
                sys.argv = list(words)
                runpy.run_path(words[0], run_name="__main__")
    except TakenError:
        return ""
    except (Exception, SystemExit) as error:
        return f"{told.getvalue()} {error!r}".strip()
    return f"it ended without parsing: {told.getvalue()}"


def _counting(words: Sequence[str]) -> str:
    """Of a program that has no parser and takes whole numbers."""
    there = importlib.util.find_spec(words[1]) is not None
    return "" if there and all(word.isdecimal() for word in words[2:]) else "no such program, or no whole number"


def _locust(words: list[str]) -> NoReturn:
    import locust
    from locust.argument_parser import parse_options
    from locust.util.load_locustfile import load_locustfile

    locust.events.init_command_line_parser._handlers.clear()  # each file has flags of its own
    load_locustfile(words[words.index("-f") + 1] if "-f" in words else "loadtests/chat.py")
    parse_options(words)
    raise TakenError


def main() -> int:
    """Answers for each list, in their order."""
    lists: list[list[str]] = json.load(sys.stdin)
    out, sys.stdout = sys.stdout, sys.stderr
    take = argparse.ArgumentParser.parse_args

    def taken(parser: argparse.ArgumentParser, *given: Any, **named: Any) -> NoReturn:
        take(parser, *given, **named)
        raise TakenError

    argparse.ArgumentParser.parse_args = taken  # type: ignore[method-assign, assignment]
    sys.path.insert(0, str(Path.cwd()))
    json.dump([complaint(words) for words in lists], out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
