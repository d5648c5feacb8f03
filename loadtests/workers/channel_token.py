"""The secret that the load processes of a run share: a process without it takes no part in the load."""

from __future__ import annotations

import os
from collections.abc import Mapping

from servers.complaint import ConfigError

TOKEN_VARIABLE = "TAILGATE_CHANNEL_TOKEN"
FEWEST_CHARACTERS = 16


def channel_token(what: str, *, environment: Mapping[str, str] = os.environ) -> str:
    """The secret in `environment`, which `what` needs. ConfigError, without it, where it is missing or too short."""
    token = environment.get(TOKEN_VARIABLE, "").strip()
    if not token:
        raise ConfigError(
            f"{what} needs a secret, so that no stranger takes a part of the load: export {TOKEN_VARIABLE}=... here "
            "and on the hosts of all workers, made with `openssl rand -hex 16`"
        )
    if len(token) < FEWEST_CHARACTERS:
        raise ConfigError(
            f"{TOKEN_VARIABLE} holds {len(token)} characters; the least is {FEWEST_CHARACTERS}: make one with "
            "`openssl rand -hex 16`"
        )
    return token
