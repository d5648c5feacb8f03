"""The locustfile: chat traffic over gRPC, open loop.

By hand, against a running `tailgate split` or one arm's server:

    locust -f loadtests/chat.py --host localhost:50051 --headless -u 4 -r 4 -t 60s

Each User is one Poisson source of --request-rate requests/s: it sleeps to its own next instant, starts the call
without waiting for it, and draws the next gap. So user counts, LoadTestShape, --processes and the web page work as
ever, and a slow server cannot slow the traffic down. Latencies count from the scheduled instant.

Locust's statistics get two rows for each arm: "Generate e2e [arm]" for every request (failures are counted here) and
"Generate ttft [arm]" for every first token. The row "Aggregated" mixes both, so read the rows. Percentiles there
are rounded; exact ones come from the records (--records DIR). A request still running when the test stops is recorded
as CANCELLED and not shown; --stop-timeout lets it end.

Driven by a run, with --trial, Users do nothing: each load process dispatches its share of the schedule and Locust quits
when the last answer is in.
"""

from __future__ import annotations

from tailgate.loadtests.workers.by_hand import OpenLoopUser
from tailgate.loadtests.workers.locust_events import listen


class ChatUser(OpenLoopUser):
    """One open-loop source of chat requests."""

    abstract = False


listen("generate")
