"""What starts Locust, what goes over its channel between master and workers, and the secret of that channel."""

from __future__ import annotations

import sys
from pathlib import Path

from tailgate.servers.complaint import ConfigError
from tailgate.servers.security import secret_in

# Master to worker: its part of the trial; the start; the instant from which nothing is sent, to all arms or some; stop.
ASSIGN, START, END, STOP = (f"tailgate_{name}" for name in ("assign", "start", "end", "stop"))
# Worker to master.
READY, DONE = "tailgate_ready", "tailgate_done"
# Only with workers on other hosts. Worker to master: its account, and a piece of its records. Master to worker: how
# much of them is written. Both ways: the comparison of clocks.
ACCOUNT, FILE, HAVE, CLOCK = (f"tailgate_{name}" for name in ("account", "file", "have", "clock"))

PROTOCOL = 9  # of all these messages: raise it with any change that an older worker would misread

TOKEN_VARIABLE = "TAILGATE_CHANNEL_TOKEN"


def locust(locustfile: str = "chat") -> list[str]:
    """Return the command line of Locust with one of tailgate's locustfiles, for its options to follow."""
    path = Path(__file__).resolve().parents[1] / f"{locustfile}.py"
    # -P: a directory called `locust` where the user stands must not be imported instead.
    return [sys.executable, "-P", "-m", "locust", "-f", str(path)]


def channel_token(what: str) -> str:
    """Return the secret, which `what` needs. Raises ConfigError where it is missing or of no use."""
    if token := secret_in(TOKEN_VARIABLE):
        return token
    raise ConfigError(
        f"{what} needs a secret, so that only your workers take part in the load: export {TOKEN_VARIABLE}=... here "
        "and on the hosts of all workers, made with `openssl rand -hex 16`"
    )
