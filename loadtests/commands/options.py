"""Arguments and options that several commands share."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from tailgate.loadtests.experiments.files import builtin_names
from tailgate.servers.address import LOWEST_PORT
from tailgate.servers.complaint import ConfigError

T = TypeVar("T", int, float)
_UNITS_S = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_LONGEST_S = 7 * 86_400.0


def number(kind: Callable[[str], T], low: float, high: float) -> Callable[[str], T]:
    """Return a parser of numbers of that kind from `low` to `high`."""

    def parse(text: str) -> T:
        with suppress(ValueError):
            if low <= (value := kind(text)) <= high:
                return value
        raise typer.BadParameter(f'is "{text}": give a number from {low:,.10g} to {high:,.10g}')

    return parse


def duration(text: str, low_s: float = 0.001, high_s: float = _LONGEST_S) -> float:
    """Return the seconds of a length of time such as "90s", "60m" or "1.5h", from `low_s` to `high_s`."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*(|s|m|min|h)", text.strip())
    if match and not match[2]:
        raise typer.BadParameter(f'is "{text}" without a unit: give {match[1]}s, {match[1]}m or {match[1]}h')
    value = float(match[1]) * _UNITS_S[match[2]] if match else -1.0
    if not low_s <= value <= high_s:
        longest = f"{high_s / 3600:g}h" if high_s >= 3600 else f"{high_s / 60:g}m"
        raise typer.BadParameter(f'is "{text}": give a time such as 90s, 5m or 1.5h, up to {longest}')
    return value


def port(text: str, words: str = "0") -> int:
    """Return the port, or 0; `words` name what else the option takes."""
    with suppress(ValueError):
        if (value := int(text)) == 0 or LOWEST_PORT <= value <= 65535:
            return value
    raise typer.BadParameter(f'is "{text}": give {words}, or a port from {LOWEST_PORT} to 65535')


def run_directory(text: str) -> Path:
    """Return the run directory `text`. Raises ConfigError where there is none."""
    path = Path(text)
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        newest = _newest(path.parent, path.name)
        raise ConfigError(f'run directory "{text}" {what}: {newest}give a directory that `tailgate run` wrote')
    if not any((path / name).exists() for name in ("experiment.toml", "runs.json")):
        if newest := _newest(path):
            raise ConfigError(f'run directory "{text}" holds several runs: {newest}give one of them')
        if not any(file.name.startswith(("requests", "trial", "report")) for file in path.iterdir()):
            raise ConfigError(f'run directory "{text}" holds no run: give a directory that `tailgate run` wrote')
    return path


def _newest(folder: Path, name: str = "") -> str:
    """Return "did you mean RUN? " with the newest run in the folder whose name ends with `name`; empty without one."""
    runs = sorted(path.parent for path in folder.glob("*/experiment.toml") if path.parent.name.endswith(name))
    return f"did you mean {runs[-1]}? " if runs else ""


def set_option(example: str) -> Any:
    """Return --set, with `example` in its help."""
    text = f"Replace one setting, such as {example}. Repeatable."
    return typer.Option("--set", metavar="KEY=VALUE", help=text)


def _experiment(metavar: str) -> Any:
    return typer.Argument(metavar=metavar, help=f"A TOML file, or a built-in one: {', '.join(builtin_names())}.")


# Paths, so that a shell completes the names of files.
ExperimentName = Annotated[Path, _experiment("EXPERIMENT")]
OptionalExperiment = Annotated[Path | None, _experiment("[EXPERIMENT]")]
Out = Annotated[str, typer.Option(metavar="DIR", help="Folder for run directories.")]
TraceFile = Annotated[str, typer.Option("--trace", metavar="FILE", help="Replay times and lengths of this trace.")]
AtMost = Annotated[
    float | None,
    typer.Option(metavar="TIME", help="Longest traffic of all trials together, such as 60m or 2h.", parser=duration),
]
Duration = Annotated[
    float | None,
    typer.Option(
        metavar="TIME",
        help="Length of the traffic in each trial, such as 90s or 20m; replaces traffic.duration_s.",
        parser=duration,
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress: only the result and errors.")]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Print progress as lines, and everything that the run's processes log.")
]
Slo = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=LIMIT",
        help="A target of [slo], such as p99_ttft_ms=500 or error_pct=0.5; replaces one of the same key. Repeatable.",
    ),
]
Page = Annotated[
    int | None,
    typer.Option(
        metavar="PORT",
        parser=lambda text: None if text == "off" else port(text, "off, 0 for a free one"),
        help="Port of the live page on this machine; 0 for a free one, off for none.",
    ),
]
Metrics = Annotated[
    str,
    typer.Option(
        metavar="HOST:PORT",
        help="Serve the metrics of run, arms and splitter to Prometheus here, such as at 127.0.0.1:9465.",
    ),
]
AllowDifferent = Annotated[
    str | None,
    typer.Option(
        metavar="KEYS",
        help="Settings in which joined runs may differ, such as gates.margin,versions.torch. The first run's apply.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of words.")]
WholeJson = Annotated[bool, typer.Option("--json", help="Print summary.json on one line instead of the table.")]


def port_option(text: str) -> Any:
    """Return the option of a port, with `text` as its help."""
    return typer.Option(metavar="PORT", parser=port, help=text)


Port = Annotated[int, port_option("Port to listen on; 0 takes a free one.")]


def split_keys(text: str | None) -> tuple[str, ...]:
    """Return the keys of --allow-different. Raises ConfigError for an empty one."""
    keys = () if text is None else tuple(key.strip() for key in text.split(","))
    if "" in keys:
        raise ConfigError("--allow-different holds an empty key: give settings with commas between, or leave it out")
    return keys
