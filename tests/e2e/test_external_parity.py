"""Two servers of somebody else are asked the same prompts beside the load: equal weights, and other weights."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from analysis.summary.summary import analyze
from benchmarks.simulation.greedy import Server
from tests.e2e.test_run import last_line, with_fake_arms
from tests.fakes.greedy_server import GreedyServer, serving

EXPERIMENT = """
name = "others"
seed = 5
compare_models = true
[engine]
max_prompt_tokens = 64
max_new_tokens = 16
[[arms]]
name = "eager"
kind = "openai"
address = "{control}"
model_name = "llama"
control = true
token_env = "PARITY_TOKEN"
[[arms]]
name = "compiled"
kind = "openai"
address = "{same}"
model_name = "llama"
[[arms]]
name = "other"
kind = "openai"
address = "{other}"
model_name = "llama"
[traffic]
duration_s = 3
rate = 4
length_scale = 0.08
block_s = 1
timeout_s = 20
"""
SECRET = "s3cret-parity-token"


def test_equal_weights_pass_parity_and_other_weights_fail_it(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("PARITY_TOKEN", SECRET)
    control = GreedyServer(Server(kernel=0.04), token=SECRET)
    same = GreedyServer(Server(kernel=0.04, name="compiled"))
    other = GreedyServer(Server(weights="two"))
    with serving(control) as first, serving(same) as second, serving(other) as third:
        (tmp_path / "others.toml").write_text(EXPERIMENT.format(control=first, same=second, other=third))
        done = with_fake_arms(["run", "others.toml", "--out", "out"], tmp_path)
    line = last_line(done)
    assert (done.returncode, line["verdict"], line["complete"]) == (99, "FAIL", True), done.stderr
    run_dir = tmp_path / line["run_dir"]

    summary = json.loads((run_dir / "summary.json").read_text())
    gates = {gate["arm"]: gate for gate in summary["gates"] if gate["gate"] == "parity"}
    assert {arm: gate["verdict"] for arm, gate in gates.items()} == {"compiled": "PASS", "other": "FAIL"}, gates
    assert "of 48 greedy answers of compiled before the load are the control's" in gates["compiled"]["reason"]
    assert "may get another answer unseen" in gates["compiled"]["reason"]
    assert "which is no near tie" in gates["other"]["reason"]
    asked = {arm["name"]: arm.get("asked") for arm in summary["parity"]["arms"]}
    assert asked["eager"] is None
    assert [row["when"] for row in asked["other"]] == ["before", "after"]
    assert all((row["answered"], row["control_same"], row["told"]) == (48, 48, True) for row in asked["other"])

    for name in ("report.md", "report.html"):
        text = (run_dir / name).read_text()
        assert "Do the arms compute the same?" in text
        assert "greedy answers before the load" in text.lower()
    # Greedy whatever the experiment says, of fixed seeds, in the words of the load.
    body = next(body for body in control.bodies if "logprobs" in body)
    assert (body["temperature"], body["logprobs"], body["max_tokens"]) == (0, 5, 16)

    files = [path for path in run_dir.rglob("*") if path.is_file()]
    assert {path.name for path in files if path.name.startswith("answers-")} == {
        *("answers-eager.json", "answers-compiled.json", "answers-other.json")
    }
    assert not any(SECRET.encode() in path.read_bytes() for path in files)
    assert SECRET not in done.stdout + done.stderr
    assert os.environ["PARITY_TOKEN"] == SECRET

    # Judged again from its records, it says the same.
    assert analyze(run_dir)["gates"] == summary["gates"]
    # Without a file that the trial wrote, nothing passes.
    (run_dir / "trial-01" / "answers-compiled.json").unlink()
    changed = analyze(run_dir)["gates"]
    lost = next(gate for gate in changed if (gate["arm"], gate["gate"]) == ("compiled", "parity"))
    assert (lost["verdict"], "answers of trial 1 are not there" in lost["reason"]) == ("INCONCLUSIVE", True)
