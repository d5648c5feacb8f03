"""How fast is the engine, and how close to the memory's limit: one command, one JSON line.

    python benchmarks/engine.py --model random:llama-3-8b --arm compiled-bucketed --batch 1,32

floor: the bandwidth of the device. decode: tokens/s while all rows decode together, against the floor. prefill: prompt
tokens/s of prompts that come at once. A compile event after the warm-up ends the benchmark. Results go to stderr as
soon as they are there; the last line on stdout is one JSON object. Exit code: 0 all measured, 1 something failed, 2 bad
usage.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if not __package__:  # as a script: the repository is importable
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.command import BenchmarkParser, command_line, count, end_in_order, run_command, several
from benchmarks.floor import StepBytes, measure_bandwidth, step_bytes
from benchmarks.ledger import Ledger, Row, spread
from loadtests.commands.arm_flags import all_settings, preset_arm
from loadtests.trials.environment import describe_environment
from servers.complaint import ConfigError
from servers.config import ArmConfig
from servers.presets import PRESETS
from servers.program import isolate_compiler

if TYPE_CHECKING:
    from servers.engine.runner import ModelRunner

LIMITS = ("engine.slots=32", "engine.max_prompt_tokens=1024", "engine.max_new_tokens=256")
FIRST_TOKEN_ID = 3  # ids below are padding, start and end of text in the common vocabularies


def parser() -> BenchmarkParser:
    """The command line."""
    parser = BenchmarkParser("engine.py", __doc__, repeats=5)
    add = parser.add_argument
    add("--model", default="random:tiny", help="model id, as model.id (default %(default)s)")
    add("--arm", choices=PRESETS, default="compiled-bucketed", help="preset (default %(default)s)")
    add("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE",
        help=f"model., engine., shapes. or compile. setting of the arm (default {', '.join(LIMITS)})")  # fmt: skip
    add("--batch", type=several(count, "1,32"), default=(1, 32), help="batch sizes, with commas (default 1,32)")
    add("--prompt-tokens", type=count, default=128, metavar="N", help="length of a prompt (default %(default)s)")
    add("--new-tokens", type=count, default=256, metavar="N", help="decode: tokens to generate (default %(default)s)")
    add("--cache-dir", default="", help="keep compiler artifacts here; default: a fresh folder")
    return parser


def arm_of(options: argparse.Namespace) -> ArmConfig:
    """The arm to measure. Raises ConfigError where it cannot take the work."""
    settings = [*LIMITS, *options.settings]
    arm = preset_arm(options.arm, settings=all_settings(settings, options.model))
    for what, asked, key in (
        ("--batch", max(options.batch), "slots"),
        ("--prompt-tokens", options.prompt_tokens, "max_prompt_tokens"),
        ("--new-tokens", options.new_tokens, "max_new_tokens"),
    ):
        limit = getattr(arm.engine, key)
        if asked > limit:
            raise ConfigError(f"{what} {asked} is above engine.{key} {limit}: raise engine.{key}")
    return arm


class Bench:
    """Measures one warm arm."""

    def __init__(self, runner: ModelRunner, options: argparse.Namespace, ledger: Ledger) -> None:
        self.runner = runner
        self.options = options
        self.ledger = ledger
        self.rng = np.random.default_rng(options.seed)

    def prompts(self, batch: int) -> list[list[int]]:
        """Draw `batch` prompts of random token ids."""
        size = (batch, self.options.prompt_tokens)
        drawn: list[list[int]] = self.rng.integers(FIRST_TOKEN_ID, self.runner.vocab_size, size=size).tolist()
        return drawn

    def floor(self) -> tuple[StepBytes, float]:
        """(the bytes of a decode step, bytes per second of the device)."""
        needed = step_bytes(self.runner.model)
        bandwidth = measure_bandwidth(self.runner.device, self.runner.model.dtype)
        if self.runner.device.type == "cuda":
            import torch

            torch.cuda.empty_cache()
        self.ledger.add(
            "floor",
            weights_gb=needed.weights / 1e9,
            quantised_gb=needed.quantised / 1e9,
            kv_bytes_a_position=needed.position,
            **{f"{kind}_gb_s": rate / 1e9 for kind, rate in bandwidth.items()},
        )
        return needed, bandwidth["best"]

    def decode(self, batch: int, needed: StepBytes, bytes_per_s: float) -> None:
        """Steady decode against the floor. The first repeat warms caches and clocks and does not count."""
        from benchmarks.inprocess import decode

        turns, tokens = range(1 + self.options.repeats), self.options.new_tokens
        steady = [decode(self.runner, self.prompts(batch), tokens) for _ in turns][1:]
        positions = float(np.mean([measured.positions for measured in steady]))
        bound = needed.floor_tokens_per_s(batch=batch, positions=positions, bytes_per_s=bytes_per_s)
        rates = [measured.tokens_per_s for measured in steady]
        self.ledger.add(
            "decode",
            batch=batch,
            tokens_s=spread(rates),
            step_ms=spread([measured.step_ms for measured in steady]),
            floor_tokens_s=bound,
            share_of_floor=float(np.median(rates)) / bound,
            mb_a_token=needed.total(batch=batch, positions=positions) / batch / 1e6,
            quantised_share_of_floor=needed.quantised / needed.total(batch=batch, positions=positions),
            samples=rates,
        )

    def prefill(self, batch: int) -> None:
        """Prompts that come at once, until each has its first token. The first repeat does not count."""
        from benchmarks.inprocess import prefill_tokens_per_s

        rates = [prefill_tokens_per_s(self.runner, self.prompts(batch)) for _ in range(1 + self.options.repeats)][1:]
        self.ledger.add("prefill", batch=batch, prompt_tokens_s=spread(rates), samples=rates)


def run(arguments: Sequence[str]) -> Row:
    """What the command line asks for, as one JSON object."""
    options = parser().parse_args(arguments)
    arm = arm_of(options)
    ledger = Ledger()
    with tempfile.TemporaryDirectory(prefix="tailgate-bench-cache-", ignore_cleanup_errors=True) as scratch:
        # before torch is imported, which reads it once
        isolate_compiler(os.environ, options.cache_dir or scratch)
        from servers.engine.in_process import warm_runner
        from servers.engine.runner import ModelRunner

        with warm_runner(arm, lambda *at: ledger.note("{}: warm-up {} of {}: {}".format(arm.name, *at))) as runner:
            assert isinstance(runner, ModelRunner)
            gc.collect()
            gc.freeze()  # as the device loop does
            bench = Bench(runner, options, ledger)
            needed, bytes_per_s = bench.floor()
            for batch in options.batch:
                bench.decode(batch, needed, bytes_per_s)
                bench.prefill(batch)
    about = {"command": command_line("engine.py", arguments), "arm": arm.to_dict(), "machine": machine(arm)}
    return ledger.result("engine", about={**about, "seed": options.seed})


def machine(arm: ArmConfig) -> Row:
    """Where it ran: versions, commit, processor, GPUs, and the device that the arm uses."""
    import torch

    from servers.engine.placement import resolve_device

    device = resolve_device(arm.model.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {"device": name, **describe_environment()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    return run_command("engine.py", run, arguments)


if __name__ == "__main__":
    end_in_order()
    sys.exit(main())
