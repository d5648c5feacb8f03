"""What the splitter does: its arms, their weights and how sessions stick, as checked values."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from servers.address import host_port
from servers.complaint import ConfigError
from servers.presets import check_name
from servers.security import ServerTls, check_authority, check_pair

MAX_WEIGHT = 1_000_000
SMALLEST_SHADOW_PERCENT = 0.0001


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmTarget:
    """One arm behind the splitter: its replicas as "host:port", and its share of the traffic that is not pinned.

    A shadow has weight 0 and gets copies of `shadow_percent` of the requests that are not pinned; its answers are
    thrown away.
    """

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
class UpstreamTls:
    """How the splitter reaches the arms by TLS: the authority it trusts and its own certificate, all PEM files.

    Each certificate must carry `name`, or the host of an address of its arm when that is empty.
    """

    ca: str
    name: str = ""
    certificate: str = ""
    key: str = ""

    def __post_init__(self) -> None:
        if not self.ca:
            raise ConfigError("upstream TLS has no authority: name a PEM file with --upstream-ca")
        if bool(self.certificate) != bool(self.key):
            raise ConfigError("--upstream-certificate and --upstream-key belong together: give both or neither")


def upstream_tls(ca: str, name: str = "", certificate: str = "", key: str = "") -> UpstreamTls | None:
    """The checked files, or None when none is named. Raises ConfigError for one that is missing or of no use."""
    if not (ca or name or certificate or key):
        return None
    tls = UpstreamTls(ca=ca, name=name, certificate=certificate, key=key)
    check_authority(tls.ca)
    if tls.certificate:
        check_pair(tls.certificate, tls.key)
    return tls


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitterConfig:
    """What the splitter does. Port 0 takes a free port. A session keeps meeting one arm.

    `admin_port` is where any process of this machine reaches Envoy's admin interface; 0: a Unix socket, which this user
    alone may open.

    `tls` is what clients meet, `upstream_tls` how all arms are reached; None is plaintext. Both hold names of files,
    and so does Envoy's configuration. Metadata, `authorization` among it, passes as it is. `request_log` is the file
    for `request_log.parse_line`, none where it is empty.
    """

    arms: tuple[ArmTarget, ...]
    host: str = "127.0.0.1"
    port: int = 0
    admin_port: int = 0
    workers: int = 2
    request_log: str = ""
    health_interval_s: float = 1.0
    tls: ServerTls | None = None
    upstream_tls: UpstreamTls | None = None

    def __post_init__(self) -> None:
        if not self.arms:
            raise ConfigError("the splitter has no arm: give at least one")
        names = [arm.name for arm in self.arms]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f'arm name "{name}" is taken: give each arm a name of its own')
        if not is_ip(self.host):
            raise ConfigError(f'splitter.host is "{self.host}": give an IP address, 127.0.0.1 or 0.0.0.0 for example')
        for key, low, high in (
            ("port", 0, 65535),
            ("admin_port", 0, 65535),
            ("workers", 1, 1024),
            ("health_interval_s", 0.01, 3600),
        ):
            if not low <= getattr(self, key) <= high:
                raise ConfigError(f"splitter.{key} is {getattr(self, key)}: give a value from {low} to {high}")
        if not any(self.weights.values()):
            raise ConfigError("every arm has weight 0: give at least one arm a weight of 1 or more")

    @property
    def weights(self) -> dict[str, int]:
        """The configured weight of every arm."""
        return {arm.name: arm.weight for arm in self.arms}

    @property
    def shadows(self) -> dict[str, float]:
        """The percentage of requests that each shadow gets copies of; arms without copies are left out."""
        return {arm.name: arm.shadow_percent for arm in self.arms if arm.shadow_percent}


def check_weight(name: str, weight: int) -> None:
    """The weight is one that Envoy takes. Raises ConfigError."""
    if isinstance(weight, bool) or not isinstance(weight, int) or not 0 <= weight <= MAX_WEIGHT:
        raise ConfigError(f'weight of arm "{name}" is {weight!r}: give a whole number from 0 to {MAX_WEIGHT}')


def check_shadow(name: str, percent: float, weight: int) -> None:
    """The share is one that Envoy takes, and an arm that gets copies has no weight. Raises ConfigError."""
    if not (percent == 0 or SMALLEST_SHADOW_PERCENT <= percent <= 100):
        raise ConfigError(
            f'shadow of arm "{name}" is {percent:g} %: give 0 %, or from {SMALLEST_SHADOW_PERCENT} % to 100 %'
        )
    if percent and weight:
        # Its own share and the copies together would load it more than the arms it is compared with.
        raise ConfigError(
            f'arm "{name}" gets copies of {percent:g} % of the requests and has weight {weight}: set one of them to 0'
        )


def per_million(percent: float) -> int:
    """How many of a million requests `percent` are: Envoy's finest share."""
    return round(percent * 10_000)


def split_address(address: str) -> tuple[str, int]:
    """(host, port) of a replica's address. Raises ConfigError, with the remedy where a scheme was given."""
    if "/" in address:
        raise ConfigError(
            f'address "{address}" is not host:port: leave out the scheme; --upstream-ca reaches all arms by TLS'
        )
    return host_port(address)


def is_ip(host: str) -> bool:
    """Whether `host` is an IP address and no name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def stat_name(arm: str) -> str:
    """The arm's name in Envoy's statistics, which are cut at dots: "~" stands for them, and is in no arm's name."""
    return arm.replace(".", "~")
