"""The environment of child processes: the shared clock, and no compiler cache that this process or its user filled."""

from __future__ import annotations

import os
from pathlib import Path

from servers.clock import anchored_environment

# Children find the packages here where nothing is installed, beside what this process was told to look through.
ROOT = Path(__file__).resolve().parent.parent

# The compiler sets the second itself once it has run, so a child would inherit a warm cache.
CACHE_VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def child_environment() -> dict[str, str]:
    """This process's environment for a child that chooses its own compiler cache."""
    kept = {key: value for key, value in os.environ.items() if key not in CACHE_VARIABLES}
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**kept, "PYTHONPATH": path, **anchored_environment()}
