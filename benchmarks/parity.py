"""How often `tailgate parity` calls equal arms unequal, and how large a fault it takes to be seen.

`python -m benchmarks.parity` prints one line a model and dtype, then one JSON object. Runs on the CPU, in this process.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import torch

from analysis.parity.judge import Answers, judge
from analysis.parity.outcome import ArmParity
from servers import parity, presets
from servers.compiler.recorder import CompileRecorder
from servers.config import ArmConfig, CompileConfig, Dtype, EngineConfig, ModelConfig
from servers.engine.runner import ModelRunner

ENGINE = EngineConfig(slots=8, max_prompt_tokens=192, max_new_tokens=48, threads=1)
FAULTS = (1e-6, 1e-5, 1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
COMPILED_SEEDS = 2  # a compile takes longer than all the rest

# Wider and deeper than random:tiny, and still quick on a CPU.
presets.RANDOM_PRESETS["middle"] = {
    **presets.RANDOM_PRESETS["tiny"],
    "vocab_size": 8192,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "initializer_range": 0.06,
}


def quiet(*_: object) -> None:
    """Progress is not shown."""


def measured(arm: ArmConfig, plan: parity.Plan | None, seed: int, fault: float = 0.0) -> tuple[Answers, parity.Plan]:
    """What the arm says; without a plan it makes one, as the control. `fault` scales one projection by 1 + fault."""
    torch._dynamo.reset()
    recorder = CompileRecorder()
    recorder.install()
    runner = ModelRunner(arm, recorder)
    runner.load()
    runner.warm_up(quiet)
    with torch.no_grad():
        runner.model.model.layers[1].mlp.down_proj.weight.mul_(1.0 + fault)
    given = plan or parity.make_plan([arm], vocab_size=runner.vocab_size, prompts=16, tokens=24, seed=seed)
    free = parity.free_run(arm, runner, recorder, given)
    if plan is None:
        given = replace(given, continuations=tuple(map(tuple, free)))
    logits = np.zeros((given.positions, runner.vocab_size), dtype=np.float32)
    parity.forced_logits(runner, given, logits, quiet)
    free.append(parity.late_logits(runner, given, logits[sum(given.counts) :], quiet))
    recorder.remove()
    return Answers(name=arm.name, tokens=free, logits=logits), given


def calibrate(model_id: str, dtype: Dtype, seeds: int) -> dict[str, Any]:
    """Verdicts and ratios of equal arms and of faulty ones."""
    equal: dict[str, list[ArmParity]] = {"eager-padded": [], "compiled-padded": []}
    faulty: dict[float, list[ArmParity]] = {fault: [] for fault in FAULTS}
    for seed in range(seeds):
        model = ModelConfig(id=model_id, dtype=dtype, device="cpu", seed=seed)
        arms = {name: ArmConfig.from_preset(name, model=model, engine=ENGINE) for name in ("eager", *equal)}
        plain = CompileConfig(enabled=True, dynamic=False)
        arms["compiled-padded"] = replace(arms["compiled-padded"], compile=plain)
        control, plan = measured(arms["eager"], None, seed)
        reference = np.zeros(control.logits.shape)
        parity.reference_logits(parity.load_reference(model), plan, reference, quiet)
        answers = [(equal[name], measured(arms[name], plan, seed)[0]) for name in equal if name != "compiled-padded"]
        if seed < COMPILED_SEEDS:
            answers.append((equal["compiled-padded"], measured(arms["compiled-padded"], plan, seed)[0]))
        answers += [(judged, measured(arms["eager-padded"], plan, seed, fault)[0]) for fault, judged in faulty.items()]
        lengths = [len(prompt) for prompt in (*plan.prompts, plan.late_prompt)]
        outcome = judge(control, [arm for _, arm in answers], reference, dtype=dtype, prompts=lengths, seed=seed)
        for (judged, _), arm in zip(answers, outcome.arms, strict=True):
            judged.append(arm)
    return {
        "model": model_id,
        "dtype": dtype,
        "equal": {name: summary(judged) for name, judged in equal.items()},
        "faulty": {f"{fault:g}": summary(judged) for fault, judged in faulty.items()},
    }


def summary(judged: Sequence[ArmParity]) -> dict[str, Any]:
    """Verdicts, and the range of each ratio."""
    names = ("error", "tail error", "worst error", "divergence", "flips")
    return {
        "verdicts": dict(Counter(arm.verdict for arm in judged)),
        **{
            name: extent(finding.value for arm in judged for finding in arm.findings if finding.name == name)
            for name in names
        },
    }


def extent(values: Iterable[float | None]) -> tuple[float, float]:
    """The smallest and the largest."""
    known = [value for value in values if value is not None]
    return min(known), max(known)


def main() -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=12, help="weights and prompts to draw (default %(default)s)")
    parser.add_argument("--model", action="append", choices=("random:tiny", "random:middle"), help="default: both")
    parser.add_argument("--dtype", action="append", choices=get_args(Dtype), help="default: all")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for model in options.model or ("random:tiny", "random:middle"):
        for dtype in options.dtype or get_args(Dtype):
            row = calibrate(model, dtype, options.seeds)
            rows.append(row)
            print(model, dtype, {name: figures["verdicts"] for name, figures in (row["equal"] | row["faulty"]).items()})
    print(json.dumps({"seeds": options.seeds, "torch": torch.__version__, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
