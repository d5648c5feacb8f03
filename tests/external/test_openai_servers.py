"""Real servers of llama.cpp and vLLM, judged by the built-in experiments `external` and `vllm`."""

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
    make_gguf,
    run_experiment,
    running,
    settings,
)
from tests.fakes.hub_model import make
from tests.fakes.whole_run import console_script

LLAMA_CPP = os.environ.get("TAILGATE_LLAMA_SERVER", "")
VLLM = os.environ.get("TAILGATE_VLLM_PYTHON", "")
CONTEXT = 512
ENVIRONMENT = {
    **{"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_CPU_KVCACHE_SPACE": "1"},
    # By default each vLLM binds its thread to the first processor, and the two would take turns there.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


@pytest.fixture(scope="module")
def llama_cpp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The settings of two servers with different numbers of slots, which share the server's context."""
    if not LLAMA_CPP:
        pytest.skip("TAILGATE_LLAMA_SERVER is no llama-server: make test-external")
    folder = tmp_path_factory.mktemp("llama-cpp")
    tokenizer = make(folder / "model", hidden=64, inner=128)
    model = make_gguf(folder / "model.gguf", hidden=64, inner=128)
    changes = ["traffic.rate=3"]
    with ExitStack() as servers:
        for arm, slots in {"current": 4, "candidate": 2}.items():
            port = free_port()
            command = [LLAMA_CPP, "--model", str(model), "--host", "127.0.0.1", "--port", str(port), "--threads", "1"]
            command += ["--parallel", str(slots), "--ctx-size", str(slots * CONTEXT)]
            ready = partial(answers, f"http://127.0.0.1:{port}/health")
            servers.enter_context(running(command, log=folder / f"{arm}.log", ready=ready, timeout_s=60))
            changes += [f"arms.{arm}.address=http://127.0.0.1:{port}/v1", f"arms.{arm}.model_name=model.gguf"]
            changes += [f"arms.{arm}.openai.tokenizer={tokenizer}"]
        yield settings(changes)


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


def test_a_run_judges_two_servers_of_llama_cpp(llama_cpp: list[str], tmp_path: Path) -> None:
    summary, pairs, _ = run_experiment(["external", *llama_cpp], tmp_path, (0, 3, 99))  # more slots may be worse
    assert_counted_alike(pairs)
    assert not any("does not count its tokens" in note for arm in summary["arms"] for note in arm["external"]["notes"])


def test_requests_beyond_the_context_of_a_slot_end_the_run_before_its_load(
    llama_cpp: list[str], tmp_path: Path
) -> None:
    longer = ["--set", "engine.max_prompt_tokens=2048", "--set", "traffic.length_scale=1"]
    done = console_script(["run", "external", *llama_cpp, *longer, "--out", "out"], tmp_path)
    assert done.returncode == 1
    assert f"takes {CONTEXT} tokens" in done.stderr.splitlines()[-1]


@pytest.mark.timeout(1200)
def test_a_run_judges_vllm_eager_against_compiled(vllm: list[str], tmp_path: Path) -> None:
    summary, pairs, run_dir = run_experiment(["vllm", *vllm], tmp_path, (0, 3))
    assert_counted_alike(pairs)
    assert not any("does not count its tokens" in note for arm in summary["arms"] for note in arm["external"]["notes"])
    # The weights are equal and float32: only near ties may differ by what a compiler rounds.
    [gate] = [gate for gate in summary["gates"] if gate["gate"] == "parity"]
    assert (gate["arm"], gate["verdict"]) == ("compiled", "PASS"), gate["reason"]
    assert "what was not checked" in (run_dir / "report.html").read_text()
