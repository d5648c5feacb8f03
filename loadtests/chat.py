"""The locustfile: chat traffic over gRPC, open loop.

By hand, against a running `tailgate split` or one arm's server:

    locust -f loadtests/chat.py --host localhost:50051 --headless -u 4 -r 4 -t 60s

Each User is one Poisson source of --request-rate requests/s: it sleeps to its own next instant, starts the call
without waiting for it, and draws the next gap. So user counts, LoadTestShape, --processes and the web page work as
ever, and a slow server cannot slow the traffic down. Latencies count from the scheduled instant.

Locust's statistics get two rows for each arm, both named "Generate [arm]". The row of type E2E counts every request
once, with its failures. The row of type TTFT holds the time to the first token of every request that succeeded.
"Aggregated", the charts and the RPS at the top of the page count the E2E rows only; the RPS of a TTFT row is first
tokens per second. A failure whose answer names no arm counts in the row "Generate". Percentiles there are rounded;
exact ones come from the records (--records DIR). Locust does not count a request that still runs when the test stops:
it is recorded as CANCELLED, and --stop-timeout lets it end.

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
