"""Options that several commands share, and parsers that refuse a value with its limit and a remedy."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from tailgate.loadtests.experiments.files import builtin_names
from tailgate.loadtests.experiments.toml_limits import check_path
from tailgate.servers.complaint import ConfigError, span_s

MOST_CHARACTERS = 1 << 16
LARGEST_SEED = 2**63 - 1
_LONGEST_S = 7 * 86_400.0


# --- Parsers of values ------------------------------------------------------------------------------------------------


def check_words(words: list[str]) -> None:
    """Refuse a word of a command line that holds a NUL character or is longer than MOST_CHARACTERS."""
    for word in words:
        if "\0" in word:
            raise ConfigError(f"{word[:40]!r} holds a NUL character: remove it")
        if len(word) > MOST_CHARACTERS:
            raise ConfigError(f"{word[:40]!r}... has {len(word)} characters; the limit is {MOST_CHARACTERS}")


def whole(low: int, high: int, what: str = "number") -> Callable[[str | int], int]:
    """Return a parser of whole numbers from `low` to `high`. It also gets the default."""

    def parse(text: str | int) -> int:
        digits = str(text).removeprefix("-")
        if digits.isascii() and digits.isdecimal() and len(digits) <= 20 and low <= int(text) <= high:
            return int(text)
        raise typer.BadParameter(f"{text!r} is no {what}: give a whole number from {low} to {high}")

    return parse


def file_name(text: str) -> str:
    """Return a path that a file can have, or "" where the option allows none."""
    try:
        return check_path(text, "the path")
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None


def duration(text: str) -> float:
    """Return the seconds of a length of time such as "90s", "60m" or "1.5h"; a bare number is seconds."""
    value = span_s(text)
    if value is None or value > _LONGEST_S:
        raise typer.BadParameter(f"{text!r} is no length of time: give 90s, 60m or 1.5h, a week at most")
    return value


def run_directory(text: str, command: str = "tailgate run") -> Path:
    """Return the run directory `text`. Raises ConfigError where there is none; `command` is what writes such ones."""
    if not Path(text).is_dir():
        what = "is a file" if Path(text).exists() else "does not exist"
        raise ConfigError(f'run directory "{text}" {what}: give a directory that `{command}` wrote')
    return Path(text)


# --- Shared arguments and options -------------------------------------------------------------------------------------


def set_option(example: str) -> Any:
    """Return --set, with `example` in its help."""
    text = f"Replace one setting, such as {example}. Repeatable."
    return typer.Option("--set", metavar="KEY=VALUE", help=text)


def experiments(incomplete: str) -> list[str]:
    """Return the built-in experiments, files and folders that a shell completes the word with."""
    folder, _, start = incomplete.rpartition("/")
    paths: list[Path] = []
    with suppress(OSError):
        paths = sorted(path for path in Path(f"{folder}/" if "/" in incomplete else ".").iterdir())
    paths = [path for path in paths if path.name.startswith(start) and (path.suffix == ".toml" or path.is_dir())]
    names = [name for name in builtin_names() if name.startswith(incomplete)]
    return [*names, *(f"{path}/" if path.is_dir() else str(path) for path in paths)]


def _experiment(metavar: str) -> Any:
    text = f"A TOML file, or a built-in one: {', '.join(builtin_names())}."
    return typer.Argument(metavar=metavar, help=text, parser=file_name, autocompletion=experiments)


ExperimentName = Annotated[str, _experiment("EXPERIMENT")]
OptionalExperiment = Annotated[str, _experiment("[EXPERIMENT]")]
Out = Annotated[str, typer.Option(metavar="DIR", help="Folder for run directories.", parser=file_name)]
Seed = Annotated[
    int | None,
    typer.Option(metavar="N", parser=whole(0, LARGEST_SEED, "seed"), help="Replaces the experiment's seed."),
]
TraceFile = Annotated[
    str, typer.Option("--trace", metavar="FILE", help="Replay times and lengths of this trace.", parser=file_name)
]
AtMost = Annotated[
    float | None,
    typer.Option(metavar="TIME", help="End the traffic of all trials by then, such as 60m or 2h.", parser=duration),
]
Duration = Annotated[
    float | None,
    typer.Option(
        metavar="TIME",
        help="Send traffic for so long in each trial, such as 90s or 20m; replaces traffic.duration_s.",
        parser=duration,
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress: only the result and errors.")]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Print progress as lines, and all that the run's processes log.")
]
Slo = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=LIMIT",
        help="A target of [slo], such as p99_ttft_ms=500 or error_pct=0.5; replaces one of the same key. Repeatable.",
    ),
]
Page = Annotated[
    str,
    typer.Option(
        metavar="PORT", help="Port of this machine at which to serve the live page, 0 for a free one, or off."
    ),
]
Metrics = Annotated[
    str,
    typer.Option(
        metavar="HOST:PORT",
        help="Export run, arms and splitter to Prometheus here while the run lasts, such as 127.0.0.1:9465.",
    ),
]
AllowDifferent = Annotated[
    str | None,
    typer.Option(
        metavar="KEYS",
        help="Settings in which joined runs may differ, such as gates.margin,versions.torch. The first run's count.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of words.")]
WholeJson = Annotated[bool, typer.Option("--json", help="Print summary.json on one line instead of the table.")]


def port_option(text: str) -> Any:
    """Return the option of a port, with `text` as its help."""
    return typer.Option(metavar="PORT", parser=whole(0, 65535, "port"), help=text)


Port = Annotated[int, port_option("Port to listen on; 0 takes a free one.")]


def verbosity(quiet: bool, verbose: bool) -> int:
    """Return -1, 0 or 1 for --quiet, neither and --verbose. Raises ConfigError for both."""
    if quiet and verbose:
        raise ConfigError("--quiet and --verbose are both given: leave one out")
    return int(verbose) - int(quiet)


def split_keys(text: str | None) -> tuple[str, ...]:
    """Return the keys of --allow-different. Raises ConfigError for an empty one."""
    keys = () if text is None else tuple(key.strip() for key in text.split(","))
    if "" in keys:
        raise ConfigError("--allow-different holds an empty key: give settings with commas between, or leave it out")
    return keys
