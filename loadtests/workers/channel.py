"""What goes over Locust's channel between master and workers, and the secret without which nothing does."""

from __future__ import annotations

import os
from collections.abc import Mapping

from tailgate.servers.complaint import ConfigError

# Master to worker: its part of the trial; the start; the instant from which nothing is sent, to all arms or some; stop.
ASSIGN, START, END, STOP = (f"tailgate_{name}" for name in ("assign", "start", "end", "stop"))
# Worker to master.
READY, DONE = "tailgate_ready", "tailgate_done"
# Only with workers on other hosts. Worker to master: its account, and a piece of its records. Master to worker: how
# much of them is written. Both ways: the comparison of clocks.
ACCOUNT, FILE, HAVE, CLOCK = (f"tailgate_{name}" for name in ("account", "file", "have", "clock"))

PROTOCOL = 8  # of all these messages: raise it with any change that an older worker would misread

TOKEN_VARIABLE = "TAILGATE_CHANNEL_TOKEN"
FEWEST_CHARACTERS = 16


def channel_token(what: str, *, environment: Mapping[str, str] = os.environ) -> str:
    """Return the secret in `environment`, which `what` needs. Raises ConfigError, without it, where it is missing or
    too short."""
    token = environment.get(TOKEN_VARIABLE, "").strip()
    if not token:
        raise ConfigError(
            f"{what} needs a secret, so that only your workers take part in the load: export {TOKEN_VARIABLE}=... here "
            "and on the hosts of all workers, made with `openssl rand -hex 16`"
        )
    if len(token) < FEWEST_CHARACTERS:
        raise ConfigError(
            f"{TOKEN_VARIABLE} holds {len(token)} characters; the least is {FEWEST_CHARACTERS}: make one with "
            "`openssl rand -hex 16`"
        )
    return token
