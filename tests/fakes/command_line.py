"""Command lines, parsed without running a command."""

from __future__ import annotations

from typing import Any

import typer

from tailgate.loadtests.commands.main import app, usage_error
from tailgate.servers.complaint import ConfigError

GROUP: Any = typer.main.get_command(app)


def parsed(name: str, *words: str) -> dict[str, Any]:
    """Return the options of `tailgate NAME WORDS`, by name. Raises ConfigError for bad usage."""
    if name not in GROUP.commands:
        raise ConfigError(f'"{name}" is no command')
    try:
        context = GROUP.commands[name].make_context(f"tailgate {name}", list(words))
    except typer.TyperException as error:
        raise ConfigError(usage_error(error, name)) from None
    return dict(context.params)
