"""The locustfile: chat traffic over gRPC, open loop.

By hand, against a running `tailgate split` or one arm's server:

    locust -f loadtests/chat.py --host localhost:50051 --headless -u 4 -r 4 -t 60s

Each User is one Poisson source of --request-rate requests/s, which waits for no answer. docs/how-to/locust.md describes
Locust's statistics. With --trial Users do nothing: each load process dispatches its share of a run's schedule.
"""

from __future__ import annotations

from tailgate.loadtests.workers.by_hand import OpenLoopUser
from tailgate.loadtests.workers.locust_events import listen


class ChatUser(OpenLoopUser):
    """One open-loop source of chat requests."""

    abstract = False


listen("generate")
