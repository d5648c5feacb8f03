"""Real servers of vLLM, judged by the built-in experiment `vllm`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tailgate.analysis.checks.table import RULES
from tests.external.server_process import answers, running
from tests.fakes.hub_model import make
from tests.fakes.processes import free_port
from tests.fakes.whole_run import console_script, last_line, requests

# A run of seconds cannot pass the first ones; the others fail where two servers and their load share two processors.
EXCUSED = {rule.name for rule in RULES if rule.fixed_by_length} | {"block autocorrelation"}
EXCUSED |= {"other work", "interference", "load generator"}
VLLM = os.environ.get("TAILGATE_VLLM_PYTHON", "")
CONTEXT = 512
ENVIRONMENT = {
    **{"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_CPU_KVCACHE_SPACE": "1"},
    # By default each vLLM binds its thread to the first processor, and the two would take turns there.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The settings of 16 seconds with an eager and a compiled server, which start one after the other."""
    if not VLLM:
        pytest.skip("TAILGATE_VLLM_PYTHON names no interpreter with vLLM: make test-external")
    folder = tmp_path_factory.mktemp("vllm")
    model = make(folder / "model", hidden=128, inner=256)  # vLLM's attention needs 32 or 64 dimensions a head
    changes = ["engine.max_prompt_tokens=256", "engine.max_new_tokens=64", "traffic.length_scale=0.1"]
    changes += ["traffic.rate=2", "traffic.duration_s=16", "traffic.block_s=2", "machines.reference_s=0"]
    with ExitStack() as servers:
        for arm, options in (("eager", ["--enforce-eager"]), ("compiled", [])):
            port = free_port()
            command = [VLLM, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *options]
            command += ["--dtype", "float32", "--max-model-len", str(CONTEXT), "--max-num-seqs", "16"]
            command += ["--host", "127.0.0.1", "--port", str(port)]
            ready, log = partial(answers, f"http://127.0.0.1:{port}/health"), folder / f"{arm}.log"
            servers.enter_context(running(command, log=log, ready=ready, timeout_s=500, environment=ENVIRONMENT))
            changes += [f"arms.{arm}.address=http://127.0.0.1:{port}/v1", f"arms.{arm}.model_name={model}"]
            changes += [f"arms.{arm}.openai.tokenizer={model}"]
        yield [word for change in changes for word in ("--set", change)]


@pytest.mark.timeout(1200)
def test_a_run_judges_vllm_eager_against_compiled(vllm: list[str], tmp_path: Path) -> None:
    done = console_script(["run", "vllm", *vllm, "--out", "out"], tmp_path)
    line = last_line(done)
    assert done.returncode in (0, 3), done.stderr
    assert line["complete"], done.stderr
    run_dir = tmp_path / line["run_dir"]
    pairs: dict[str, list[dict[str, Any]]] = {}
    for row in requests(run_dir):
        assert row["status"] == "OK", row
        assert row["output_tokens"] == row["max_tokens"] == len(row["token_ns"])
        pairs.setdefault(row["pair_id"], []).append(row)
    assert len(pairs) > 10
    for one, other in pairs.values():
        assert (one["arm"] != other["arm"], one["prompt_tokens"]) == (True, other["prompt_tokens"])
    summary = json.loads((run_dir / "summary.json").read_text())
    assert [row for row in summary["validity"] if not row["ok"] and row["check"] not in EXCUSED] == []
    assert not any("does not count its tokens" in note for arm in summary["arms"] for note in arm["external"]["notes"])
    # The weights are equal and float32: only near ties may differ by what a compiler rounds.
    [gate] = [gate for gate in summary["gates"] if gate["gate"] == "parity"]
    assert (gate["arm"], gate["verdict"]) == ("compiled", "PASS"), gate["reason"]
    assert "what was not checked" in (run_dir / "report.html").read_text()
