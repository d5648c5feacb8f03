"""What commands share of their command lines: the parser, types of values and flags. Each type refuses what no command
could use, with value, limit and remedy."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from loadtests.experiments.files import builtin_names
from loadtests.experiments.toml_limits import check_path
from servers.fields import ConfigError, span_s
from servers.security import ServerTls, check_named, server_tls

MOST_CHARACTERS = 1 << 16
_LARGEST = sys.float_info.max
_LONGEST_S = 7 * 86_400.0

T = TypeVar("T")


class CommandParser(argparse.ArgumentParser):
    """Errors are raised as all of tailgate's. Descriptions and epilogs keep their lines."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **settings)

    def error(self, message: str) -> NoReturn:
        command = self.prog.partition(" ")[2]
        raise ConfigError(f"{message}: see `tailgate {command}{' ' if command else ''}--help`")

    def describe(self, details: str, examples: str, *, json_help: str = "print one JSON object alone") -> None:
        """The help has `details` and `examples`. There is a --json, unless `json_help` is empty."""
        if json_help:
            details += "\nWith --json, or where stdout is no terminal, its last line is one JSON object."
            self.add_argument("--json", action="store_true", help=json_help)
        self.description = f"{self.description}\n\n{details}"
        self.epilog = f"examples:\n{examples}"


# --- Types of values --------------------------------------------------------------------------------------------------


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


def real(
    low: float = -_LARGEST, high: float = _LARGEST, what: str = "number", *, above: bool = False
) -> Callable[[str], float]:
    """The type of numbers from `low` (or `above` it) to `high`; never nan or infinite."""
    allowed = f"a number {'above' if above else 'from'} {low:g} to {high:g}" if high < _LARGEST else "a finite one"

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high or (above and value == low):
            raise argparse.ArgumentTypeError(f"{text!r} is no {what}: give {allowed}")
        return value

    return parse


def duration(text: str) -> float:
    """The type of lengths of time such as "90s", "60m" or "1.5h", in seconds; a bare number is seconds."""
    value = span_s(text)
    if value is None or value > _LONGEST_S:
        raise argparse.ArgumentTypeError(f"{text!r} is no length of time: give 90s, 60m or 1.5h, a week at most")
    return value


def several(kind: Callable[[str], T], most: int = 1024) -> Callable[[str], tuple[T, ...]]:
    """The type of up to `most` values of the type `kind`, between commas."""

    def parse(text: str) -> tuple[T, ...]:
        parts = text.split(",")
        if len(parts) > most:
            raise argparse.ArgumentTypeError(f"it has {len(parts)} values: give up to {most}")
        return tuple(kind(part.strip()) for part in parts)

    return parse


_FILES = ("FILE", "DIR", "RUN_DIR", "BASELINE", "CANDIDATE", "TRACE", "EXPERIMENT")


def give_types(parser: argparse.ArgumentParser) -> None:
    """Every value that `parser` takes is checked, also where a flag names no type of its own."""
    types: dict[Any, Callable[[str], Any]] = {
        int: whole(-(2**63), 2**63 - 1),
        float: real(),
        str: words,
    }
    for action in parser._actions:  # argparse has no public way to them
        if action.nargs != 0:
            kind = action.type or str
            action.type = file_name if kind is str and action.metavar in _FILES else types.get(kind, kind)


# --- Flags of more than one command -----------------------------------------------------------------------------------

count = whole(1, 10**9, "count")
port = whole(0, 65535, "port")
seed = whole(0, 2**63 - 1, "seed")


def add_experiment(parser: argparse.ArgumentParser, **settings: Any) -> None:
    """EXPERIMENT."""
    text = f"a TOML file, or a built-in one: {', '.join(builtin_names())}"
    parser.add_argument("experiment", metavar="EXPERIMENT", help=text, **settings)


def add_set(parser: argparse.ArgumentParser, example: str) -> None:
    """--set, with `example` in its help."""
    parser.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help=f"replaces one setting, such as {example}; may be repeated",
    )


def add_slo(parser: argparse.ArgumentParser) -> None:
    """--slo."""
    parser.add_argument(
        "--slo",
        action="append",
        default=[],
        metavar="KEY=LIMIT",
        help="a target of [slo], such as p99_ttft_ms=500 or error_pct=0.5; replaces one of the same key; repeatable",
    )


def add_metrics(parser: argparse.ArgumentParser) -> None:
    """--metrics."""
    parser.add_argument(
        "--metrics",
        default="",
        metavar="HOST:PORT",
        help="show run, arms and splitter to Prometheus here while it lasts, such as 127.0.0.1:9465 (default: nowhere)",
    )


def add_allow_different(parser: argparse.ArgumentParser) -> None:
    """--allow-different, for runs that are judged together."""
    parser.add_argument(
        "--allow-different",
        type=several(words),
        default=(),
        metavar="KEYS",
        help="settings in which joined runs may differ, such as gates.margin,versions.torch; the first run's count",
    )


def run_directory(text: str, command: str = "tailgate run") -> Path:
    """RUN_DIR, which is there; `command` is what writes such ones. Otherwise ConfigError."""
    if not Path(text).is_dir():
        what = "is a file" if Path(text).exists() else "does not exist"
        raise ConfigError(f'run directory "{text}" {what}: give a directory that `{command}` wrote')
    return Path(text)


LISTENER_TLS = {
    "tls_certificate": "serve TLS with this chain (PEM)",
    "tls_key": "the key of --tls-certificate (PEM)",
    "tls_client_ca": "let in only clients with a certificate of this authority (PEM)",
}


def add_listener_tls(parser: argparse.ArgumentParser) -> None:
    """--tls-certificate, --tls-key and --tls-client-ca."""
    for name, text in LISTENER_TLS.items():
        parser.add_argument(flag_of(name), metavar="FILE", help=text)


def listener_tls(options: argparse.Namespace) -> ServerTls | None:
    """What --tls-* say, checked."""
    return server_tls(*named(options, LISTENER_TLS))


def named(options: argparse.Namespace, names: Iterable[str]) -> list[str]:
    """The values of the flags `names`, "" for one that was not given. ConfigError for one that was given empty."""
    values = {flag_of(name): getattr(options, name) for name in names}
    check_named(values)
    return [value or "" for value in values.values()]


def flag_of(name: str) -> str:
    """The flag whose value is the option `name`."""
    return f"--{name.replace('_', '-')}"
