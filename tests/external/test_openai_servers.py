"""Real servers of vLLM, judged by the built-in experiment `vllm`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from tests.external.server_process import (
    answers,
    assert_counted_alike,
    free_port,
    run_experiment,
    running,
    settings,
)
from tests.fakes.hub_model import make

VLLM = os.environ.get("TAILGATE_VLLM_PYTHON", "")
CONTEXT = 512
ENVIRONMENT = {
    **{"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_CPU_KVCACHE_SPACE": "1"},
    # By default each vLLM binds its thread to the first processor, and the two would take turns there.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The settings of an eager and a compiled server, which start one after the other."""
    if not VLLM:
        pytest.skip("TAILGATE_VLLM_PYTHON names no interpreter with vLLM: make test-external")
    folder = tmp_path_factory.mktemp("vllm")
    model = make(folder / "model", hidden=128, inner=256)  # vLLM's attention needs 32 or 64 dimensions a head
    changes = ["traffic.rate=2"]
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
        yield settings(changes)


@pytest.mark.timeout(1200)
def test_a_run_judges_vllm_eager_against_compiled(vllm: list[str], tmp_path: Path) -> None:
    summary, pairs, run_dir = run_experiment(["vllm", *vllm], tmp_path, (0, 3))
    assert_counted_alike(pairs)
    assert not any("does not count its tokens" in note for arm in summary["arms"] for note in arm["external"]["notes"])
    # The weights are equal and float32: only near ties may differ by what a compiler rounds.
    [gate] = [gate for gate in summary["gates"] if gate["gate"] == "parity"]
    assert (gate["arm"], gate["verdict"]) == ("compiled", "PASS"), gate["reason"]
    assert "what was not checked" in (run_dir / "report.html").read_text()
