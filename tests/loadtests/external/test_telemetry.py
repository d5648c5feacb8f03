"""Where an external arm tells of itself: what may be written, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loadtests.experiments.model import Experiment
from loadtests.experiments.reading import from_table, load
from loadtests.experiments.writing import to_table, to_toml
from loadtests.external.telemetry import SILENT, TelemetryConfig
from servers.fields import ConfigError

PAGE = "http://10.0.0.7:8000/metrics"
VLLM = {"name": "vllm", "kind": "openai", "model_name": "llama", "address": ["http://a:1/v1", "http://b:1/v1"]}


def experiment(telemetry: Any) -> Experiment:
    own = {"name": "eager", "preset": "eager", "control": True}
    arms = [own, {**VLLM, "telemetry": telemetry}]
    traffic = {"duration_s": 3, "rate": 6, "length_scale": 0.05, "block_s": 1}
    return from_table({"name": "external", "compare_models": True, "arms": arms, "traffic": traffic})


@pytest.mark.parametrize(
    ("telemetry", "read"),
    [
        ({}, SILENT),
        ({"metrics": PAGE}, TelemetryConfig(metrics=(PAGE,))),
        ({"metrics": [PAGE, "https://b/metrics"]}, TelemetryConfig(metrics=(PAGE, "https://b/metrics"))),
        ({"log": "/var/log/vllm.log"}, TelemetryConfig(log=("/var/log/vllm.log",))),
        ({"log_command": ["tail", "-F", "x"]}, TelemetryConfig(log_command=(("tail", "-F", "x"),))),
        (
            {"log_command": [["tail", "a"], ["tail", "b"]], "log_format": "sglang"},
            TelemetryConfig(log_command=(("tail", "a"), ("tail", "b")), log_format="sglang"),
        ),
    ],
)
def test_telemetry_is_read_and_written_back(telemetry: dict[str, Any], read: TelemetryConfig) -> None:
    found = experiment(telemetry)
    assert found.external_arms[0].external.telemetry == read
    assert from_table(to_table(found)) == found


@pytest.mark.parametrize(
    ("telemetry", "says"),
    [
        ("http://a/metrics", r"arms\[1\].telemetry is 'http://a/metrics': give a table \[arms.telemetry\]"),
        ({"metric": PAGE}, r"arms\[1\].telemetry.metric is unknown: .* takes metrics, log, log_command, log_format"),
        ({"metrics": "10.0.0.7:8000"}, r'arms\[1\].telemetry.metrics "10.0.0.7:8000" is no page: write it whole'),
        ({"metrics": "grpc://a/metrics"}, "is no page"),
        ({"metrics": "http://me:s3cret@a/metrics"}, "user or password"),
        ({"metrics": [PAGE, PAGE]}, "metrics names one thing twice"),
        ({"metrics": [PAGE, "http://b/", "http://c/"]}, "telemetry.metrics has 3 and address 2: give one for each"),
        ({"log": "a", "log_command": ["tail"]}, "log and log_command are both set"),
        ({"log": ""}, "log is empty"),
        ({"log_command": "tail -F x"}, "log_command is 'tail -F x': give a list"),
        ({"log_command": [""]}, "log_command is empty"),
        ({"log_command": ["tail", 3]}, r"telemetry.log_command is 'tail': give a list"),
        ({"log": "a", "log_format": "tgi"}, "use one of auto, vllm, torch, sglang"),
        ({"log_format": "vllm"}, "neither log nor log_command"),
    ],
)
def test_unusable_telemetry_says_what_to_write(telemetry: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        experiment(telemetry)
    assert "s3cret" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_log_that_is_not_there_ends_the_run_before_it_begins(tmp_path: Path) -> None:
    external = experiment({"log": str(tmp_path / "vllm.log")}).external_arms[0].external
    with pytest.raises(ConfigError, match=r'arm "vllm": telemetry.log ".*vllm.log" is no file: give the one'):
        external.check("vllm")
    (tmp_path / "vllm.log").touch()
    external.check("vllm")
    missing = experiment({"log_command": ["no-such-program"]}).external_arms[0].external
    with pytest.raises(ConfigError, match=r'telemetry.log_command "no-such-program" is no program here'):
        missing.check("vllm")


def test_a_log_is_found_beside_the_experiment(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(to_toml(experiment({"log": ["a.log", "../b.log"]})))
    telemetry = load(path).external_arms[0].external.telemetry
    assert telemetry.log == (str(tmp_path / "a.log"), str(tmp_path.parent / "b.log"))
