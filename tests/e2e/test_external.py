"""An external arm that is the real thing: transformers' own OpenAI-compatible server with a tiny model, on the CPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_run import last_line, requests, with_fake_arms
from tests.external.server_process import answers, free_port, running
from tests.fakes.hub_model import make

pytestmark = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("fastapi", "uvicorn", "openai")),
    reason="transformers serve: pip install fastapi uvicorn openai",
)

EXPERIMENT = """
name = "beside-transformers"
seed = 5
compare_models = true
[engine]
max_prompt_tokens = 64
max_new_tokens = 8
[[arms]]
name = "eager"
preset = "eager"
control = true
[[arms]]
name = "completions"
kind = "openai"
address = "{address}"
model_name = "{model}"
[arms.openai]
tokenizer = "{model}"
[[arms]]
name = "chat"
kind = "openai"
address = "{address}"
model_name = "{model}"
[arms.openai]
endpoint = "chat"
tokenizer = "{model}"
[traffic]
duration_s = 3
rate = 3
length_scale = 0.08
block_s = 1
timeout_s = 20
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    model = make(tmp_path_factory.mktemp("hub") / "tiny")
    port = free_port()
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", str(model), "--device", "cpu"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    health = f"http://127.0.0.1:{port}/health"
    log = model / "serve.log"
    offline = {"HF_HUB_OFFLINE": "1"}
    with running(command, log=log, ready=lambda: answers(health), timeout_s=60, environment=offline):
        yield f"http://127.0.0.1:{port}/v1", model


def test_run_judges_transformers_own_server_beside_an_arm_of_tailgates(
    served: tuple[str, Path], tmp_path: Path
) -> None:
    address, model = served
    (tmp_path / "external.toml").write_text(EXPERIMENT.format(address=address, model=model))
    done = with_fake_arms(["run", "external.toml", "--out", "out"], tmp_path)
    line = last_line(done)
    assert (done.returncode, line["verdict"], line["complete"]) == (3, "INCONCLUSIVE", True), done.stderr
    run_dir = tmp_path / line["run_dir"]

    rows = requests(run_dir)
    assert {row["status"] for row in rows} == {"OK"}
    by_pair: dict[str, dict[str, Any]] = {}
    for row in rows:
        by_pair.setdefault(row["pair_id"], {})[row["arm"]] = row
    for pair in by_pair.values():
        assert set(pair) == {"eager", "completions", "chat"}
        # by the server's own count, the chat template included
        assert {row["prompt_tokens"] for row in pair.values()} == {pair["eager"]["prompt_tokens"]}
        assert {row["output_tokens"] for row in pair.values()} == {pair["eager"]["max_tokens"]}
        assert len(pair["chat"]["token_ns"]) == pair["chat"]["output_tokens"]

    summary = json.loads((run_dir / "summary.json").read_text())
    arms = {arm["name"]: arm for arm in summary["arms"]}
    assert arms["eager"]["external"] is None
    for name in ("completions", "chat"):
        assert arms[name]["external"]["counts_tokens"]
        assert arms[name]["metrics"]["ttft"]["p99_ms"] > 0
        assert arms[name]["compile"]["recompiles"] is None
    unknown = {gate["verdict"] for gate in summary["gates"] if gate["kind"] == "recompile"}
    assert unknown == {"INCONCLUSIVE"}
    assert all(check["ok"] for check in summary["validity"] if check["check"] in ("equal work", "comparable"))
    assert "External arms: what was not checked" in (run_dir / "report.md").read_text()
