"""How fast is the engine, how close to the memory's limit, how quiet: one command, one JSON line.

    python benchmarks/engine.py decode mixed --model random:llama-3-8b --arm compiled-bucketed --batch 1,32

Sections: startup (cold and warm compiler cache), floor (bandwidth), quiet (no compile after the warm-up; with --trace
also a replay in real time), decode, mixed, recorder (what watching costs), baselines (transformers). Progress and a
table go to stderr, each result at once, also to --out; the last line on stdout is one JSON object with everything.
Exit code: 0 all measured and quiet, 1 something failed or was not quiet, 2 bad usage.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

if not __package__:  # as a script: the repository is importable
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.baselines import KINDS
from benchmarks.ledger import Ledger, end_in_order, table
from benchmarks.sections import SECTIONS, THROUGH, Bench, Plan, check, parts_of
from benchmarks.traffic import WORKLOADS
from servers.config import PRESETS, ArmConfig, EngineConfig, ModelConfig
from servers.fields import ConfigError, override


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python benchmarks/engine.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="+", choices=SECTIONS, metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--model", default="random:tiny", help="model id, as model.id (default %(default)s)")
    parser.add_argument("--arm", default="compiled-bucketed", help="one preset or several, with commas")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="model., engine., shapes. or "
                        "compile. setting of the arm, as in an experiment")  # fmt: skip
    parser.add_argument("--workload", choices=WORKLOADS, default="full", help="sizes of the work (default %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, help="decode: prompt length, instead of the workload's")
    parser.add_argument("--new-tokens", type=int, help="decode: tokens to generate")
    parser.add_argument("--mixed-requests", type=int, help="mixed: requests at once")
    parser.add_argument("--churn", type=int, help="quiet: random requests")
    parser.add_argument("--batch", default="", help="decode batch sizes, with commas (default 1 and all slots)")
    parser.add_argument("--through", default="engine", help="engine, grpc or both with a comma (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="measured repeats or pairs (default %(default)s)")
    parser.add_argument("--baselines", default=",".join(KINDS), help="which ones (default %(default)s)")
    parser.add_argument("--starts", type=int, default=1, help="startup: cold and warm starts (default %(default)s)")
    parser.add_argument("--pairs", type=int, default=20, help="recorder: pairs (default %(default)s)")
    parser.add_argument("--trace", default="", help="quiet: replay this trace (Azure CSV or Mooncake JSON Lines)")
    parser.add_argument("--duration", type=float, default=60.0, help="seconds of replay (default %(default)s)")
    parser.add_argument("--time-scale", type=float, default=1.0, help="the trace's time times this (default 1)")
    parser.add_argument("--saturation-share", type=float, default=0.0, help="replay at this share of the throughput "
                        "that a full queue gives, measured first, instead of --time-scale")  # fmt: skip
    parser.add_argument("--saturation-seconds", type=float, default=20.0, help="how long to measure it (default 20)")
    parser.add_argument("--cache-dir", default="", help="keep compiler artifacts here; default: a fresh folder")
    parser.add_argument("--out", default="", help="append each result to this JSON Lines file as soon as it is there")
    parser.add_argument("--seed", type=int, default=0, help="for prompts, lengths and orders (default 0)")
    return parser.parse_args(arguments)


def settings(pairs: Sequence[str]) -> dict[str, dict[str, Any]]:
    """{"engine": {"slots": 32}, …} from ["engine.slots=32", …]; values are TOML, and strings when they are none."""
    found: dict[str, dict[str, Any]] = {"model": {}, "engine": {}, "shapes": {}, "compile": {}}
    for pair in pairs:
        path, equals, text = pair.partition("=")
        part, dot, key = path.strip().partition(".")
        if not equals or not dot or part not in found:
            raise ConfigError(f'--set "{pair}" is not KEY=VALUE with a key in {", ".join(found)}: try engine.slots=32')
        try:
            value = tomllib.loads(f"value = {text.strip()}")["value"]
        except tomllib.TOMLDecodeError:
            value = text.strip()
        name, dot, inner = key.partition(".")  # compile.options.NAME
        if dot:
            found[part].setdefault(name, {})[inner] = value
        else:
            found[part][name] = value
    return found


def arm_of(options: argparse.Namespace, preset: str) -> ArmConfig:
    """The arm to measure: the preset on the workload's engine limits, then what --set changes."""
    work = WORKLOADS[options.workload]
    changes = settings(options.set)
    engine = EngineConfig(
        slots=work.slots,
        max_queue=work.max_queue,
        max_prompt_tokens=work.max_prompt_tokens,
        max_new_tokens=work.max_new_tokens,
    )
    arm = ArmConfig.from_preset(
        preset,
        model=override(ModelConfig(id=options.model), changes["model"], where="model"),
        engine=override(engine, changes["engine"], where="engine"),
    )
    return dataclasses.replace(
        arm,
        shapes=override(arm.shapes, changes["shapes"], where="shapes"),
        compile=override(arm.compile, changes["compile"], where="compile"),
    )


def plan_of(options: argparse.Namespace, arm: ArmConfig) -> Plan:
    """What to run. Sections run in an order of their own: a cold start before anything has been compiled."""
    work = WORKLOADS[options.workload]
    given = {
        "decode_prompt": options.prompt_tokens,
        "decode_new": options.new_tokens,
        "mixed_requests": options.mixed_requests,
        "churn_requests": options.churn,
    }
    work = dataclasses.replace(work, **{key: value for key, value in given.items() if value is not None})
    for flag, value in (("--repeats", options.repeats), ("--starts", options.starts), ("--pairs", options.pairs)):
        if value < 1:
            raise ConfigError(f"{flag} is {value}: give 1 or more")
    if not 0 <= options.saturation_share <= 2:
        raise ConfigError(f"--saturation-share is {options.saturation_share:g}: give a share such as 0.7")
    if options.duration <= 0 or options.saturation_seconds <= 0 or options.time_scale <= 0:
        raise ConfigError("--duration, --saturation-seconds and --time-scale must be above 0")
    plan = Plan(
        sections=tuple(section for section in SECTIONS if section in options.sections),
        through=_names("--through", options.through, THROUGH),
        work=work,
        batches=_batches(options.batch) if options.batch else tuple(sorted({1, arm.engine.slots})),
        repeats=options.repeats,
        baselines=_names("--baselines", options.baselines, KINDS),
        starts=options.starts,
        pairs=options.pairs,
        seed=options.seed,
        trace=options.trace,
        duration_s=options.duration,
        time_scale=options.time_scale,
        saturation_share=options.saturation_share,
        saturation_s=options.saturation_seconds,
    )
    check(plan, arm)
    return plan


def _names(flag: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in known:
            raise ConfigError(f'{flag} "{name}" is unknown: use {", ".join(known)}')
    if not names:
        raise ConfigError(f"{flag} is empty: use {', '.join(known)}")
    return names


def _batches(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(item) for item in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise ConfigError(f'--batch "{text}" is no list of sizes: give for example 1,32')
    return sizes


def measure(arm: ArmConfig, plan: Plan, ledger: Ledger, cache_dir: str) -> bool:
    """Run the plan's sections; whether all came to an end. A section that breaks does not take the next with it."""
    bench = Bench(arm, plan, ledger, cache_dir)
    try:
        parts = parts_of(plan)
        return ledger.run((f"{part.section} {part.through}".rstrip(), partial(part.run, bench)) for part in parts)
    finally:
        bench.close()


def run_one(options: argparse.Namespace, preset: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Measure one arm in this process; the JSON object that says everything. `arguments` is the command as given."""
    arm = arm_of(options, preset)
    plan = plan_of(options, arm)
    ledger = Ledger(arm.name, out=Path(options.out) if options.out else None)
    cache_dir = options.cache_dir or tempfile.mkdtemp(prefix="tailgate-bench-cache-")
    # before torch is imported, which reads it once
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache_dir
    try:
        where = machine(arm)
        command = shlex.join(["python", "benchmarks/engine.py", *arguments])
        ledger.head(command=command, machine=where, arm=arm.to_dict(), plan=dataclasses.asdict(plan))
        complete = measure(arm, plan, ledger, cache_dir)
    finally:
        if not options.cache_dir:
            shutil.rmtree(cache_dir, ignore_errors=True)
    shown = {"arm": arm.to_dict(), "plan": dataclasses.asdict(plan)}
    return ledger.result("engine", complete=complete, about={"machine": where, **shown, "seed": plan.seed})


def machine(arm: ArmConfig) -> dict[str, Any]:
    """Where it ran: versions, commit, processor, GPUs, and the device that the arm uses."""
    from loadtests.trials.environment import describe_environment
    from servers.engine.model import resolve_device

    device = resolve_device(arm.model.device)
    name = device.type
    if device.type == "cuda":
        import torch

        name = torch.cuda.get_device_name(device)
    return {"device": name, **describe_environment()}


def run_each(arguments: Sequence[str], presets: Sequence[str]) -> dict[str, Any]:
    """Measure several arms, each in a process of its own: compiled code and compiler options do not leave a process."""
    runs: list[dict[str, Any]] = []
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parse(given)
    try:
        presets = _names("--arm", options.arm, PRESETS)
        if len(presets) > 1:
            for preset in presets:
                plan_of(options, arm_of(options, preset))  # what is wrong is said before the first arm starts
            outcome = run_each(given, presets)
        else:
            outcome = run_one(options, presets[0], given)
    except ConfigError as error:
        print(f"benchmarks/engine.py: {error}", file=sys.stderr)
        return 2
    print(json.dumps(outcome), flush=True)
    return 0 if outcome["ok"] else 1


if __name__ == "__main__":
    end_in_order()
    sys.exit(main())
