"""The ways from a client to a server: direct, bare Envoy, and Envoy as tailgate configures it."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.contest import ContestError, Cores, Process, process_cpu_s
from servers.address import host_port
from servers.splitter.envoy import Envoy, envoy_path
from servers.splitter.envoy_config import ArmTarget, SplitterConfig

PATHS: Final = ("direct", "envoy", "tailgate")


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to the server. `cpu_s` is the processor time of what stands in between, 0 for nothing."""

    address: str
    cpu_s: Callable[[], float]


def envoy_version() -> str:
    """Which Envoy is measured, in its own words."""
    command = [str(envoy_path()), "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    return done.stdout.partition("version:")[2].strip()


@contextmanager
def opened(name: str, target: str, *, folder: Path, cores: Cores) -> Iterator[Way]:
    """The way `name` to the server at `target`, ready for calls."""
    if name == "direct":
        yield Way(address=target, cpu_s=lambda: 0.0)
        return
    if name == "tailgate":
        config = SplitterConfig(arms=(ArmTarget(name="null", backends=(target,)),))
        with Envoy.start(config, log_path=folder / "tailgate.log", work_dir=folder) as envoy:
            for task in Path(f"/proc/{envoy.pid}/task").glob("*"):
                cores.settle(int(task.name), cores.server)
            envoy.wait_ready(20.0)
            pid = envoy.pid
            yield Way(address=envoy.target, cpu_s=lambda: process_cpu_s(pid))
        return
    (host, backend), port = host_port(target), _free_port()
    path = folder / "bare.yaml"
    path.write_text(BARE.format(port=port, host=host, backend=backend))
    workers = str(SplitterConfig.__dataclass_fields__["workers"].default)
    command = [str(envoy_path()), "--config-path", str(path), "--concurrency", workers]
    command += ["--log-level", "warning", "--disable-hot-restart"]
    with Process(name, command, folder=folder, cores=cores, core=cores.server) as process:
        address = f"127.0.0.1:{port}"
        _wait_for(address, process)
        yield Way(address=address, cpu_s=process.cpu_s)


# The least of a configuration with which Envoy forwards gRPC: one listener, one route, one cluster.
BARE: Final = """
static_resources:
  listeners:
  - address: {{socket_address: {{address: 127.0.0.1, port_value: {port}}}}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: bare
          codec_type: HTTP2
          route_config:
            virtual_hosts:
            - name: all
              domains: ["*"]
              routes: [{{match: {{prefix: /}}, route: {{cluster: server, timeout: 0s}}}}]
          http_filters:
          - name: envoy.filters.http.router
            typed_config: {{"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}}
  clusters:
  - name: server
    type: STATIC
    load_assignment:
      cluster_name: server
      endpoints:
      - lb_endpoints:
        - endpoint: {{address: {{socket_address: {{address: {host}, port_value: {backend}}}}}}}
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        explicit_http_config: {{http2_protocol_options: {{}}}}
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
    raise ContestError(f"{process.name} does not listen on {address} after 20 s: {process.log_tail()}")
