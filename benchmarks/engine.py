"""How fast is the engine, how close to the memory's limit, how quiet: one command, one JSON line.

    python benchmarks/engine.py decode mixed --model random:llama-3-8b --arm compiled-bucketed --batch 1,32

Sections: startup (cold, warm and shipped compiler cache), floor (bandwidth), quiet (no compile after the warm-up; with
--trace also a replay in real time), decode, kernels (where a step's time goes), mixed, recorder (what watching costs),
baselines (transformers). Progress and a table go to stderr, each result at once, also to --out; the last line on stdout
is one JSON object with everything. Exit code: 0 all measured and quiet, 1 something failed or was not quiet, 2 bad
usage.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

if not __package__:  # as a script: the repository is importable
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.baselines import KINDS
from benchmarks.command import BenchmarkParser, command_line, count, end_in_order, one_of, run_command, several
from benchmarks.ledger import Ledger, Row, table
from benchmarks.sections import SECTIONS, THROUGH, Bench, Plan, check, parts_of
from benchmarks.traffic import WORKLOADS
from loadtests.commands.arm_flags import preset_arm
from loadtests.commands.command_line import real
from servers.config import PRESETS, ArmConfig
from servers.program import isolate_compiler

# Flags that are sizes of the work where they are given, and those that the plan takes as they are.
SIZES = ("decode_prompt", "decode_new", "mixed_requests", "churn_requests")
PLANNED = (
    *("through", "repeats", "baselines", "starts", "pairs", "seed", "trace", "duration_s", "time_scale"),
    *("saturation_share", "saturation_s"),
)


def parser() -> BenchmarkParser:
    """The command line."""
    parser = BenchmarkParser("engine.py", __doc__, repeats=5)
    add = parser.add_argument
    seconds = real(0, 1e6, "time", above=True)
    add("sections", nargs="+", type=one_of(SECTIONS), metavar="SECTION", help=", ".join(SECTIONS))
    add("--model", default="random:tiny", help="model id, as model.id (default %(default)s)")
    add("--arm", type=several(one_of(PRESETS), "eager"), default=("compiled-bucketed",),
        help="one preset or several, with commas (default compiled-bucketed)")  # fmt: skip
    add("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE",
        help="model., engine., shapes. or compile. setting of the arm, as in an experiment")  # fmt: skip
    add("--workload", choices=WORKLOADS, default="full", help="sizes of the work (default %(default)s)")
    add(
        "--prompt-tokens",
        dest="decode_prompt",
        metavar="N",
        type=count,
        help="decode: prompt length, instead of the workload's",
    )
    add("--new-tokens", dest="decode_new", metavar="N", type=count, help="decode: tokens to generate")
    add("--mixed-requests", type=count, help="mixed: requests at once")
    add("--churn", dest="churn_requests", metavar="N", type=count, help="quiet: random requests")
    add("--batch", type=several(count, "1,32"), help="decode batch sizes, with commas (default 1 and all slots)")
    add("--through", type=several(one_of(THROUGH), "engine,grpc"), default=("engine",),
        help="engine, grpc or both with a comma (default engine)")  # fmt: skip
    add("--baselines", type=several(one_of(KINDS), "static"), default=KINDS,
        help=f"which ones (default {','.join(KINDS)})")  # fmt: skip
    add("--starts", type=count, default=1, help="startup: starts of each kind (default %(default)s)")
    add("--pairs", type=count, default=20, help="recorder: pairs (default %(default)s)")
    add("--trace", default="", help="quiet: replay this trace (Azure CSV or Mooncake JSON Lines)")
    add(
        "--duration",
        dest="duration_s",
        metavar="SECONDS",
        type=seconds,
        default=60.0,
        help="seconds of replay (default %(default)s)",
    )
    add("--time-scale", type=seconds, default=1.0, help="the trace's time times this (default 1)")
    add("--saturation-share", type=real(0, 2, "share"), default=0.0,
        help="replay at this share of a full queue's throughput, measured first, not --time-scale")  # fmt: skip
    add("--saturation-seconds", dest="saturation_s", metavar="SECONDS", type=seconds, default=20.0,
        help="how long to measure it (default 20)")  # fmt: skip
    add("--cache-dir", default="", help="keep compiler artifacts here; default: a fresh folder")
    return parser


def arm_of(options: argparse.Namespace, preset: str) -> ArmConfig:
    """The arm to measure: the preset on the workload's engine limits, then what --set changes."""
    work = WORKLOADS[options.workload]
    limits = [f"engine.{name}={getattr(work, name)}" for name in
              ("slots", "max_queue", "max_prompt_tokens", "max_new_tokens")]  # fmt: skip
    flags: dict[str, Any] = dict.fromkeys(("name", "device", "dtype", "slots", "max_prompt_tokens", "max_new_tokens"))
    settings = [*limits, *options.settings]
    return preset_arm(argparse.Namespace(**flags, preset=preset, model=options.model, settings=settings))


def plan_of(options: argparse.Namespace, arm: ArmConfig) -> Plan:
    """What to run. Sections run in an order of their own: a cold start before anything has been compiled."""
    work = {name: size for name in SIZES if (size := getattr(options, name)) is not None}
    plan = Plan(
        sections=tuple(section for section in SECTIONS if section in options.sections),
        work=dataclasses.replace(WORKLOADS[options.workload], **work),
        batches=options.batch or tuple(sorted({1, arm.engine.slots})),
        **{name: getattr(options, name) for name in PLANNED},
    )
    check(plan, arm)
    return plan


def measure(arm: ArmConfig, plan: Plan, ledger: Ledger, cache_dir: str) -> bool:
    """Run the plan's sections; whether all came to an end. A section that breaks does not take the next with it."""
    bench = Bench(arm, plan, ledger, cache_dir)
    try:
        parts = parts_of(plan)
        return ledger.run((f"{part.section} {part.through}".rstrip(), partial(part.run, bench)) for part in parts)
    finally:
        bench.close()


def run_one(options: argparse.Namespace, preset: str, arguments: Sequence[str]) -> Row:
    """Measure one arm in this process; the JSON object that says everything. `arguments` is the command as given."""
    arm = arm_of(options, preset)
    plan = plan_of(options, arm)
    ledger = Ledger(arm.name, out=Path(options.out) if options.out else None)
    cache_dir = options.cache_dir or tempfile.mkdtemp(prefix="tailgate-bench-cache-")
    # before torch is imported, which reads it once
    isolate_compiler(os.environ, cache_dir)
    try:
        about = {"machine": machine(arm), "arm": arm.to_dict(), "plan": dataclasses.asdict(plan)}
        ledger.head(command=command_line("engine.py", arguments), **about)
        complete = measure(arm, plan, ledger, cache_dir)
    finally:
        if not options.cache_dir:
            shutil.rmtree(cache_dir, ignore_errors=True)
    return ledger.result("engine", complete=complete, about={**about, "seed": plan.seed})


def machine(arm: ArmConfig) -> Row:
    """Where it ran: versions, commit, processor, GPUs, and the device that the arm uses."""
    from loadtests.trials.environment import describe_environment
    from servers.engine.placement import resolve_device

    device = resolve_device(arm.model.device)
    name = device.type
    if device.type == "cuda":
        import torch

        name = torch.cuda.get_device_name(device)
    return {"device": name, **describe_environment()}


def run_each(arguments: Sequence[str], presets: Sequence[str]) -> Row:
    """Measure several arms, each in a process of its own: compiled code and compiler options do not leave a process."""
    runs: list[Row] = []
    interrupted = False
    for preset in presets:
        if interrupted:
            break
        command = [sys.executable, str(Path(__file__).resolve()), *arguments, "--arm", preset]  # the last --arm counts
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            try:
                text, _ = child.communicate()
            except (KeyboardInterrupt, SystemExit):
                interrupted = True
                child.terminate()
                text, _ = child.communicate()
        try:
            runs.append(json.loads(text.strip().splitlines()[-1]))
        except (IndexError, ValueError):
            reason = f"{preset} ended with exit code {child.returncode} and no result"
            runs.append({"benchmark": "engine", "ok": False, "complete": False, "failures": [reason], "results": []})
    rows = [row for run in runs for row in run["results"]]
    print("\n" + table(rows) + "\n", file=sys.stderr)
    return {
        "benchmark": "engine",
        "ok": all(run["ok"] for run in runs) and not interrupted,
        "complete": all(run["complete"] for run in runs) and not interrupted,
        "failures": [f"{preset}: {why}" for preset, run in zip(presets, runs, strict=False) for why in run["failures"]],
        "runs": runs,
        "results": rows,
    }


def run(arguments: Sequence[str]) -> Row:
    """What the command line asks for, as one JSON object."""
    options = parser().parse_args(arguments)
    if len(options.arm) == 1:
        return run_one(options, options.arm[0], arguments)
    for preset in options.arm:
        plan_of(options, arm_of(options, preset))  # what is wrong is said before the first arm starts
    return run_each(arguments, options.arm)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    return run_command("engine.py", run, arguments)


if __name__ == "__main__":
    end_in_order()
    sys.exit(main())
