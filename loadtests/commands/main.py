"""The console script `tailgate`.

Each command is a module of this package. It imports at its top only what its options need, so that --help is quick.

Exit codes of run, parity, analyze and compare: 0 PASS, 3 INCONCLUSIVE, 99 FAIL, 2 bad usage or configuration, 1 the run
itself broke or was interrupted. Results go to stdout, as `servers.stdout` says: words for a person at a terminal,
one JSON object as the last line for a program. Progress goes to stderr.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Annotated

import typer

from tailgate.loadtests.commands import (
    analyze,
    compare,
    frontier,
    inspect,
    locust,
    parity,
    precompile,
    ramp,
    run,
    serve,
    split,
    worker,
)
from tailgate.loadtests.commands.exits import EXIT_BROKE, EXIT_USAGE, complain
from tailgate.loadtests.commands.options import check_words
from tailgate.servers.complaint import ConfigError, fault, not_installed

COMMANDS = {
    "run": run,
    "ramp": ramp,
    "frontier": frontier,
    "parity": parity,
    "inspect": inspect,
    "serve": serve,
    "precompile": precompile,
    "split": split,
    "locust": locust,
    "worker": worker,
    "analyze": analyze,
    "compare": compare,
}
_EXAMPLES = """\
  tailgate run demo                       three arms on this CPU, a minute of traffic, a verdict
  tailgate run canary.toml --trace conv.csv
  tailgate frontier demo                  which policy to ship at which load, in ten minutes
  tailgate parity demo                    do the arms compute the same?
  tailgate inspect --arm compiled-naive   what will recompile, before any load
  tailgate analyze runs/20260101T120000Z-canary
  tailgate compare baselines/main runs/20260108T120000Z-canary"""


_CTRL_C = 130  # what Typer makes of KeyboardInterrupt


def _epilog(examples: str) -> str:
    return f"\b\nexamples:\n{examples}"  # \b: keep the lines


app = typer.Typer(
    name="tailgate",
    help="May this compiled model server replace the eager one, under our traffic, within our SLA?",
    epilog=_epilog(_EXAMPLES),
    context_settings={"max_content_width": 110},
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
for _name, _module in COMMANDS.items():
    _settings = getattr(_module, "SETTINGS", None)
    app.command(_name, epilog=_epilog(_module.EXAMPLES), context_settings=_settings)(_module.command)


def _show_version(requested: bool) -> None:
    if requested:
        try:
            version = metadata.version("tailgate")
        except metadata.PackageNotFoundError:
            version = "of a folder that is not installed"
        typer.echo(f"tailgate {version}")
        raise typer.Exit


@app.callback()
def _tailgate(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None, *, arm_command: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code. `arm_command` replaces what starts an arm, for tests."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a name that the terminal cannot show must not raise
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        check_words(words)
        group = typer.main.get_command(app)
        code = group.main(words, prog_name="tailgate", standalone_mode=False, obj=arm_command)
        if sys.stdout is not None:  # it is None where the caller closed it
            sys.stdout.flush()
        return complain("interrupted", EXIT_BROKE) if code == _CTRL_C else int(code or 0)
    except ConfigError as error:
        return complain(str(error), EXIT_USAGE)
    except KeyboardInterrupt:  # while the command line is read
        return complain("interrupted", EXIT_BROKE)
    except typer.TyperException as error:
        return complain(usage_error(error), EXIT_USAGE)
    except ModuleNotFoundError as error:
        if missing := not_installed(error.name or ""):
            return complain(missing, EXIT_USAGE)
        return complain(fault(error), EXIT_BROKE)
    except BrokenPipeError:
        # The reader of stdout is gone (`tailgate ... | head`): nothing more can be shown.
        _leave_stdout()
        return EXIT_BROKE
    except Exception as error:
        if isinstance(error, OSError):
            _leave_stdout()
        return complain(fault(error), EXIT_BROKE)


def usage_error(error: typer.TyperException) -> str:
    """Return what is wrong with the command line, and where to read about it."""
    context = getattr(error, "ctx", None)
    where = "tailgate" if context is None else context.command_path
    message = getattr(error, "format_message", error.__str__)()
    return f"{message.rstrip('.')}: see `{where} --help`"


def _leave_stdout() -> None:
    """Drop what stdout still holds, so that the end of the process does not write it again."""
    sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115


if __name__ == "__main__":
    sys.exit(main())
