"""What a command leaves on stdout: words for a person, or one JSON object where `--json` asks for it."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

_COLOURS = re.compile("\x1b\\[[0-9;]*m")  # take no space
PIPE_COLUMNS = 100  # a pipe has no width of its own
_NO_WIDTH = 10_000
LEAST_COLUMNS, MOST_COLUMNS = 60, 140  # narrower tables cannot be read, wider sentences neither


def is_terminal() -> bool:
    """Return whether stdout is a terminal; False if it was closed before the start."""
    return sys.stdout is not None and sys.stdout.isatty()


def write(words: str, document: Mapping[str, Any], *, as_json: bool = False) -> None:
    """Write `document` as one line of JSON, or else `words`. Raises ValueError for a number that JSON cannot hold."""
    if as_json:
        print(json.dumps(document, allow_nan=False), flush=True)
    elif words:
        print(_broken(words, columns()) if is_terminal() else words, flush=True)


def _broken(words: str, width: int) -> str:
    """Break longer lines of `words` between words; a longer word, such as a path, stays whole."""
    return "\n".join(
        textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False)
        if len(_COLOURS.sub("", line)) > width
        else line
        for line in words.splitlines()
    )


def columns(*, piped: int = PIPE_COLUMNS) -> int:
    """Return the most characters of a line: the terminal's width within limits, or `piped` without one."""
    if not is_terminal():
        return piped
    return min(MOST_COLUMNS, max(LEAST_COLUMNS, shutil.get_terminal_size((PIPE_COLUMNS, 24)).columns))


def aligned(rows: Sequence[Sequence[str]], *, left: int = 1) -> list[str]:
    """Return lines with columns two spaces apart: the first `left` and the last left-aligned, others right-aligned.
    If a row is wider than the terminal, cells wrap."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if not rows:
        return []
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for column in range(len(rows[0])):
        is_left = column < left or column == len(rows[0]) - 1
        table.add_column(justify="left" if is_left else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    shown = io.StringIO()
    Console(file=shown, width=columns(piped=_NO_WIDTH), color_system=None).print(table)
    return [line.rstrip() for line in shown.getvalue().splitlines()]
