"""What a command leaves on stdout: words for a person, one JSON object for a program.

A person at a terminal is shown no JSON unless `--json` asks for it. Where stdout is no terminal, the JSON object is the
last line.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

_COLOURS = re.compile("\x1b\\[[0-9;]*m")  # take no room
PIPE_COLUMNS = 100  # a pipe has no width of its own
_NO_WIDTH = 10_000
LEAST_COLUMNS, MOST_COLUMNS = 60, 140  # narrower tables cannot be read, wider sentences neither


def is_terminal() -> bool:
    """Whether a person reads stdout. A stdout that was closed before the start is none at all."""
    return sys.stdout is not None and sys.stdout.isatty()


def write(words: str, document: Mapping[str, Any], *, as_json: bool = False) -> None:
    """`words` are on stdout, unless JSON alone was asked for, and `document` as the last line where it is for programs.

    Raises ValueError for a number that JSON cannot hold.
    """
    if words and not as_json:
        print(_broken(words, columns()) if is_terminal() else words, flush=True)
    if as_json or not is_terminal():
        print(json.dumps(document, allow_nan=False), flush=True)


def _broken(words: str, width: int) -> str:
    """`words` with longer lines broken between words; a word that is longer, such as a path, stays whole."""
    return "\n".join(
        textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False)
        if len(_COLOURS.sub("", line)) > width
        else line
        for line in words.splitlines()
    )


def columns(*, piped: int = PIPE_COLUMNS) -> int:
    """How many characters a line of words may have: the terminal's width within limits, `piped` where there is none."""
    if not is_terminal():
        return piped
    return min(MOST_COLUMNS, max(LEAST_COLUMNS, shutil.get_terminal_size((PIPE_COLUMNS, 24)).columns))


def aligned(rows: Sequence[Sequence[str]], *, left: int = 1) -> list[str]:
    """Lines in which the columns stand two spaces apart: the first `left` and the last at their left, others right.

    Where a row is wider than the terminal, words go to the next line of their cell. A pipe has no width.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for column in range(len(rows[0])):
        is_left = column < left or column == len(rows[0]) - 1
        table.add_column(justify="left" if is_left else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    shown = io.StringIO()
    Console(file=shown, width=columns(piped=_NO_WIDTH), color_system=None).print(table)
    return [line.rstrip() for line in shown.getvalue().splitlines()]
