"""A real vLLM on the CPU, once eager and once compiled: what the built-in experiment of that name makes of the two."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.external.judged import faults, pairs
from tests.external.server_process import answers, free_port, running
from tests.fakes.hub_model import make
from tests.fakes.whole_run import console_script, last_line, requests

PYTHON = os.environ.get("TAILGATE_VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not PYTHON, reason="TAILGATE_VLLM_PYTHON names no interpreter with vLLM: make test-external"),
]
# By itself each vLLM binds its thread to the machine's first processor, and the two would take turns there.
ENVIRONMENT = {
    **{"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"},
    **{"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
}
LONGEST = 512


@pytest.fixture(scope="module")
def arms(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, str], Path]]:
    """The addresses of both servers, by arm, and the model's folder. One starts after the other."""
    folder = tmp_path_factory.mktemp("vllm")
    model = make(folder / "model", hidden=128, inner=256)  # 64 dimensions a head: vLLM's attention knows no 16
    addresses: dict[str, str] = {}
    with ExitStack() as servers:
        for arm, options in (("eager", ["--enforce-eager"]), ("compiled", [])):
            port = free_port()
            command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *options]
            command += ["--dtype", "float32", "--max-model-len", str(LONGEST), "--max-num-seqs", "16"]
            command += ["--host", "127.0.0.1", "--port", str(port)]
            ready = f"http://127.0.0.1:{port}/health"
            started = running(
                command,
                log=folder / f"{arm}.log",
                ready=lambda ready=ready: answers(ready),
                timeout_s=500,
                environment=ENVIRONMENT,
            )
            servers.enter_context(started)
            addresses[arm] = f"http://127.0.0.1:{port}/v1"
        yield addresses, model


def settings(addresses: dict[str, str], model: Path) -> list[str]:
    changes = ["engine.max_prompt_tokens=256", "engine.max_new_tokens=64", "traffic.length_scale=0.1"]
    changes += ["traffic.duration_s=16", "traffic.block_s=2", "traffic.rate=2", "bed.reference_s=0"]
    for arm, address in addresses.items():
        changes += [f"arms.{arm}.address={address}", f"arms.{arm}.model_name={model}"]
        changes += [f"arms.{arm}.openai.tokenizer={model}"]
    return [word for change in changes for word in ("--set", change)]


def test_a_run_judges_eager_against_compiled(arms: tuple[dict[str, str], Path], tmp_path: Path) -> None:
    addresses, model = arms
    done = console_script(["run", "vllm", *settings(addresses, model), "--out", "out"], tmp_path)
    line = last_line(done)
    assert done.returncode in (0, 3), done.stderr
    assert line["complete"], done.stderr
    run_dir = tmp_path / line["run_dir"]

    rows = requests(run_dir)
    assert len(rows) > 20
    assert {row["status"] for row in rows} == {"OK"}
    for pair in pairs(rows):
        assert set(pair) == {"eager", "compiled"}
        assert len({row["prompt_tokens"] for row in pair.values()}) == 1
        for row in pair.values():
            # ignore_eos held, by the server's own count, which came with each chunk
            assert row["output_tokens"] == row["max_tokens"] == len(row["token_ns"])

    summary = json.loads((run_dir / "summary.json").read_text())
    assert all(arm["external"]["counts_tokens"] for arm in summary["arms"])
    assert faults(summary) == []

    # Equal weights in float32: whatever compiling rounds otherwise turns near ties at most.
    [gate] = [gate for gate in summary["gates"] if gate["gate"] == "parity"]
    assert (gate["arm"], gate["verdict"]) == ("compiled", "PASS"), gate["reason"]
    asked = {arm["name"]: arm.get("asked") for arm in summary["parity"]["arms"]}["compiled"]
    for row in asked:
        assert (row["answered"], row["told"], row["control_same"], row["apart"]) == (48, True, 48, 0)
        assert row["shift"]["mean"] < 0.001
    print([(row["when"], row["same"], row["departs"], row["lead"], row["shift"]) for row in asked])
    assert "External arms: what was not checked" in (run_dir / "report.md").read_text()
    assert "<html" in (run_dir / "report.html").read_text()
