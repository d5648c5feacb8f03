"""Types of flags for argparse. Each refuses what nothing behind it could use, with value, limit and remedy."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

from loadtests.experiments.toml_limits import check_path
from servers.config import ConfigError

MOST_CHARACTERS = 1 << 16


def file_name(text: str) -> str:
    """A path that a file can have; empty where a flag allows none."""
    try:
        return check_path(text, "the path")
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def words(text: str) -> str:
    """A text of a length that a command line has."""
    if "\0" in text:
        raise argparse.ArgumentTypeError("it holds a NUL character: remove it")
    if len(text) > MOST_CHARACTERS:
        raise argparse.ArgumentTypeError(f"it has {len(text)} characters; the limit is {MOST_CHARACTERS}: give fewer")
    return text


def whole(low: int, high: int, what: str = "number") -> Callable[[str], int]:
    """The type of whole numbers from `low` to `high`."""

    def parse(text: str) -> int:
        digits = text.removeprefix("-")
        if not (digits.isascii() and digits.isdecimal()):
            raise argparse.ArgumentTypeError(f"{text!r} is no {what}: give a whole number from {low} to {high}")
        value = int(text) if len(digits) <= 20 else high + 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is no {what}: give {low} to {high}")
        return value

    return parse


def real(low: float, high: float, what: str = "number", *, above: bool = False) -> Callable[[str], float]:
    """The type of numbers from `low` (or `above` it) to `high`; never nan."""
    least = f"above {low:g}" if above else f"from {low:g}"

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high or (above and value == low):
            raise argparse.ArgumentTypeError(f"{text!r} is no {what}: give a number {least} to {high:g}")
        return value

    return parse


_FILES = ("FILE", "DIR", "RUN_DIR", "TRACE", "EXPERIMENT")


def _finite(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is no number: give a finite one")
    return value


def give_types(parser: argparse.ArgumentParser) -> None:
    """Every value that `parser` and its commands take is checked, also where a flag names no type of its own."""
    types: dict[Any, Callable[[str], Any]] = {
        int: whole(-(2**63), 2**63 - 1),
        float: _finite,
        str: words,
    }
    for action in parser._actions:  # argparse has no public way to them
        if isinstance(action, argparse._SubParsersAction):
            for command in dict.fromkeys(action.choices.values()):
                give_types(command)
        elif action.nargs != 0:
            kind = action.type or str
            action.type = file_name if kind is str and action.metavar in _FILES else types.get(kind, kind)
