"""The logs of an external arm's server, and where they are."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, model_validator

from servers.complaint import ConfigError
from servers.fields import Listed, Settings


def as_list(value: Any) -> Any:
    """Return a single text as a list of it."""
    return [value] if isinstance(value, str) else value


def _commands(value: Any) -> Any:
    """Return a single command as a list of it. A text is refused: nothing here is a shell."""
    is_one = isinstance(value, list | tuple) and value and all(isinstance(word, str) for word in value)
    return [value] if is_one else value


class TelemetryConfig(Settings):
    """Of each kind none, one for the whole arm, or one for each of its addresses, in their order.

    `log` are files on this host; `log_command` are programs that print
    new lines of the log on stdout for as long as they run.
    """

    log: Annotated[tuple[str, ...], BeforeValidator(as_list, json_schema_input_type=str | list[str]), Listed] = ()
    log_command: Annotated[
        tuple[Annotated[tuple[str, ...], Listed], ...],
        BeforeValidator(_commands, json_schema_input_type=list[str] | list[list[str]]),
        Listed,
    ] = ()

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.log and self.log_command:
            raise ValueError("log and log_command are both set: keep the one that shows the server's lines")
        if not all(self.log):
            raise ValueError("log is empty: give the file's path, or leave it out")
        if not all(command and all(command) for command in self.log_command):
            raise ValueError('log_command is empty: give a program and its arguments, such as ["tail", "-F", "x.log"]')
        if len(set(self.log)) < len(self.log):
            raise ValueError("log names one file twice: each replica has its own")
        return self

    @property
    def logs(self) -> tuple[str | tuple[str, ...], ...]:
        """Each log that is followed: a path, or a command."""
        return self.log or self.log_command

    def check(self) -> None:
        """The files and programs are there. Otherwise ConfigError."""
        for path in self.log:
            if not Path(path).is_file():
                raise ConfigError(f'telemetry.log "{path}" is no file: give the one that the server writes')
        for program, *_ in self.log_command:
            if shutil.which(program) is None:
                raise ConfigError(f'telemetry.log_command "{program}" is no program here: install it, or give its path')
