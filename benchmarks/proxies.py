"""The ways from a client to a server: direct, Envoy as tailgate configures it, bare Envoy, and what else there is."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.contest import ContestError, Cores, Process, process_cpu_s
from servers.address import host_port
from servers.splitter.envoy import Envoy, envoy_path
from servers.splitter.envoy_config import ArmTarget, SplitterConfig

PATHS: Final = ("direct", "envoy", "tailgate", "asyncio", "nginx", "haproxy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to the server. `cpu_s` is the processor time of what stands in between, 0 for nothing."""

    name: str
    address: str
    cpu_s: Callable[[], float]


def missing(name: str) -> str:
    """Why this path cannot be tried here, or nothing."""
    if name in ("nginx", "haproxy") and shutil.which(name) is None:
        return f"{name} is not installed: apt-get install {name}"
    return ""


def version_of(name: str) -> str:
    """What is installed, in its own words."""
    if name in ("envoy", "tailgate"):
        return _first_line([str(envoy_path()), "--version"]).partition("version:")[2].strip()
    if name in ("nginx", "haproxy"):
        return _first_line([name, "-v"])
    return ""


def _first_line(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    return lines[0] if lines else ""


@contextmanager
def opened(name: str, target: str, *, folder: Path, cores: Cores) -> Iterator[Way]:
    """The way `name` to the server at `target`, ready for calls."""
    if name == "direct":
        yield Way(name=name, address=target, cpu_s=lambda: 0.0)
        return
    if name == "tailgate":
        config = SplitterConfig(arms=(ArmTarget(name="null", backends=(target,)),))
        with Envoy.start(config, log_path=folder / "tailgate.log", work_dir=folder) as envoy:
            for task in Path(f"/proc/{envoy.pid}/task").glob("*"):
                cores.settle(int(task.name), cores.server)
            envoy.wait_ready(20.0)
            pid = envoy.pid
            yield Way(name=name, address=envoy.target, cpu_s=lambda: process_cpu_s(pid))
        return
    port = _free_port()
    with Process(name, _command(name, target, port, folder), folder=folder, cores=cores, core=cores.server) as process:
        address = f"127.0.0.1:{port}"
        _wait_for(address, process)
        yield Way(name=name, address=address, cpu_s=process.cpu_s)


def _command(name: str, target: str, port: int, folder: Path) -> list[str]:
    if name == "asyncio":
        return [sys.executable, "-m", "benchmarks.peers.proxy", target, str(port)]
    config = folder / f"{name}.conf"
    if name == "envoy":
        config = folder / "bare.json"
        config.write_text(json.dumps(bare_envoy(target, port)))
        workers = str(SplitterConfig.__dataclass_fields__["workers"].default)
        return [
            *(str(envoy_path()), "--config-path", str(config), "--concurrency", workers),
            *("--log-level", "warning", "--disable-hot-restart"),
        ]
    if name == "nginx":
        config.write_text(nginx(target, port, folder))
        return ["nginx", "-c", str(config), "-p", str(folder), "-e", "stderr"]
    config.write_text(haproxy(target, port))
    return ["haproxy", "-db", "-f", str(config)]


def bare_envoy(target: str, port: int) -> dict[str, Any]:
    """The least of a configuration with which Envoy forwards gRPC: one listener, one route, one cluster."""
    host, number = host_port(target)

    def typed(kind: str, **fields: Any) -> dict[str, Any]:
        return {"@type": f"type.googleapis.com/envoy.extensions.{kind}", **fields}

    def socket_address(address: str, value: int) -> dict[str, Any]:
        return {"socket_address": {"address": address, "port_value": value}}

    route = {"match": {"prefix": "/"}, "route": {"cluster": "server", "timeout": "0s"}}
    manager = typed(
        "filters.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix="bare",
        codec_type="HTTP2",
        route_config={"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
        http_filters=[
            {"name": "envoy.filters.http.router", "typed_config": typed("filters.http.router.v3.Router")},
        ],
    )
    upstream = typed("upstreams.http.v3.HttpProtocolOptions", explicit_http_config={"http2_protocol_options": {}})
    endpoint = {"endpoint": {"address": socket_address(host, number)}}
    return {
        "static_resources": {
            "listeners": [
                {
                    "address": socket_address("127.0.0.1", port),
                    "filter_chains": [
                        {
                            "filters": [
                                {"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}
                            ]
                        }
                    ],
                }
            ],
            "clusters": [
                {
                    "name": "server",
                    "type": "STATIC",
                    "load_assignment": {"cluster_name": "server", "endpoints": [{"lb_endpoints": [endpoint]}]},
                    "typed_extension_protocol_options": {
                        "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": upstream
                    },
                }
            ],
        }
    }


def nginx(target: str, port: int, folder: Path) -> str:
    """nginx as one process that forwards gRPC over kept connections."""
    places = "".join(
        f"  {kind}_temp_path {folder / 'temp'};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    return f"""daemon off;
master_process off;
error_log stderr warn;
pid {folder / "nginx.pid"};
events {{ worker_connections 10000; }}
http {{
  access_log off;
{places}  upstream server {{ server {target}; keepalive 256; keepalive_requests 1000000000; }}
  server {{
    listen 127.0.0.1:{port} http2;
    http2_max_concurrent_streams 10000;
    keepalive_requests 1000000000;
    keepalive_timeout 1h;
    grpc_read_timeout 1h;
    location / {{ grpc_pass grpc://server; }}
  }}
}}
"""


def haproxy(target: str, port: int) -> str:
    """HAProxy as one thread that forwards HTTP/2."""
    return f"""global
  nbthread 1
  maxconn 1000
  tune.h2.max-concurrent-streams 10000
defaults
  mode http
  timeout connect 5s
  timeout client 1h
  timeout server 1h
frontend clients
  bind 127.0.0.1:{port} proto h2
  default_backend servers
backend servers
  server only {target} proto h2
"""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for(address: str, process: Process) -> None:
    """Something listens."""
    deadline = time.monotonic() + 20.0
    while time.monotonic() < deadline:
        process.check()
        with contextlib.suppress(OSError), socket.create_connection(host_port(address), timeout=1.0):
            return
        time.sleep(0.05)
    raise ContestError(f"{process.name} does not listen on {address} after 20 s: {process.tail()}")
