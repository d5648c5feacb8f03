"""The environment of a trial's processes."""

from __future__ import annotations

import os

from loadtests.workers.channel_token import TOKEN_VARIABLE
from servers.clock import anchored_environment


def child_environment() -> dict[str, str]:
    """This process's environment with the shared clock, and without what is meant for Locust."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("LOCUST_") and key != TOKEN_VARIABLE}
    return {**kept, **anchored_environment()}
