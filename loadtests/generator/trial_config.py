"""What a run tells the load processes of one trial: generator.json, and end.json for an end before its time.

Imports neither gevent nor Locust.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from tailgate.analysis.records.documents import write_document, write_json
from tailgate.loadtests.external.addresses import parse_target
from tailgate.loadtests.external.arms import AnyExternalArm
from tailgate.loadtests.external.client_security import OPEN, SecurityConfig
from tailgate.servers.complaint import ConfigError
from tailgate.servers.config import Task
from tailgate.servers.fields import Listed, Settings, read

END_FILE = "end.json"


def write_end(folder: Path, *, at_ns: int | None, arms: Mapping[str, int]) -> None:
    """Write that of the trial in `folder` nothing is sent that is due at `at_ns` or later, to some arms earlier.

    Instants are in ns since the epoch.
    """
    write_document(folder / END_FILE, {"at_ns": at_ns, "arms": dict(arms)})


class TrialConfig(Settings):
    """How one trial is driven: generator.json. `task` is what every request asks for. `targets` maps an arm, or "*" for
    all others, to host:port.

    A target may be several addresses between commas: replicas, of which the one with the fewest requests in flight
    gets the next. `external` says of arms that are not tailgate's where they are and what they speak.

    Prompts are text that the `tokenizer` of that path or id counts; random ids if it is empty.
    """

    trial: int = 1
    task: Task = "generate"
    arms: Annotated[tuple[str, ...], Listed] = ()
    targets: Mapping[str, str] = {}
    external: Mapping[str, AnyExternalArm] = {}
    timeout_s: float = Field(default=60.0, ge=0.001, le=1e6)
    vocab_size: int = Field(default=256, ge=4, le=2**31 - 1)
    ignore_eos: bool = True
    tokenizer: str = ""
    security: SecurityConfig = OPEN

    @model_validator(mode="after")
    def _targets_are_known(self) -> Self:
        if not self.targets and not self.external:
            raise ValueError('targets is empty: give {"*": "host:port"} or one target for each arm')
        for target in self.targets.values():
            for address in target.split(","):
                parse_target(address)
        return self

    @classmethod
    def read(cls, path: Path) -> TrialConfig:
        """Return the trial that the JSON file at `path` describes. Raises ConfigError for anything wrong with it."""
        try:
            table = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f'trial config "{path}" cannot be read ({error}): give a JSON file') from None
        return read(cls, table, where="generator")

    def write(self, path: Path) -> None:
        write_json(path, self.to_dict(), indent=2)
