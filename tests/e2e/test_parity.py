"""Parity of real models, measured by the engine in processes of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtests.commands.main import main
from loadtests.commands.parity import vector_table
from loadtests.trials.parity_processes import ParityRun
from tests.fakes.whole_run import experiment


@pytest.mark.timeout(900)
def test_parity_of_the_real_model_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Processes, caches, reference and judgement as users have them; padding alone, which needs no compiler."""
    path = tmp_path / "padding.toml"
    path.write_text(
        'name = "padding"\n[model]\ndevice = "cpu"\ndtype = "bfloat16"\n'
        "[engine]\nthreads = 1\nmax_prompt_tokens = 64\nmax_new_tokens = 16\n"
        '[[arms]]\npreset = "eager"\ncontrol = true\n[[arms]]\npreset = "eager-padded"\n'
        # never read: parity sends no traffic
        '[traffic]\narrivals = "trace"\nworkload = "trace"\n'
    )
    code = main(["parity", str(path), "--out", str(tmp_path / "out")])
    out, _ = capsys.readouterr()
    line = json.loads(out.splitlines()[-1])
    assert (code, line["verdict"], line["exit_code"], line["arms"]) == (0, "PASS", 0, {"eager-padded": "PASS"}), out
    outcome = json.loads(Path(line["report"]).read_text())
    assert outcome["facts"]["eager"] == outcome["facts"]["eager-padded"]
    assert outcome["facts"]["eager"]["dtypes"] == "bfloat16"
    assert 0.001 < outcome["control"]["figures"]["error"]["median"] < 0.1


@pytest.mark.timeout(900)
def test_encoders_are_measured_by_the_engine_and_judged_by_their_vectors(tmp_path: Path) -> None:
    what = experiment(
        model={"id": "random:bert-tiny", "task": "embed"},
        engine={"threads": 1, "slots": 4, "max_prompt_tokens": 24, "max_new_tokens": 128, "max_wait_ms": 2.0},
        arms=[{"name": "padded", "preset": "eager-padded"}, {"name": "eager", "preset": "eager", "control": True}],
    )
    outcome = ParityRun(what, folder=tmp_path / "whole", shared_cache=tmp_path / "cache").run()
    assert (outcome["verdict"], outcome["exit_code"], outcome["width"]) == ("PASS", 0, 128)
    assert outcome["rows"] > 2 * outcome["texts"] > 0
    (arm,) = outcome["arms"]
    assert arm["figures"]["cosine"]["least"] > 0.9999
    assert not list(tmp_path.rglob("vectors.npy"))
    table = vector_table(outcome)
    assert f"{outcome['texts']} texts, alone and in batches" in table
    assert "padded  PASS" in table
