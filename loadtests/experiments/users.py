"""Where production traffic flows, for a ramp that sends none itself: the [users] table of an experiment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import model_validator

from tailgate.servers.address import host_port
from tailgate.servers.fields import Listed, Settings, matching
from tailgate.servers.splitter.admin import admin_address

RouteKind = Literal["GRPCRoute", "HTTPRoute"]
_KEPT = ("block_s", "timeout_s")  # of the traffic: the rest describes what is not sent


class UsersConfig(Settings):
    """Where production traffic flows: a running `tailgate split`, or a route of a gateway. `tailgate ramp` then moves
    it, and sends none itself."""

    admin: str = ""
    """Admin address of the `tailgate split` that production traffic passes: HOST:PORT, or the path of its socket."""
    access_log: str = ""
    """Request log of the splitter or gateway. Default: as the splitter reports."""
    route: Annotated[str, matching(r"|[^/]+/[^/]+", "give NAMESPACE/NAME of a route of route_kind")] = ""
    """NAMESPACE/NAME of a Gateway API route whose weights are moved instead (`pip install 'tailgate[kubernetes]'`)."""
    route_kind: RouteKind = "GRPCRoute"
    """Kind of that route. Flagger makes an HTTPRoute."""
    api: str = ""
    """HOST:PORT of a `kubectl proxy`. Default: the API server that a pod finds."""
    replicas: Mapping[str, Annotated[tuple[str, ...], Listed]] = {}
    """Replicas of each arm: `{ eager = ["10.0.0.7:50051"] }`. Default: as the splitter reports."""
    provider: str = ""
    """HOST:PORT where the run answers Argo Rollouts or Flagger, which then move the weights."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.admin:
            admin_address(self.admin, f'admin is "{self.admin}": give host:port, or the path of a socket')
        if self.api:
            host_port(self.api, f'api is "{self.api}": give an address as host:port')
        if self.provider:
            host_port(self.provider, f'provider is "{self.provider}": give HOST:PORT', listens=True)
        if self.api and not self.route:
            raise ValueError(f'api is "{self.api}" but users.route is empty: name the route, or remove api')
        for arm, addresses in self.replicas.items():
            for address in addresses:
                host_port(address, f'replicas.{arm} holds "{address}": give addresses as host:port')
        if (self.route or self.provider) and not (self.admin or (self.route and self.access_log)):
            raise ValueError(
                "admin is empty and nothing else says where production traffic flows: give users.admin (--admin), the "
                "address that `tailgate split` printed, or users.route with users.access_log"
            )
        return self


def production_table(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table of an experiment of production traffic, without settings of generated traffic."""
    traffic = table.get("traffic")
    kept = {key: traffic[key] for key in _KEPT if key in traffic} if isinstance(traffic, Mapping) else {}
    # The arms get no requests besides the users', and may run on other machines.
    left = {
        "traffic": {**kept, "design": "split", "arrivals": "users"},
        "parity": {"served": False},
        "machines": {"reference_s": 0.0},
    }
    return {**{key: value for key, value in table.items() if key != "pressure"}, **left}
