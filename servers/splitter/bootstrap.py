"""Envoy's bootstrap: the static configuration that splits gRPC traffic as a `SplitterConfig` says. Pure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tailgate.servers.metadata import ARM_HEADER, INFERENCE_SERVICE, SESSION_HEADER
from tailgate.servers.security import ServerTls
from tailgate.servers.splitter.envoy_config import ArmTarget, SplitterConfig, fraction, is_ip, split_address, stat_name
from tailgate.servers.splitter.request_log import log_format

LISTENER = "tailgate"
# The runtime keys under which Envoy takes new weights and new shares of copies while it runs, one for each arm.
WEIGHT_KEYS = "tailgate.weight"
SHADOW_KEYS = "tailgate.shadow"
# "No limit" where Envoy wants a number: the largest that fits its signed 32-bit fields.
_UNLIMITED = 2**31 - 1
_BUFFER_BYTES = 64 * 2**20

_ROUTE = {"timeout": "0s", "idle_timeout": "0s"}


def bootstrap(config: SplitterConfig, *, admin_socket: str = "") -> dict[str, Any]:
    """Return the Envoy bootstrap (JSON-ready) that splits gRPC traffic as `config` says, with the admin interface at
    `admin_socket`, which its owner alone may open, or at a port of loopback where that is empty.

    Durations are off, limits are out of reach and nothing is retried: a proxy that cuts, queues or repeats a request
    would be measured as the model server's doing.
    """
    at_port = _socket_address("127.0.0.1", config.admin_port)
    return {
        "admin": {"address": {"pipe": {"path": admin_socket, "mode": 0o600}} if admin_socket else at_port},
        "layered_runtime": {
            "layers": [
                # Envoy closes a client's connection after 500 streams that were mostly reset before any answer. Here
                # these are calls that gave up in a queue, not an attack.
                {
                    "name": "limits",
                    "static_layer": {"overload.premature_reset_total_stream_count": _UNLIMITED},
                },
                # Live weights and shadows: written through the admin interface, see admin.py.
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


def _extension(name: str, message: str, **fields: Any) -> dict[str, Any]:
    return {
        "name": f"envoy.{name}",
        "typed_config": {"@type": f"type.googleapis.com/envoy.extensions.{message}", **fields},
    }


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
    manager = _extension(
        "filters.network.http_connection_manager",
        "filters.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix=LISTENER,
        codec_type="HTTP2",
        http2_protocol_options=_http2(),
        common_http_protocol_options={"idle_timeout": "0s"},
        # A stream may be silent for as long as a compile takes.
        stream_idle_timeout="0s",
        # Metadata passes as it was sent, without a request id or a server's name.
        generate_request_id=False,
        server_header_transformation="PASS_THROUGH",
        route_config={
            "name": LISTENER,
            "virtual_hosts": [{"name": LISTENER, "domains": ["*"], "routes": _routes(config)}],
        },
        http_filters=[_extension("filters.http.router", "filters.http.router.v3.Router", suppress_envoy_headers=True)],
        local_reply_config={
            "mappers": [
                _reply_text(flag, f'arm "%UPSTREAM_CLUSTER_RAW%"{text}')
                for flag, text in (("UH", " has no healthy replica: see its log"), ("UF", failed), ("UC", failed))
            ]
        },
        **(_request_log(config.request_log) if config.request_log else {}),
    )
    return {
        "name": LISTENER,
        "address": _socket_address(config.host, config.port),
        # With port reuse, a second Envoy on a taken port would start and silently take half of the connections.
        "enable_reuse_port": False,
        # Load generators hold few, long connections: spread them evenly over the workers.
        "connection_balance_config": {"exact_balance": {}},
        "per_connection_buffer_limit_bytes": _BUFFER_BYTES,
        "filter_chains": [
            {
                "filters": [manager],
                **({"transport_socket": _listener_tls(config.tls)} if config.tls is not None else {}),
            }
        ],
    }


def _request_log(path: str) -> dict[str, Any]:
    """Return the access log that `request_log.parse_line` reads."""
    logger = _extension(
        "access_loggers.file",
        "access_loggers.file.v3.FileAccessLog",
        path=path,
        log_format={"json_format": log_format()},
    )
    # A request that is under way would be unknown until it ends, and the slowest are under way the longest.
    return {"access_log": [logger], "access_log_options": {"flush_access_log_on_new_request": True}}


def _listener_tls(tls: ServerTls) -> dict[str, Any]:
    # Absolute: a printed configuration may be run in another folder.
    chain, key = ({"filename": str(Path(path).absolute())} for path in (tls.certificate, tls.key))
    common = {
        # Without ALPN a gRPC client closes the connection.
        "alpn_protocols": ["h2"],
        "tls_params": {"tls_minimum_protocol_version": "TLSv1_2"},
        "tls_certificates": [{"certificate_chain": chain, "private_key": key}],
    }
    return _extension(
        "transport_sockets.tls", "transport_sockets.tls.v3.DownstreamTlsContext", common_tls_context=common
    )


def _reply_text(flag: str, text: str) -> dict[str, Any]:
    """Make Envoy's own reply under a flag say `text`. UH: no healthy host; UF: cannot connect; UC: connection ended."""
    return {
        "filter": {"response_flag_filter": {"flags": [flag]}},
        "body_format_override": {"text_format_source": {"inline_string": text}},
    }


def _routes(config: SplitterConfig) -> list[dict[str, Any]]:
    """Return routes in order of match: each arm pinned by header, a refusal for other pins, the weighted split."""
    unknown = f'arm "%REQ({ARM_HEADER}):64%" is unknown: use one of {", ".join(config.weights)}'
    return [
        *(_pinned_route(arm) for arm in config.arms),
        {
            "name": "unknown-arm",
            "match": {"prefix": "/", "headers": [{"name": ARM_HEADER, "present_match": True}]},
            # A gRPC client reads the two headers (3 is INVALID_ARGUMENT); the HTTP status is for other clients.
            "direct_response": {"status": 400},
            "response_headers_to_add": [_header("grpc-status", "3"), _header("grpc-message", unknown)],
        },
        _weighted_route(config),
    ]


def _pinned_route(arm: ArmTarget) -> dict[str, Any]:
    return {
        "name": f"pinned-{arm.name}",
        "match": {"prefix": "/", "headers": [{"name": ARM_HEADER, "string_match": {"exact": arm.name}}]},
        "route": {"cluster": arm.name, **_ROUTE},
        "response_headers_to_add": [_header(ARM_HEADER, arm.name)],
    }


def _weighted_route(config: SplitterConfig) -> dict[str, Any]:
    action: dict[str, Any] = {
        "weighted_clusters": {
            "runtime_key_prefix": WEIGHT_KEYS,
            "clusters": [
                {"name": arm.name, "weight": arm.weight, "response_headers_to_add": [_header(ARM_HEADER, arm.name)]}
                for arm in config.arms
            ],
            # The session's hash, modulo the sum of weights, picks the arm; without the header the pick is random.
            "use_hash_policy": True,
        },
        "hash_policy": [{"header": {"header_name": SESSION_HEADER}}],
        **_ROUTE,
    }
    if len(config.arms) > 1:
        # Every arm, also those that get no copies now: which arm is a shadow can change while Envoy runs.
        action["request_mirror_policies"] = [
            {
                "cluster": arm.name,
                "runtime_fraction": {
                    "default_value": fraction(arm.shadow_percent),
                    "runtime_key": f"{SHADOW_KEYS}.{arm.name}",
                },
                "disable_shadow_host_suffix_append": True,
            }
            for arm in config.arms
        ]
    return {"name": "weighted", "match": {"prefix": "/"}, "route": action}


def _cluster(arm: ArmTarget, config: SplitterConfig) -> dict[str, Any]:
    addresses = [split_address(backend) for backend in arm.backends]
    hosts = [host for host, _ in addresses]
    balancing = _extension(
        "load_balancing_policies.least_request",
        "load_balancing_policies.least_request.v3.LeastRequest",
        selection_method="FULL_SCAN",
    )
    limits = dict.fromkeys(("max_connections", "max_pending_requests", "max_requests", "max_retries"), _UNLIMITED)
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
        # An arm has few replicas: look at all of them instead of at two drawn at random.
        "load_balancing_policy": {"policies": [{"typed_extension_config": balancing}]},
        "common_lb_config": {
            # By default Envoy sends to sick replicas too once half are sick.
            "healthy_panic_threshold": {"value": 0},
            # By default the second change within a second waits for that second's end.
            "update_merge_window": "0s",
        },
        # HTTP/2, and no limit on what waits, runs or is buffered.
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
                "explicit_http_config": {"http2_protocol_options": _http2()},
                "common_http_protocol_options": {"idle_timeout": "0s"},
            }
        },
        "per_connection_buffer_limit_bytes": _BUFFER_BYTES,
        "circuit_breakers": {"thresholds": [{"priority": "DEFAULT", **limits}]},
        "health_checks": [
            {
                "grpc_health_check": {"service_name": INFERENCE_SERVICE},
                "interval": f"{config.health_interval_s:g}s",
                # Without traffic Envoy checks once a minute by default: a warm arm would look cold for as long.
                "no_traffic_interval": f"{config.health_interval_s:g}s",
                "timeout": "20s",
                # NOT_SERVING counts at once and a refused connection after three checks. Silence must last three
                # timeouts, so that a compile that also stalls the gRPC front is not taken for a death.
                "unhealthy_threshold": 3,
                "healthy_threshold": 1,
            }
        ],
        # Ejects a replica that cannot be reached before its health checks have failed, never one that answers with
        # errors: those are the measurement. The last half stays: health checks decide whether an arm is gone.
        "outlier_detection": {
            "split_external_local_origin_errors": True,
            "consecutive_local_origin_failure": 5,
            "enforcing_local_origin_success_rate": 0,
            "enforcing_consecutive_5xx": 0,
            "enforcing_success_rate": 0,
            "base_ejection_time": "5s",
            "max_ejection_time": "30s",
            "interval": "1s",
            "max_ejection_percent": 50,
        },
    }
