"""Imported by a run before it starts: its splitter can delay and refuse requests by Envoy's own fault filter, and
clients reach it through a relay. The product has neither.

While Envoy runs, a runtime key of `key` holds the percentage of an arm's requests that are hit, 0 at first.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from servers.address import host_port, joined
from servers.launcher import launched
from servers.splitter import envoy
from servers.splitter.envoy_config import SplitterConfig
from tests.faults.relayed_arm import VARIABLE

DELAY_S = 0.3
UNAVAILABLE = 14
RELAY = "splitter.relay"
_original = envoy.bootstrap
_relays: dict[str, str] = {}


def key(arm: str, what: str) -> str:
    """The runtime key under which `what`, "delay" or "abort", hits so many percent of the arm's requests."""
    return f"faults.{arm}.{what}"


def with_faults(config: SplitterConfig, **options: Any) -> dict[str, Any]:
    """The bootstrap with a fault filter for each arm in front of the router."""
    document = _original(config, **options)
    kind = "type.googleapis.com/envoy.extensions.filters.http.fault.v3.HTTPFault"
    filters = [
        {
            "name": f"envoy.filters.http.fault.{arm.name}",
            "typed_config": {
                "@type": kind,
                "upstream_cluster": arm.name,
                "delay": {"fixed_delay": f"{DELAY_S}s", "percentage": {"numerator": 0}},
                "abort": {"grpc_status": UNAVAILABLE, "percentage": {"numerator": 0}},
                "delay_percent_runtime": key(arm.name, "delay"),
                "abort_percent_runtime": key(arm.name, "abort"),
            },
        }
        for arm in config.arms
    ]
    listener = document["static_resources"]["listeners"][0]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    manager["http_filters"] = [*filters, *manager["http_filters"]]
    return document


def relayed(address: str) -> str:
    """Where a relay listens that leads to the address."""
    if address not in _relays:
        command = launched([sys.executable, "-m", "tests.faults.relay", address])
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        places = json.loads(process.stdout.readline())
        (Path(os.environ[VARIABLE]) / RELAY).write_text(str(places["orders"]))
        _relays[address] = joined(host_port(address)[0], places["port"])
    return _relays[address]


def install() -> None:
    """Every splitter that this process starts from now on is so."""
    direct = envoy.Envoy.target.fget
    assert direct is not None
    envoy.bootstrap = with_faults  # type: ignore[assignment]
    envoy.Envoy.target = property(lambda self: relayed(direct(self)))  # type: ignore[assignment, method-assign]
