"""The locustfile: texts to be embedded, over gRPC, open loop.

By hand, against a running `tailgate split` or one arm's server:

    locust -f loadtests/embed.py --host localhost:50051 --headless -u 4 -r 4 -t 60s

As chat.py, but a request asks for the vector of one text, which has an E2E latency alone.
"""

from __future__ import annotations

from tailgate.loadtests.workers.by_hand import OpenLoopUser
from tailgate.loadtests.workers.locust_events import listen


class EmbedUser(OpenLoopUser):
    """One open-loop source of texts to be embedded."""

    abstract = False


listen("embed")
