"""The bootstrap, as the real Envoy reads it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from servers.splitter.bootstrap import bootstrap
from servers.splitter.envoy import envoy_path
from servers.splitter.envoy_config import ArmTarget, SplitterConfig


def test_silent_streams_are_never_cut() -> None:
    config = bootstrap(SplitterConfig(arms=(ArmTarget(name="eager", backends=("127.0.0.1:1",)),)))
    (listener,) = config["static_resources"]["listeners"]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    assert manager["stream_idle_timeout"] == "0s"
    assert manager["common_http_protocol_options"] == {"idle_timeout": "0s"}
    routes = [route["route"] for route in manager["route_config"]["virtual_hosts"][0]["routes"] if "route" in route]
    assert [(route["timeout"], route["idle_timeout"]) for route in routes] == [("0s", "0s")] * 2
    assert not any("retry_policy" in route for route in routes)


@pytest.mark.parametrize(
    "config",
    [
        SplitterConfig(
            arms=(
                ArmTarget(name="eager", backends=("eager.tailgate.svc:50051", "[::1]:50051")),
                ArmTarget(name="Compiled_2.13", backends=("10.0.0.1:50051",), weight=0, shadow_percent=0.5),
            ),
            host="0.0.0.0",
            port=8080,
            stickiness="replica",
            access_log="/dev/null",
            health_interval_s=0.25,
        ),
        SplitterConfig(arms=(ArmTarget(name="eager", backends=("localhost:50051",)),), stickiness="off", host="::1"),
    ],
)
def test_envoy_accepts_the_written_bootstrap(config: SplitterConfig, tmp_path: Path) -> None:
    path = tmp_path / "envoy.json"
    path.write_text(json.dumps(bootstrap(config)))
    outcome = subprocess.run(
        [envoy_path(), "--mode", "validate", "--config-path", path, "--log-level", "warning"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stderr
    assert "deprecated" not in outcome.stderr.lower()
