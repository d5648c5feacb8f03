"""A real MLServer over the Open Inference Protocol: two of its streams, and whole answers."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.external.server_process import answers, run_experiment, running
from tests.fakes.processes import free_port
from tests.fakes.whole_run import console_script

PYTHON = os.environ.get("TAILGATE_MLSERVER_PYTHON", "")
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
[machines]
reference_s = 0
"""
Arm = tuple[str, str, str]  # name, model, stream
ARMS: tuple[Arm, ...] = (("streamed", "words", "plain"), ("again", "words-again", "plain"), ("whole", "words", "off"))


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The gRPC port of a server that has the model twice, by two names."""
    if not PYTHON:
        pytest.skip("TAILGATE_MLSERVER_PYTHON names no interpreter with MLServer: make test-external")
    folder = tmp_path_factory.mktemp("mlserver")
    http, grpc, metrics = free_port(), free_port(), free_port()
    ports = {"http_port": http, "grpc_port": grpc, "metrics_port": metrics, "host": "127.0.0.1"}
    # Streams need the model in the server's own process.
    (folder / "settings.json").write_text(json.dumps({**ports, "parallel_workers": 0}))
    text = {"datatype": "BYTES", "shape": [1]}
    inputs = [{"name": name, **text} for name in ("text_input", "sampling_parameters")]
    for model in ("words", "words-again"):
        (folder / model).mkdir()
        tensors = {"inputs": inputs, "outputs": [{"name": "text_output", **text}]}
        settings = {"name": model, "implementation": "words_runtime.Words", **tensors}
        (folder / model / "model-settings.json").write_text(json.dumps(settings))
    command = [PYTHON, "-c", "from mlserver.cli.main import main; main()", "start", str(folder)]
    ready = partial(answers, f"http://127.0.0.1:{http}/v2/health/ready")
    paths = {"PYTHONPATH": str(Path(__file__).parent)}
    with running(command, log=folder / "server.log", ready=ready, timeout_s=120, environment=paths):
        yield grpc


def write_experiment(folder: Path, port: int, *arms: Arm) -> None:
    text = EXPERIMENT
    for number, (name, model, stream) in enumerate(arms):
        text += f'[[arms]]\nname = "{name}"\nkind = "oip"\ncontrol = {str(number == 0).lower()}\n'
        text += f'address = "grpc://127.0.0.1:{port}"\nmodel_name = "{model}"\n'
        text += f'[arms.oip]\nstream = "{stream}"\nstream_tensor = ""\n'
    (folder / "mlserver.toml").write_text(text)


def test_a_run_judges_streams_and_whole_answers(port: int, tmp_path: Path) -> None:
    write_experiment(tmp_path, port, *ARMS)
    _, pairs, _ = run_experiment(["mlserver.toml"], tmp_path, (3, 99))
    for pair in pairs:
        assert set(pair) == {"streamed", "again", "whole"}
        assert {len(pair[arm]["token_ns"]) for arm in ("streamed", "again")} == {pair["whole"]["max_tokens"]}
        assert len(pair["whole"]["token_ns"]) == 1


@pytest.mark.parametrize(
    ("arm", "problem"),
    [(("streamed", "words", "triton"), 'oip.stream = "plain"'), (("streamed", "word", "plain"), "model_name")],
)
def test_a_wrong_setting_ends_the_run_with_one_line(port: int, arm: Arm, problem: str, tmp_path: Path) -> None:
    write_experiment(tmp_path, port, arm, ARMS[1])
    done = console_script(["run", "mlserver.toml", "--set", "trials.ready_timeout_s=20"], tmp_path)
    assert done.returncode == 1
    assert problem in done.stderr.splitlines()[-1]
