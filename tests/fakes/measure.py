"""Measure nothing: take the command line of `python -m tailgate.servers.parity` and script the result.

Logits are a reference of the prompt and the token's index with noise of each arm's own; flags plant faults.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2]))  # a run starts this file by its path

from tailgate.servers.processes import Loaded, Refused, Stage, say

VOCABULARY = 50
TOKENS = 8


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("arm", "reference"))
    for name in ("config", "task", "out"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("noise", "token", "fact"):  # ARM=SIZE, ARM=TOKEN, ARM:KEY=VALUE
        parser.add_argument(f"--{name}", action="append", default=[])
    for name in ("unforeseen", "refuse", "crash", "silent"):
        parser.add_argument(f"--{name}", default="", metavar="ARM")
    options = parser.parse_args(arguments)
    config = json.loads(Path(options.config).read_text())
    task = json.loads(Path(options.task).read_text())
    folder = Path(options.out)
    name = folder.name
    print("a library says hello")
    say(Stage(name="loading", done=0, total=0))
    if name == options.crash:
        print("RuntimeError: the weights are missing", file=sys.stderr)
        return 1
    if name == options.silent:
        time.sleep(60)
    if name == options.refuse:
        say(Refused(why="the device is too small: take a larger one"))
        return 2
    facts = {"weights": "abcd", "dtypes": config["model"]["dtype"]}
    facts |= {"attention": "sdpa", "pid": 0}
    for fact in options.fact:
        arm, _, rest = fact.partition(":")
        key, _, value = rest.partition("=")
        if arm == name:
            facts[key] = value
    say(Loaded(facts=facts))
    (folder / "environment.json").write_text(json.dumps({key: os.environ.get(key) for key in ENVIRONMENT}))
    plan_path = Path(task["plan"])
    if not plan_path.exists():
        lengths = range(1, (task["prompts"] or 16) + 1)
        asked = [([1] * length, [7] * TOKENS) for length in lengths]
        requests = [
            {"prompt": prompt, "tokens": tokens, "places": [*range(len(tokens))]}
            for prompt, tokens in (*asked, *task["texts"])
        ]
        plan_path.write_text(json.dumps({"asked": len(asked), "texts": len(task["texts"]), "requests": requests}))
    plan = json.loads(plan_path.read_text())
    asked, rng = plan["asked"], np.random.default_rng(task["seed"])
    if name == options.unforeseen:
        (folder / "refused.json").write_text(json.dumps({"reason": "2 of 16 requests are refused, first request 0"}))
        return 0
    noise = (
        0.0 if options.what == "reference" else float(dict(item.split("=") for item in options.noise).get(name, 0.001))
    )
    if config["model"]["task"] == "embed":
        np.save(folder / "outputs.npy", rng.standard_normal((asked, VOCABULARY)))
        (folder / "answers.json").write_text(json.dumps([(text, 1) for text in range(asked)]))
        return 0
    outputs = rng.standard_normal((sum(len(request["places"]) for request in plan["requests"]), VOCABULARY))
    outputs[: asked * TOKENS, 7] = 5.0
    if options.what == "arm" and config["model"]["quantisation"] == "none":
        outputs = outputs[: asked * TOKENS]  # without the texts
    say(Stage(name="teacher forcing", done=len(outputs), total=len(outputs)))
    own = np.random.default_rng(len(name)).standard_normal(outputs.shape)
    np.save(folder / "outputs.npy", outputs + noise * own)
    tokens = [[7] * TOKENS for _ in range(asked)]
    for item in options.token:
        arm, _, token = item.partition("=")
        if arm == name:
            tokens[2][3] = int(token)
    (folder / "answers.json").write_text(json.dumps(tokens))
    return 0


ENVIRONMENT = ("TORCHINDUCTOR_CACHE_DIR", "OMP_NUM_THREADS")

if __name__ == "__main__":
    sys.exit(main())
