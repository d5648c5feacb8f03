from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from loadtests.external.addresses import ExternalConfig, OpenAiOptions
from loadtests.external.client_security import SecurityConfig
from loadtests.generator.trial_config import TrialConfig
from servers.fields import ConfigError

ROOT = Path(__file__).resolve().parents[3]


def test_a_written_trial_is_read_back_as_it_was(tmp_path: Path) -> None:
    external = ExternalConfig(
        kind="openai",
        addresses=("http://a:1/v1", "http://b/v1"),
        model_name="llama",
        openai=OpenAiOptions(endpoint="chat", extra={"top_k": 1}),
    )
    config = TrialConfig(
        trial=3,
        arms=("eager", "vllm"),
        targets={"eager": "127.0.0.1:50051,127.0.0.1:50052"},
        external={"vllm": external},
        max_concurrency=None,
        prompts="chat",
        tokenizer="llama",
        security=SecurityConfig(token_env="TOKEN"),
    )
    config.write(tmp_path / "generator.json")
    assert TrialConfig.read(tmp_path / "generator.json") == config


def test_who_writes_a_trial_is_not_patched_by_gevent() -> None:
    code = "import sys, loadtests.generator.trial_config; sys.exit({'gevent', 'locust'} & set(sys.modules) != set())"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize("text", ["", "[" * 5000, "1" * 5000, "[]"])
def test_what_is_no_trial_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "generator.json").write_text(text)
    with pytest.raises(ConfigError, match=r"^trial config "):
        TrialConfig.read(tmp_path / "generator.json")
