from __future__ import annotations

import json
from pathlib import Path

import pytest

from analysis.records.schemas import REQUESTS, STEPS
from analysis.records.tables import read_table
from loadtests.commands.main import main
from loadtests.commands.parity import vector_table
from loadtests.trials.parity_processes import PARITY_COMMAND
from loadtests.trials.served_parity import PROMPTS
from tests.loadtests.trials.test_parity_processes import experiment, measured, run


def test_a_run_goes_on_after_parity_and_what_was_found_reaches_the_report(tmp_path: Path) -> None:
    """The padded arm gives other tokens under traffic than it was measured to give."""
    what = experiment("float32", parity={"full": True}, trials={"starting_at_once": 2})
    flags = ["--noise", "eager=1e-6", "--noise", "padded=1e-6"]
    outcome = run(what, tmp_path, *flags, arm_flags=["--token", "padded-0=9"])
    assert outcome.complete, outcome.error
    assert json.loads((outcome.run_dir / "parity.json").read_text())["verdict"] == "PASS"
    folder = outcome.run_dir / "trial-01"
    answers = json.loads((folder / "trial.json").read_text())["answers"]
    assert [(row["replica"], row["same"], row["of"]) for row in answers["replicas"]] == [
        ("eager-0", PROMPTS, PROMPTS),
        ("padded-0", 0, PROMPTS),
    ]
    # nothing of it is in the records
    requests = sum(read_table(path, REQUESTS)[0].num_rows for path in folder.glob("requests*.arrow"))
    assert read_table(folder / "steps.arrow", STEPS)[0].num_rows == requests

    assert main(["analyze", str(outcome.run_dir)]) == 99
    summary = json.loads((outcome.run_dir / "summary.json").read_text())
    (gate,) = [gate for gate in summary["gates"] if gate["kind"] == "parity"]
    assert gate["verdict"] == "FAIL"
    assert f"0 of {PROMPTS} greedy answers of padded after the traffic are the control's" in gate["reason"]
    assert "It computes what the control does" in gate["reason"]
    assert summary["headline"].startswith("padded must not replace eager: 0 of")
    for report in ("report.html", "report.md"):
        assert "Do the arms compute the same?" in (outcome.run_dir / report).read_text()


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
        "float32",
        model={"id": "random:bert-tiny", "task": "embed"},
        engine={"slots": 4, "max_prompt_tokens": 24, "max_wait_ms": 2.0},
    )
    outcome = measured(what, tmp_path / "whole", command=PARITY_COMMAND)
    assert (outcome["verdict"], outcome["exit_code"], outcome["width"]) == ("PASS", 0, 128)
    assert outcome["rows"] > 2 * outcome["texts"] > 0
    (arm,) = outcome["arms"]
    assert arm["figures"]["cosine"]["least"] > 0.9999
    assert not list(tmp_path.rglob("vectors.npy"))
    table = vector_table(outcome)
    assert f"{outcome['texts']} texts, alone and in batches" in table
    assert "padded  PASS" in table
