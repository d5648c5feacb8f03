"""Which replicas a running split knows of, arm by arm."""

from __future__ import annotations

import json

from servers.address import joined
from servers.splitter.admin import Admin


def replica_addresses(admin: Admin) -> dict[str, tuple[str, ...]]:
    """{arm: "host:port" of each replica}, as Envoy has resolved them. Raises SplitterError when no split answers."""
    text = admin.get("/clusters?format=json")
    with admin.answering("replicas"):
        return {
            cluster["name"]: tuple(_address(host) for host in cluster.get("host_statuses", []))
            for cluster in json.loads(text)["cluster_statuses"]
            if "@" not in cluster["name"]  # ways that copies take, see bootstrap.py
        }


def _address(host: dict[str, dict[str, dict[str, str | int]]]) -> str:
    socket = host["address"]["socket_address"]
    return joined(str(socket["address"]), int(socket["port_value"]))
