"""What the programs of an arm have in common: how they read it, log, keep compiled code and end."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

from servers.complaint import fault, one_line
from servers.config import ArmConfig
from servers.fields import ConfigError


def read_arm(path: str) -> ArmConfig:
    """The arm in the JSON file that --config names. Raises ConfigError."""
    try:
        table = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--config {path} cannot be read: {error}") from None
    return ArmConfig.from_dict(table)


def log_to_stderr(level: int = logging.INFO) -> None:
    """Lines from `level` on have a time and the name of who wrote them."""
    logging.basicConfig(level=level, format="%(asctime)s %(name)s %(levelname)s %(message)s")


def compile_cache(folder: str) -> AbstractContextManager[str]:
    """Where compiled code is kept: in `folder`, or in a fresh one that is gone afterwards.

    A cold cache is the honest default: a replica with last week's artifacts would hide what a rollout costs.
    """
    return nullcontext(folder) if folder else TemporaryDirectory(prefix="tailgate-compile-", ignore_cleanup_errors=True)


def exit_code(work: Callable[[], int]) -> int:
    """What `work` returns; 2 when it cannot be configured so and 1 when it broke, each with one line on stderr."""
    try:
        return work()
    except ConfigError as error:
        print(f"tailgate: {one_line(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("tailgate: interrupted", file=sys.stderr)
        return 1
    except Exception as error:
        print(f"tailgate: {one_line(fault(error))}", file=sys.stderr)
        return 1
