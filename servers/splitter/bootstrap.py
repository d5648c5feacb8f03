"""Envoy's bootstrap: the static configuration that splits gRPC traffic as a `SplitterConfig` says. Pure."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from servers.metadata import ARM_HEADER, INFERENCE_SERVICE, SESSION_HEADER
from servers.security import ServerTls
from servers.splitter.access_log import log_format
from servers.splitter.envoy_config import (
    ArmTarget,
    SplitterConfig,
    UpstreamTls,
    is_ip,
    per_million,
    split_address,
    stat_name,
)

LISTENER = "tailgate"
# Where a bucket of latencies ends, in ms: whole ms up to 9, then the preferred numbers E24 of IEC 60063, each about
# 10 % above the one before, up to 10 minutes. Two digits, because Envoy's own histograms keep two: between their bins
# it would estimate. The last bucket takes all that is longer.
_E24 = (10, 11, 12, 13, 15, 16, 18, 20, 22, 24, 27, 30, 33, 36, 39, 43, 47, 51, 56, 62, 68, 75, 82, 91)
_LONGEST_MS = 600_000
_ANY_MS = 1e9
_LATENCY_BOUNDS_MS = (
    *range(1, 10),
    *(step * 10**decade for decade in range(5) for step in _E24 if step * 10**decade <= _LONGEST_MS),
    _LONGEST_MS,
    int(_ANY_MS),
)
# The runtime keys under which Envoy takes new weights and new shares of copies while it runs, one for each arm.
WEIGHT_KEYS = "tailgate.weight"
SHADOW_KEYS = "tailgate.shadow"
# "No limit" where Envoy wants a number: the largest that fits its signed 32-bit fields.
_UNLIMITED = 2**31 - 1


def bootstrap(config: SplitterConfig, *, admin_socket: str = "") -> dict[str, Any]:
    """The Envoy bootstrap (JSON-ready) that splits gRPC traffic as `config` says.

    The admin interface is at `admin_socket`, which its owner alone may open, or at a port of loopback where that is
    empty.

    Durations are off, limits are out of reach and nothing is retried: a proxy that cuts, queues or repeats a request
    would be measured as the model server's doing.
    """
    return {
        "admin": {"address": _admin_address(config, admin_socket)},
        "layered_runtime": {
            "layers": [
                # Envoy closes a client's connection after 500 streams that were mostly reset before any answer. Here
                # these are calls that gave up in a queue, not an attack.
                {
                    "name": "limits",
                    "static_layer": {"overload.premature_reset_total_stream_count": _UNLIMITED},
                },
                # Live weights and shadows: written through the admin interface, see weights.py.
                {"name": "weights", "admin_layer": {}},
            ]
        },
        # Latencies are gathered from Envoy's threads as often, and counters are always at hand.
        "stats_flush_interval": "1s",
        "stats_config": {
            "histogram_bucket_settings": [
                {"match": {"suffix": ".upstream_rq_time"}, "buckets": list(_LATENCY_BOUNDS_MS)},
            ]
        },
        "bootstrap_extensions": [
            _extension("bootstrap.internal_listener", "bootstrap.internal_listener.v3.InternalListener")
        ],
        "static_resources": {
            "listeners": [
                _listener(config),
                *map(_shadow_listener, _possible_shadows(config)),
            ],
            "clusters": [
                *(_cluster(arm, config) for arm in config.arms),
                *map(_shadow_cluster, _possible_shadows(config)),
            ],
        },
    }


def _possible_shadows(config: SplitterConfig) -> list[ArmTarget]:
    """Every arm, also those that get no copies now: which arm is a shadow can change while Envoy runs."""
    return list(config.arms) if len(config.arms) > 1 else []


def _admin_address(config: SplitterConfig, socket: str) -> dict[str, Any]:
    return {"pipe": {"path": socket, "mode": 0o600}} if socket else _socket_address("127.0.0.1", config.admin_port)


def _socket_address(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}


def _typed(message: str, **fields: Any) -> dict[str, Any]:
    return {"@type": f"type.googleapis.com/envoy.extensions.{message}", **fields}


def _extension(name: str, message: str, **fields: Any) -> dict[str, Any]:
    return {"name": f"envoy.{name}", "typed_config": _typed(message, **fields)}


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
    failed = ", replica %UPSTREAM_HOST%: %LOCAL_REPLY_BODY%"
    manager = _manager(
        LISTENER,
        _routes(config),
        local_reply_config={
            "mappers": [
                _reply_text(flag, f'arm "%UPSTREAM_CLUSTER_RAW%"{text}')
                for flag, text in (("UH", " has no healthy replica: see its log"), ("UF", failed), ("UC", failed))
            ]
        },
        access_log=[*_access_log(config), *_request_log(config)],
        # A request that is under way would be unknown until it ends, and the slowest are under way the longest.
        **({"access_log_options": {"flush_access_log_on_new_request": True}} if config.request_log else {}),
    )
    return {
        "name": LISTENER,
        "address": _socket_address(config.host, config.port),
        # With port reuse, a second Envoy on a taken port would start and silently take half of the connections.
        "enable_reuse_port": False,
        # Load generators hold few, long connections: spread them evenly over the workers.
        "connection_balance_config": {"exact_balance": {}},
        "per_connection_buffer_limit_bytes": 64 * 2**20,
        "filter_chains": [
            {
                "filters": [manager],
                **({"transport_socket": _listener_tls(config.tls)} if config.tls is not None else {}),
            }
        ],
    }


def _manager(name: str, routes: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """The network filter that takes HTTP/2, counts gRPC statuses by arm and routes."""
    return _extension(
        "filters.network.http_connection_manager",
        "filters.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix=name,
        codec_type="HTTP2",
        http2_protocol_options=_http2(),
        common_http_protocol_options={"idle_timeout": "0s"},
        # A stream may be silent for as long as a compile takes.
        stream_idle_timeout="0s",
        # Metadata passes as it was sent, without a request id or a server's name.
        generate_request_id=False,
        server_header_transformation="PASS_THROUGH",
        route_config={"name": name, "virtual_hosts": [{"name": name, "domains": ["*"], "routes": routes}]},
        http_filters=[
            # Of all methods together: clients name the methods, and each would get counters of its own.
            _extension("filters.http.grpc_stats", "filters.http.grpc_stats.v3.FilterConfig"),
            _extension("filters.http.router", "filters.http.router.v3.Router", suppress_envoy_headers=True),
        ],
        **more,
    )


def _shadow_listener(arm: ArmTarget) -> dict[str, Any]:
    """Where the copies for an arm pass: a listener inside of Envoy.

    Envoy sends copies straight to their cluster, past its HTTP filters, and grpc_stats runs nowhere else: without this
    hop a shadow would have no gRPC statuses.
    """
    route = {
        "match": {"prefix": "/"},
        "route": {"cluster": arm.name, "timeout": "0s", "idle_timeout": "0s"},
        # Envoy marks what it copies; the arm gets it as it was sent.
        "request_headers_to_remove": ["x-envoy-internal", "x-forwarded-for"],
    }
    name = _shadow_name(arm)
    return {
        "name": name,
        "internal_listener": {},
        "per_connection_buffer_limit_bytes": 64 * 2**20,
        "filter_chains": [{"filters": [_manager(name, [route])]}],
    }


def _shadow_cluster(arm: ArmTarget) -> dict[str, Any]:
    name = _shadow_name(arm)
    address = {"envoy_internal_address": {"server_listener_name": name}}
    return {
        "name": name,
        "alt_stat_name": f"shadow@{stat_name(arm.name)}",
        "type": "STATIC",
        "load_assignment": {
            "cluster_name": name,
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": address}}]}],
        },
        **_unlimited_http2(),
    }


def _shadow_name(arm: ArmTarget) -> str:
    return f"shadow@{arm.name}"  # "@" is in no arm's name


def _listener_tls(tls: ServerTls) -> dict[str, Any]:
    trusted = {"validation_context": {"trusted_ca": _file(tls.client_ca)}} if tls.client_ca else {}
    common = {**_common_tls(tls.certificate, tls.key), **trusted}
    return _tls("Downstream", common_tls_context=common, require_client_certificate=bool(tls.client_ca))


def _cluster_tls(tls: UpstreamTls, hosts: Collection[str]) -> dict[str, Any]:
    names = [tls.name] if tls.name else sorted(set(hosts))
    # A trusted signature alone would let any server of the same authority stand in for an arm.
    carried = [{"san_type": "IP_ADDRESS" if is_ip(name) else "DNS", "matcher": {"exact": name}} for name in names]
    common = {
        **_common_tls(tls.certificate, tls.key),
        "validation_context": {"trusted_ca": _file(tls.ca), "match_typed_subject_alt_names": carried},
    }
    # The name in the hello picks the certificate where a server has several; an address is never sent as one.
    hello = next((name for name in names if not is_ip(name)), "")
    return _tls("Upstream", common_tls_context=common, **({"sni": hello} if hello else {}))


def _tls(side: str, **fields: Any) -> dict[str, Any]:
    return _extension("transport_sockets.tls", f"transport_sockets.tls.v3.{side}TlsContext", **fields)


def _common_tls(certificate: str, key: str) -> dict[str, Any]:
    pair = {"certificate_chain": _file(certificate), "private_key": _file(key)}
    return {
        # Without ALPN a gRPC client closes the connection.
        "alpn_protocols": ["h2"],
        "tls_params": {"tls_minimum_protocol_version": "TLSv1_2"},
        **({"tls_certificates": [pair]} if certificate else {}),
    }


def _file(path: str) -> dict[str, str]:
    # Absolute: a printed configuration may be run in another folder.
    return {"filename": str(Path(path).absolute())}


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
            # A gRPC client reads the two headers (3 is INVALID_ARGUMENT); the HTTP status is for anybody else.
            "direct_response": {"status": 400},
            "response_headers_to_add": [_header("grpc-status", "3"), _header("grpc-message", unknown)],
        },
        _weighted_route(config),
    ]


def _pinned_route(arm: ArmTarget, config: SplitterConfig) -> dict[str, Any]:
    return {
        "name": f"pinned-{arm.name}",
        "match": {"prefix": "/", "headers": [{"name": ARM_HEADER, "string_match": {"exact": arm.name}}]},
        "route": {"cluster": arm.name, **_route_options(config)},
        "response_headers_to_add": [_header(ARM_HEADER, arm.name)],
    }


def _weighted_route(config: SplitterConfig) -> dict[str, Any]:
    weighted: dict[str, Any] = {
        "runtime_key_prefix": WEIGHT_KEYS,
        "clusters": [
            {"name": arm.name, "weight": arm.weight, "response_headers_to_add": [_header(ARM_HEADER, arm.name)]}
            for arm in config.arms
        ],
    }
    if config.stickiness != "off":
        # The session's hash, modulo the sum of weights, picks the arm; without the header the pick is random.
        weighted["use_hash_policy"] = True
    action = {"weighted_clusters": weighted, **_route_options(config)}
    if shadows := _possible_shadows(config):
        action["request_mirror_policies"] = [_copies(arm) for arm in shadows]
    return {"name": "weighted", "match": {"prefix": "/"}, "route": action}


def _copies(arm: ArmTarget) -> dict[str, Any]:
    return {
        "cluster": _shadow_name(arm),
        "runtime_fraction": {
            "default_value": {"numerator": per_million(arm.shadow_percent), "denominator": "MILLION"},
            "runtime_key": f"{SHADOW_KEYS}.{arm.name}",
        },
        "disable_shadow_host_suffix_append": True,
    }


def _route_options(config: SplitterConfig) -> dict[str, Any]:
    options: dict[str, Any] = {"timeout": "0s", "idle_timeout": "0s"}
    if config.stickiness != "off":
        options["hash_policy"] = [{"header": {"header_name": SESSION_HEADER}}]
    return options


def _cluster(arm: ArmTarget, config: SplitterConfig) -> dict[str, Any]:
    addresses = [split_address(backend) for backend in arm.backends]
    hosts = [host for host, _ in addresses]
    tls = config.upstream_tls
    return {
        "name": arm.name,
        "alt_stat_name": stat_name(arm.name),
        "type": "STATIC" if all(map(is_ip, hosts)) else "STRICT_DNS",
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
        **_unlimited_http2(),
        "health_checks": [
            {
                "grpc_health_check": {"service_name": INFERENCE_SERVICE},
                "interval": _seconds(config.health_interval_s),
                # Without traffic Envoy checks once a minute by default: a warm arm would look cold for as long.
                "no_traffic_interval": _seconds(config.health_interval_s),
                "timeout": "20s",
                # NOT_SERVING counts at once and a refused connection after three checks. Silence must last three
                # timeouts, so that a compile that also stalls the gRPC front is not taken for a death.
                "unhealthy_threshold": 3,
                "healthy_threshold": 1,
            }
        ],
        "outlier_detection": _ejection(),
        **({"transport_socket": _cluster_tls(tls, hosts)} if tls is not None else {}),
        # Statistics of every replica, not of the arm alone.
        "track_cluster_stats": {"per_endpoint_stats": True},
    }


def _unlimited_http2() -> dict[str, Any]:
    """What each cluster has: HTTP/2, and no limit on what waits, runs or is buffered."""
    limits = dict.fromkeys(("max_connections", "max_pending_requests", "max_requests", "max_retries"), _UNLIMITED)
    return {
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": _typed(
                "upstreams.http.v3.HttpProtocolOptions",
                explicit_http_config={"http2_protocol_options": _http2()},
                common_http_protocol_options={"idle_timeout": "0s"},
            )
        },
        "per_connection_buffer_limit_bytes": 64 * 2**20,
        "circuit_breakers": {"thresholds": [{"priority": "DEFAULT", **limits}]},
    }


def _seconds(value: float) -> str:
    return f"{value:.9f}".rstrip("0").rstrip(".") + "s"


def _balancing(config: SplitterConfig) -> dict[str, Any]:
    policies = "load_balancing_policies"
    if config.stickiness == "replica":
        return _extension(f"{policies}.maglev", f"{policies}.maglev.v3.Maglev")
    # An arm has few replicas: look at all of them instead of at two drawn at random.
    scan = {"selection_method": "FULL_SCAN"}
    return _extension(f"{policies}.least_request", f"{policies}.least_request.v3.LeastRequest", **scan)


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


def _access_log(config: SplitterConfig) -> list[dict[str, Any]]:
    """For people to read."""
    fields = {
        "start": "%START_TIME%",
        "duration_ms": "%DURATION%",
        "method": "%REQ(:path)%",
        "arm": "%UPSTREAM_CLUSTER_RAW%",
        "replica": "%UPSTREAM_HOST%",
        "pinned": f"%REQ({ARM_HEADER})%",
        "session": f"%REQ({SESSION_HEADER})%",
        "grpc_status": "%GRPC_STATUS(SNAKE_STRING)%",
        "flags": "%RESPONSE_FLAGS%",
    }
    loggers = _json_lines(config.access_log, fields)
    return [{**logger, "filter": {"log_type_filter": {"types": ["DownstreamEnd"]}}} for logger in loggers]


def _request_log(config: SplitterConfig) -> list[dict[str, Any]]:
    """For `access_log.parse_line`."""
    return _json_lines(config.request_log, log_format())


def _json_lines(path: str, fields: dict[str, Any]) -> list[dict[str, Any]]:
    message = "access_loggers.file.v3.FileAccessLog"
    return [_extension("access_loggers.file", message, path=path, log_format={"json_format": fields})] if path else []
