"""Which shapes of an arm find their graph ready, and which graphs there are.

`python -m servers.inspect --config ARM.json --shapes "prefill 1x128, decode 8@512"` loads and warms the arm as it would
be served, runs each shape as a step of the engine, and prints what the compiler did. No port is opened and no traffic
is needed. Exit codes: 0 no shape makes the compiler run, 99 some do, 2 cannot be configured so.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
from collections.abc import Sequence

from rich.console import Console

from servers import stdout
from servers.inspect.display import show
from servers.inspect.inspection import inspect_arm
from servers.inspect.listed_shapes import NOTATION, parse_shapes
from servers.program import compile_cache, exit_code, isolate_compiler, log_to_stderr, on_its_card_alone, read_arm


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m servers.inspect", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", required=True, help="the arm as JSON (ArmConfig.to_dict())")
    parser.add_argument("--shapes", default="", help=f"shapes to run, separated by commas: {NOTATION[6:]}")
    parser.add_argument("--cache-dir", default="", help="keep compiled code here (default: nowhere)")
    parser.add_argument("--json", action="store_true", help="print one JSON object alone")
    options = parser.parse_args(arguments)
    return exit_code(lambda: _inspect(options))


def _inspect(options: argparse.Namespace) -> int:
    log_to_stderr(logging.WARNING)
    with compile_cache(options.cache_dir) as cache:
        arm = on_its_card_alone(read_arm(options.config), os.environ)
        isolate_compiler(os.environ, cache)
        shapes = parse_shapes(options.shapes, arm) if options.shapes.strip() else []
        inspection = inspect_arm(arm, shapes, report=lambda line: print(line, file=sys.stderr, flush=True))
    with contextlib.suppress(BrokenPipeError):
        # A pipe has no width of its own: enough for the tables to stand in one line each.
        console = Console(width=None if stdout.is_terminal() else 160, highlight=False, emoji=False)
        with console.capture() as captured:
            show(inspection, console)
        words = "\n".join(line.rstrip() for line in captured.get().splitlines())
        stdout.write(words, inspection.to_dict(), as_json=options.json)
    return inspection.exit_code


if __name__ == "__main__":
    sys.exit(main())
