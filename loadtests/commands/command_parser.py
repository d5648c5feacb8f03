"""The parser of a command: errors on one line, and help with examples."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from servers.fields import ConfigError


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
