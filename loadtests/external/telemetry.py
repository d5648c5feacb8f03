"""The logs of an external arm's server, and where they are."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from servers.fields import ConfigError, build

LogFormat = Literal["auto", "vllm", "torch", "sglang"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryConfig:
    """Of each kind none, one for the whole arm, or one for each of its addresses, in their order.

    `log` are files on this host; `log_command` are programs that print
    new lines of the log on stdout for as long as they run. `log_format` says whose lines are looked for, "auto" all.
    """

    log: tuple[str, ...] = ()
    log_command: tuple[tuple[str, ...], ...] = ()
    log_format: LogFormat = "auto"

    def __post_init__(self) -> None:
        if self.log and self.log_command:
            raise ConfigError("log and log_command are both set: keep the one that shows the server's lines")
        if not all(self.log):
            raise ConfigError("log is empty: give the file's path, or leave it out")
        if not all(command and all(command) for command in self.log_command):
            raise ConfigError('log_command is empty: give a program and its arguments, such as ["tail", "-F", "x.log"]')
        if self.log_format != "auto" and not self.logs:
            raise ConfigError(f'log_format is "{self.log_format}" but there is neither log nor log_command: give one')
        if len(set(self.log)) < len(self.log):
            raise ConfigError("log names one file twice: each replica has its own")

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

    def check_replicas(self, replicas: int) -> None:
        """There is one for each of `replicas`, or one for all. Otherwise ConfigError."""
        for key in ("log", "log_command"):
            count = len(getattr(self, key))
            if count not in (0, 1, replicas):
                raise ConfigError(
                    f"telemetry.{key} has {count} and address {replicas}: give one for each address, or one for all"
                )


SILENT = TelemetryConfig()


def telemetry_from_table(table: Any, *, where: str) -> TelemetryConfig:
    """What [arms.telemetry] says. One file or command needs no list around it."""
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where} is {table!r}: give a table [arms.telemetry]")
    settings = dict(table)
    if isinstance(settings.get("log"), str):
        settings["log"] = [settings["log"]]
    command = settings.get("log_command")
    if isinstance(command, str):
        raise ConfigError(f'{where}.log_command is {command!r}: give a list, such as ["kubectl", "logs", "-f", "pod"]')
    if isinstance(command, (list, tuple)) and all(isinstance(word, str) for word in command):
        settings["log_command"] = [command] if command else []
    try:
        return build(TelemetryConfig, settings, where=where)
    except ConfigError as error:
        text = str(error)
        raise ConfigError(text if text.startswith(where) else f"{where}.{text}") from None


def telemetry_table(telemetry: TelemetryConfig) -> dict[str, Any]:
    """The table that `telemetry_from_table` reads back to an equal setting; empty for a server that tells nothing."""
    lists = {
        "log": list(telemetry.log),
        "log_command": [list(command) for command in telemetry.log_command],
    }
    given = {key: value for key, value in lists.items() if value}
    return {**given, **({"log_format": telemetry.log_format} if telemetry.logs else {})}
