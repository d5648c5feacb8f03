"""What splits the traffic, as whoever moves its weights sees it: an Envoy, or a route of a cluster's gateway."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from loadtests.experiments.users import UsersConfig
from servers.fields import ConfigError
from servers.splitter.admin import Admin, SplitterError
from servers.splitter.kubernetes import Gateway
from servers.splitter.weights import live_weights, reweight, shares_after, started_s_ago

# Whoever waits sees no alarm meanwhile, and a rollback is to take 2 s at most.
_IN_FORCE_S, _ASK_S = 1.0, 0.2


# Whoever steers tries again: a route that others change may split nothing for a while.
UNANSWERED: Final = (SplitterError, ConfigError)


class Splitter(Protocol):
    """Weights that can be read and set. Both raise SplitterError when nobody answers, and ConfigError where it does not
    split among the arms."""

    def weights(self) -> Mapping[str, int]:
        """The weight of every arm, as it is in force."""

    def after(self, weights: Mapping[str, int]) -> Mapping[str, int]:
        """The weight of every arm once these are set. Raises ConfigError for what cannot be."""

    def reweight(self, weights: Mapping[str, int]) -> None:
        """New requests follow the weights; those under way are not touched."""

    def up_s(self) -> float:
        """For how long it has kept the weights that it was told, in s; infinite where they outlive it."""


@dataclass(frozen=True, slots=True)
class EnvoySplitter:
    """The split behind an admin interface."""

    admin: Admin

    def weights(self) -> Mapping[str, int]:
        """The live weights."""
        return live_weights(self.admin)

    def after(self, weights: Mapping[str, int]) -> Mapping[str, int]:
        """Those that are not named keep theirs."""
        return shares_after(self.admin, weights=weights).weights

    def reweight(self, weights: Mapping[str, int]) -> None:
        """In one change, in force when it returns."""
        reweight(self.admin, weights)

    def up_s(self) -> float:
        """Envoy's age, whole seconds of which it tells: it starts with the weights of its configuration."""
        return started_s_ago(self.admin)


@dataclass(frozen=True, slots=True)
class RouteSplitter:
    """The GRPCRoute or HTTPRoute of a gateway."""

    gateway: Gateway

    def weights(self) -> Mapping[str, int]:
        """Those of the route; its gateway may be a moment behind."""
        return self.gateway.state().weights

    def after(self, weights: Mapping[str, int]) -> Mapping[str, int]:
        """Those that are not named keep theirs; the route itself is checked when it is changed."""
        return {**self.weights(), **weights}

    def reweight(self, weights: Mapping[str, int]) -> None:
        """Returns once the gateway says that it follows, or after 1 s: not every gateway says so."""
        state = self.gateway.reweight(weights)
        deadline = time.monotonic() + _IN_FORCE_S
        while not state.in_force and time.monotonic() < deadline:
            time.sleep(_ASK_S)
            state = self.gateway.state()

    def up_s(self) -> float:
        """The cluster keeps the route."""
        return math.inf


def splitter_of(users: UsersConfig, arms: Collection[str]) -> Splitter | None:
    """The splitter of users' traffic to the arms; None where none is named. Raises ConfigError outside of a cluster
    whose route is named."""
    if users.route:
        namespace, _, route = users.route.partition("/")
        return RouteSplitter(
            Gateway(namespace=namespace, route=route, arms=arms, kind=users.route_kind, proxy=users.api)
        )
    return EnvoySplitter(Admin(users.admin)) if users.admin else None
