"""`tailgate forecast`: what each compile policy will pay for a trace."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from analysis.statistics.exposure import ExposureError
from loadtests.commands.command_line import CommandParser, real, several, whole
from loadtests.commands.terminal_table import aligned
from loadtests.commands.trace_forecast import Forecast, forecast
from loadtests.experiments.config_errors import as_config_error
from loadtests.traffic.traces import KNOWN, read_trace
from servers import stdout

_MOST_TOKENS = 2**31 - 1
_FLAGS: tuple[tuple[str, Callable[[str], Any], Any, str, str], ...] = (
    ("--max-prompt-tokens", whole(0, _MOST_TOKENS), 0, "N", "leave longer prompts out (default: none)"),
    ("--graphs", whole(1, 1024), 8, "N", "steps of the best ladder (default %(default)s)"),
    ("--multiple", whole(1, _MOST_TOKENS), 1, "N", "its steps are multiples of this (default %(default)s)"),
    ("--ladder", several(whole(1, _MOST_TOKENS)), (), "LIST", "a ladder of your own to compare, such as 256,1024,4096"),
    ("--recompile-limit", whole(1, 100_000), 8, "N", "the compiler's (default %(default)s)"),
    ("--compile-seconds", real(0, 86_400), 0.0, "S", "what one compile takes, for the stalls"),
)


def add_arguments(parser: CommandParser) -> None:
    """`parser` reads the command line of `tailgate forecast`."""
    parser.describe(
        "How often a prompt length that never came will arrive, how many graphs and compiles each policy needs,\n"
        "what it pads, and the ladder of buckets that pads least. Nothing is run.",
        "  tailgate forecast AzureLLMInferenceTrace_conv.csv --max-prompt-tokens 8192\n"
        "  tailgate forecast conv.csv --graphs 6 --multiple 64 --compile-seconds 20\n"
        "  tailgate forecast conv.csv --ladder 256,1024,4096",
    )
    parser.add_argument("trace", metavar="TRACE", help=KNOWN)
    parser.add_argument("--time-unit", choices=("s", "ms"), default="", help="of JSON Lines that do not show it")
    for flag, kind, default, metavar, text in _FLAGS:
        parser.add_argument(flag, type=kind, default=default, metavar=metavar, help=text)


def main(options: argparse.Namespace) -> int:
    """Says what the trace will do; the exit code."""
    given = {item.name: getattr(options, item.name) for item in fields(Forecast) if item.name != "compile_s"}
    settings = Forecast(compile_s=options.compile_seconds, **given)
    with as_config_error(ExposureError):
        figures = forecast(read_trace(options.trace, blocks=False, time_unit=options.time_unit), settings)
    stdout.write(forecast_text(figures), figures, as_json=options.json)
    return 0


def forecast_text(figures: dict[str, Any]) -> str:
    """The forecast for people."""
    trace = figures["trace"]
    tokens = trace["prompt_tokens"]
    lines = [
        trace["account"],
        f"prompt tokens p50 {tokens['p50']:,.0f}, p90 {tokens['p90']:,.0f}, p99 {tokens['p99']:,.0f}, max "
        f"{tokens['max']:,}",
    ]
    if trace["too_long"]:
        lines.append(f"{trace['too_long']:,} longer than {trace['max_prompt_tokens']:,} tokens are left out")
    seen = figures["lengths"]
    growth = ", ".join(f"{count:,} after {int(mark):,}" for mark, count in seen["after"].items())
    hourly = seen["new_per_hour"]
    lines += [
        "",
        f"never-seen prompt length: {growth}{', ' if growth else ''}{seen['distinct']:,} after all {seen['steps']:,} "
        "steps",
        f"  new share: {seen['first_tenth_new_share']:.1%} of the first tenth, {seen['last_tenth_new_share']:.1%} of "
        f"the last; the next one is new with {seen['next_is_new']:.1%}"
        + (f", {hourly:,.0f} an hour" if hourly is not None else ""),
    ]
    rows = [["prefill policy", "graphs before", "compiles serving", "padded/true", ""]]
    seconds = any(row["warm_up_s"] is not None for row in figures["policies"])
    if seconds:
        rows[0][3:3] = ["warm-up", "stalled"]
    for row in figures["policies"]:
        cells = [
            row["policy"],
            f"{row['graphs_before_serving']:,}",
            f"{row['compiles_while_serving']:,}",
            f"{row['padded_over_true']:.2f} ×",
            row["note"],
        ]
        if seconds:
            cells[3:3] = [f"{row['warm_up_s']:,.0f} s", f"{row['stalled_s']:,.0f} s"]
        rows.append(cells)
    return "\n".join([*lines, "", *aligned(rows)])
