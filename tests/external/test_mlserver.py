"""A real MLServer over the Open Inference Protocol: one of its streams beside another, and beside whole answers."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.external.judged import faults, pairs
from tests.external.server_process import answers, free_port, running
from tests.fakes.whole_run import console_script, last_line, requests

PYTHON = os.environ.get("TAILGATE_MLSERVER_PYTHON", "")
pytestmark = [
    pytest.mark.skipif(
        not PYTHON, reason="TAILGATE_MLSERVER_PYTHON names no interpreter with MLServer: make test-external"
    ),
]
ARM = """
[[arms]]
name = "{name}"
kind = "oip"
control = {control}
address = "grpc://127.0.0.1:{port}"
model_name = "{model}"
[arms.oip]
stream = "{stream}"
stream_tensor = ""
"""
EXPERIMENT = """
name = "mlserver"
seed = 11
compare_models = true
[engine]
max_prompt_tokens = 64
max_new_tokens = 16
[traffic]
duration_s = 15
rate = 4
length_scale = 0.08
block_s = 2
timeout_s = 20
[bed]
reference_s = 0
"""
ARMS = (("streamed", "words", "plain"), ("again", "words-again", "plain"), ("whole", "words", "off"))


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Where the server speaks gRPC. It has the model twice, by two names."""
    folder = tmp_path_factory.mktemp("mlserver")
    http, grpc, metrics = free_port(), free_port(), free_port()
    ports = {"http_port": http, "grpc_port": grpc, "metrics_port": metrics, "host": "127.0.0.1"}
    # Streams need the model in the server's own process.
    (folder / "settings.json").write_text(json.dumps({**ports, "parallel_workers": 0}))
    for model in ("words", "words-again"):
        (folder / model).mkdir()
        tensors = {
            "inputs": [
                {"name": name, "datatype": "BYTES", "shape": [1]} for name in ("text_input", "sampling_parameters")
            ],
            "outputs": [{"name": "text_output", "datatype": "BYTES", "shape": [1]}],
        }
        settings = {"name": model, "implementation": "words_runtime.Words", **tensors}
        (folder / model / "model-settings.json").write_text(json.dumps(settings))
    command = [PYTHON, "-c", "from mlserver.cli.main import main; main()", "start", str(folder)]
    ready = f"http://127.0.0.1:{http}/v2/health/ready"
    with running(
        command,
        log=folder / "server.log",
        ready=lambda: answers(ready),
        timeout_s=120,
        environment={"PYTHONPATH": str(Path(__file__).parent)},
    ):
        yield grpc


def write(folder: Path, port: int, *arms: tuple[str, str, str]) -> None:
    tables = [
        ARM.format(name=name, model=model, stream=stream, port=port, control="true" if number == 0 else "false")
        for number, (name, model, stream) in enumerate(arms)
    ]
    (folder / "mlserver.toml").write_text(EXPERIMENT + "".join(tables))


def test_a_run_judges_streams_and_whole_answers(port: int, tmp_path: Path) -> None:
    write(tmp_path, port, *ARMS)
    done = console_script(["run", "mlserver.toml", "--out", "out"], tmp_path)
    line = last_line(done)
    assert done.returncode in (3, 99), done.stderr
    assert line["complete"], done.stderr
    run_dir = tmp_path / line["run_dir"]
    rows = requests(run_dir)
    assert {row["status"] for row in rows} == {"OK"}
    for pair in pairs(rows):
        assert set(pair) == {"streamed", "again", "whole"}
        assert {len(row["token_ns"]) for row in (pair["streamed"], pair["again"])} == {pair["whole"]["max_tokens"]}
        assert len(pair["whole"]["token_ns"]) == 1
    summary = json.loads((run_dir / "summary.json").read_text())
    assert faults(summary) == []


@pytest.mark.parametrize(
    ("arm", "says"),
    [
        (("streamed", "words", "triton"), 'set oip.stream = "plain"'),
        (("streamed", "word", "plain"), "Model word with version not found: see model_name"),
    ],
)
def test_a_wrong_setting_ends_the_run_with_one_line(
    port: int, arm: tuple[str, str, str], says: str, tmp_path: Path
) -> None:
    write(tmp_path, port, arm, ARMS[1])
    done = console_script(["run", "mlserver.toml", "--set", "trials.ready_timeout_s=20"], tmp_path)
    assert done.returncode == 1
    assert says in done.stderr.splitlines()[-1]
