"""The console script `tailgate`.

Each command is a module of this package. It imports at its top only what its options need, so that --help is quick.
Results go to stdout: words, or one JSON object with --json. Progress goes to stderr.
"""

from __future__ import annotations

import errno
import io
import os
import re
import shlex
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from tailgate.analysis.wording import listed
from tailgate.loadtests.commands import (
    analyze,
    check,
    compare,
    doctor,
    frontier,
    init,
    inspect,
    list_experiments,
    locust,
    open_report,
    parity,
    precompile,
    ramp,
    run,
    serve,
    split,
    worker,
)
from tailgate.loadtests.commands.exits import EXIT_BROKE, EXIT_USAGE, complain
from tailgate.servers.complaint import ConfigError, fault, not_installed

GROUPS: dict[str, dict[str, Any]] = {
    "Start here": {
        "init": init,
        "check": check,
        "doctor": doctor,
        "list": list_experiments,
        "run": run,
        "open": open_report,
    },
    "Measure": {"ramp": ramp, "frontier": frontier, "parity": parity, "inspect": inspect},
    "Judge": {"analyze": analyze, "compare": compare},
    "Serve by hand": {"serve": serve, "split": split, "precompile": precompile, "locust": locust, "worker": worker},
}
COMMANDS: dict[str, Any] = {name: module for group in GROUPS.values() for name, module in group.items()}
_EXAMPLES = """\
  tailgate run demo          three arms on this CPU, a minute of traffic, a verdict
  tailgate open              its report in the browser
  tailgate init my.toml      an experiment for your model: three questions
  tailgate check my.toml     what its run will do, how long it takes, what it can decide
  tailgate run my.toml"""


_LONGEST = max(map(len, COMMANDS))
_CTRL_C = 130  # what Typer makes of KeyboardInterrupt


def _epilog(examples: str) -> str:
    return f"\b\nexamples:\n{examples}"  # \b: keep the lines


class _Grouped(TyperGroup):
    """The commands under the headings of GROUPS."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for heading, names in GROUPS.items():
            with formatter.section(heading):
                rows = [(name.ljust(_LONGEST), self.commands[name].get_short_help_str(90)) for name in names]
                formatter.write_dl(rows)


app = typer.Typer(
    name="tailgate",
    cls=_Grouped,
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
        typer.echo(f"tailgate {metadata.version('tailgate')}")
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
    words = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    try:
        group = typer.main.get_command(app)
        code = group.main(words, prog_name="tailgate", standalone_mode=False, obj=arm_command)
        if sys.stdout is not None:  # it is None where the caller closed it
            sys.stdout.flush()
        return complain("interrupted", EXIT_BROKE) if code == _CTRL_C else int(code or 0)
    except ConfigError as error:
        return complain(str(error), EXIT_USAGE)
    except (KeyboardInterrupt, typer.Abort):  # while the command line is read, or a question is asked
        return complain("interrupted", EXIT_BROKE)
    except typer.TyperException as error:
        return complain(usage_error(error, words[0]), EXIT_USAGE)
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
            if error.errno == errno.ENAMETOOLONG:
                return complain(f"{error}: give a shorter path", EXIT_USAGE)
            _leave_stdout()
        return complain(fault(error), EXIT_BROKE)


def usage_error(error: typer.TyperException, command: str = "") -> str:
    """Return what is wrong with the line of a command, and where to read about it."""
    context = getattr(error, "ctx", None)
    where = f"tailgate {command}" if command in COMMANDS else "tailgate"
    message = getattr(error, "format_message", error.__str__)()
    message = message.rstrip(".").replace("Value error, ", "")
    if context and (found := re.match(r"Missing argument|Got unexpected extra argument\(s\) \((.*)\)$", message)):
        return _wrong_arguments(context, where, found[1] or "")
    if invalid := re.match(r"Invalid value for '([\w-]+)': ", message):  # names the limit and the remedy
        return f"{invalid[1]} {message.removeprefix(invalid[0])}"
    option = re.match(r"No such option: --([a-z0-9_-]+)", message)
    if option and context and any(parameter.name == "settings" for parameter in context.command.params):
        from tailgate.loadtests.experiments.model import Experiment
        from tailgate.servers.fields import key_paths

        paths = key_paths(Experiment)
        if path := {**paths, "model": "model.id"}.get(option[1].replace("-", "_")):
            is_table = path == "slo" or any(other.startswith(f"{path}.") for other in paths.values())
            return f"{option[0]}: write --set {path}{'.KEY' * is_table}=VALUE"
    return f"{message}{'' if message.endswith('?') else ':'} see `{where} --help`"


def _wrong_arguments(context: Any, where: str, extra: str) -> str:
    """Return what arguments the command takes, what it got, of which `extra` are too many, and what to type."""
    arguments = [one for one in context.command.params if one.param_type_name == "argument"]
    names = [(one.metavar or "").strip("[]") for one in arguments]
    given = [str(value) for one in arguments if (value := context.params.get(one.name))]
    takes = listed([f"{'one ' * (one.nargs == 1)}{name}" for one, name in zip(arguments, names, strict=True)])
    got = listed([*given, *filter(None, (extra,))])
    line = " ".join([where, *map(shlex.quote, given), *names[len(given) :]])
    example = "" if extra else f", for example `{COMMANDS[where.split()[1]].EXAMPLES.splitlines()[0].strip()}`"
    return f"{where} takes {takes or 'no argument'} and got {got or 'none'}: type `{line}`{example}"


def _leave_stdout() -> None:
    """Drop what stdout still holds, so that the end of the process does not write it again."""
    sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115


if __name__ == "__main__":
    sys.exit(main())
