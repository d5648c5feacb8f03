"""A planned request, encoded for one arm and ready to be sent."""

from __future__ import annotations

from loadtests.clients.route import Endpoint, Route
from loadtests.traffic.schedule import PlannedRequest


class RequestCopy:
    """One request as it goes to one arm."""

    __slots__ = (
        "arm",
        "body",
        "endpoint",
        "headers",
        "pair_id",
        "plan",
        "request_id",
        "route",
        "scheduled_ns",
    )

    def __init__(self, plan: PlannedRequest, pair_id: str, arm: str | None, route: Route) -> None:
        self.plan = plan
        self.pair_id = pair_id
        self.request_id = pair_id if arm is None else f"{pair_id}-{arm}"
        self.arm = arm  # pinned, or None
        self.route = route
        self.endpoint: Endpoint | None = None  # that it went to
        self.body, self.headers = route.encode(plan, self.request_id, arm)
        self.scheduled_ns = 0


Prepared = tuple[RequestCopy, ...]
