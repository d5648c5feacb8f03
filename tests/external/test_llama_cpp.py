"""Two real servers of llama.cpp: what the built-in experiment `external` makes of them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.external.gguf_model import make_gguf
from tests.external.judged import faults, pairs
from tests.external.server_process import answers, free_port, running
from tests.fakes.hub_model import make
from tests.fakes.whole_run import console_script, last_line, requests

SERVER = os.environ.get("TAILGATE_LLAMA_SERVER", "")
pytestmark = [
    pytest.mark.skipif(not SERVER, reason="TAILGATE_LLAMA_SERVER is no llama-server: make test-external"),
]
CONTEXT = 512
SIZES = {"hidden": 64, "inner": 128}
# The slots of each, which share its context.
SLOTS = {"current": 4, "candidate": 2}


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """What the experiment must be told of both servers, which run."""
    folder = tmp_path_factory.mktemp("llama-cpp")
    tokenizer = make(folder / "model", **SIZES)
    model = make_gguf(folder / "model.gguf", **SIZES)
    changes = ["engine.max_prompt_tokens=256", "engine.max_new_tokens=64", "traffic.length_scale=0.1"]
    changes += ["traffic.duration_s=16", "traffic.block_s=2", "traffic.rate=3", "bed.reference_s=0"]
    with ExitStack() as servers:
        for arm, slots in SLOTS.items():
            port = free_port()
            command = [SERVER, "--model", str(model), "--host", "127.0.0.1", "--port", str(port), "--threads", "1"]
            command += ["--parallel", str(slots), "--ctx-size", str(slots * CONTEXT)]
            health = f"http://127.0.0.1:{port}/health"
            servers.enter_context(
                running(command, log=folder / f"{arm}.log", ready=lambda url=health: answers(url), timeout_s=60)
            )
            changes += [f"arms.{arm}.address=http://127.0.0.1:{port}/v1", f"arms.{arm}.model_name=model.gguf"]
            changes += [f"arms.{arm}.openai.tokenizer={tokenizer}"]
        yield [word for change in changes for word in ("--set", change)]


def test_a_run_judges_both(settings: list[str], tmp_path: Path) -> None:
    done = console_script(["run", "external", *settings, "--out", "out"], tmp_path)
    line = last_line(done)
    # More slots may be the worse choice.
    assert done.returncode in (0, 3, 99), done.stderr
    assert line["complete"], done.stderr
    run_dir = tmp_path / line["run_dir"]
    rows = requests(run_dir)
    assert {row["status"] for row in rows} == {"OK"}
    for pair in pairs(rows):
        assert set(pair) == {"current", "candidate"}
        # by the servers' own count, whose vocabulary takes the words as the tokenizer does
        assert len({row["prompt_tokens"] for row in pair.values()}) == 1
        assert all(row["output_tokens"] == row["max_tokens"] == len(row["token_ns"]) for row in pair.values())
    summary = json.loads((run_dir / "summary.json").read_text())
    assert all(arm["external"]["counts_tokens"] for arm in summary["arms"])
    assert faults(summary) == []


def test_requests_beyond_the_context_of_a_slot_end_the_run_before_its_load(settings: list[str], tmp_path: Path) -> None:
    longer = ["--set", "engine.max_prompt_tokens=2048", "--set", "traffic.length_scale=1"]
    done = console_script(["run", "external", *settings, *longer, "--out", "out"], tmp_path)
    assert done.returncode == 1
    assert f"takes {CONTEXT} tokens for a prompt and its answer" in done.stderr.splitlines()[-1]
