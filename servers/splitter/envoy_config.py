"""What the splitter does: its arms, their weights and how sessions stick, as checked values."""

from __future__ import annotations

import ipaddress
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tailgate.servers.address import host_port
from tailgate.servers.complaint import ConfigError
from tailgate.servers.presets import check_name
from tailgate.servers.security import ServerTls

MAX_WEIGHT = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmTarget:
    """One arm: its replicas as "host:port", and its share of the traffic that is not pinned. A shadow has weight 0 and
    gets copies of `shadow_percent` of those requests; its answers are thrown away."""

    name: str
    backends: tuple[str, ...]
    weight: int = 1
    shadow_percent: float = 0.0

    def __post_init__(self) -> None:
        try:
            check_name(self.name)
        except ValueError as error:
            raise ConfigError(f"arm name {error}") from None
        if not self.backends:
            raise ConfigError(f'arm "{self.name}" has no replica: give at least one address as host:port')
        if len(set(self.backends)) < len(self.backends):
            raise ConfigError(f'arm "{self.name}" names a replica twice: {", ".join(self.backends)}: drop one')
        for backend in self.backends:
            split_address(backend)
        check_weight(self.name, self.weight)
        check_shadow(self.name, self.shadow_percent, self.weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitterConfig:
    """What the splitter does. Port 0 takes a free port. A session keeps meeting one arm. Metadata passes as it is.

    `admin_port` is where any process of this machine reaches Envoy's admin interface; 0: a Unix socket of this user
    alone. `tls` is what clients meet; arms are always reached in plaintext. `request_log` is a file, or empty.
    """

    arms: tuple[ArmTarget, ...]
    host: str = "127.0.0.1"
    port: int = 0
    admin_port: int = 0
    workers: int = 2
    request_log: str = ""
    health_interval_s: float = 1.0
    tls: ServerTls | None = None

    def __post_init__(self) -> None:
        if not self.arms:
            raise ConfigError("the splitter has no arm: give at least one")
        names = [arm.name for arm in self.arms]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f'arm name "{name}" is taken: give each arm a name of its own')
        if not is_ip(self.host):
            raise ConfigError(f'splitter.host is "{self.host}": give an IP address, 127.0.0.1 or 0.0.0.0 for example')
        if not any(self.weights.values()):
            raise ConfigError("every arm has weight 0: give at least one arm a weight of 1 or more")

    @property
    def weights(self) -> dict[str, int]:
        return {arm.name: arm.weight for arm in self.arms}

    @property
    def shadows(self) -> dict[str, float]:
        """The percentage of requests that each shadow gets copies of; arms without copies are left out."""
        return {arm.name: arm.shadow_percent for arm in self.arms if arm.shadow_percent}


def check_weight(name: str, weight: int) -> None:
    """Check that Envoy accepts the weight. Raises ConfigError."""
    if isinstance(weight, bool) or not isinstance(weight, int) or not 0 <= weight <= MAX_WEIGHT:
        raise ConfigError(f'weight of arm "{name}" is {weight!r}: give a whole number from 0 to {MAX_WEIGHT}')


def check_shadow(name: str, percent: float, weight: int) -> None:
    """Check that Envoy accepts the share and that an arm with copies has no weight. Raises ConfigError."""
    if not (percent == 0 or 0.0001 <= percent <= 100):
        raise ConfigError(f'shadow of arm "{name}" is {percent:g} %: give 0 %, or from 0.0001 % to 100 %')
    if percent and weight:
        # Its own share and the copies together would load it more than the arms it is compared with.
        raise ConfigError(
            f'arm "{name}" gets copies of {percent:g} % of the requests and has weight {weight}: set one of them to 0'
        )


def fraction(percent: float) -> dict[str, Any]:
    """Return the share as Envoy's finest fraction, millionths."""
    return {"numerator": round(percent * 10_000), "denominator": "MILLION"}


def split_address(address: str) -> tuple[str, int]:
    """Return (host, port) of a replica's address. Raises ConfigError, which names the remedy for a scheme."""
    if "/" in address:
        raise ConfigError(f'address "{address}" is not host:port: leave out the scheme; arms are reached in plaintext')
    return host_port(address)


def is_ip(host: str) -> bool:
    with suppress(ValueError):
        return bool(ipaddress.ip_address(host))
    return False


def stat_name(arm: str) -> str:
    """Return the arm's name in Envoy's statistics, with "~" for dots, at which Envoy would cut it."""
    return arm.replace(".", "~")
