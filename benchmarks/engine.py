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
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

if not __package__:  # as a script: the repository is importable
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.command import Ledger, MeasurementError, count, end_in_order, parser_of, several, spread
from tailgate.loadtests.commands.arm_flags import preset_arm
from tailgate.loadtests.trials.environment import describe_environment
from tailgate.servers.complaint import ConfigError
from tailgate.servers.config import ArmConfig
from tailgate.servers.engine.messages import StepOutput
from tailgate.servers.presets import PRESETS
from tailgate.servers.program import isolate_compiler

if TYPE_CHECKING:  # torch is imported once the compiler's cache is chosen
    from tailgate.servers.engine.runner import ModelRunner

LIMITS = ("engine.slots=32", "engine.max_prompt_tokens=1024", "engine.max_new_tokens=256")
FIRST_TOKEN_ID = 3  # ids below are padding, start and end of text in the common vocabularies


def parser() -> argparse.ArgumentParser:
    """Define the command line."""
    parser = parser_of("engine.py", __doc__, repeats=5)
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
    """Return the arm to measure. Raises ConfigError if its limits are too low."""
    arm = preset_arm(options.arm, [*LIMITS, *options.settings, f"model.id={options.model}"])
    for what, value, key in (
        ("--batch", max(options.batch), "slots"),
        ("--prompt-tokens", options.prompt_tokens, "max_prompt_tokens"),
        ("--new-tokens", options.new_tokens, "max_new_tokens"),
    ):
        limit = getattr(arm.engine, key)
        if value > limit:
            raise ConfigError(f"{what} {value} is above engine.{key} {limit}: raise engine.{key}")
    return arm


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBytes:
    """What a decode step must read and write, whatever code runs it.

    weights: bytes of all parameters that a token passes through; quantised: of those the ones that are held in fewer
    bits; position: bytes of keys and values that one position of one row holds in all layers. Activations and logits
    are left out: they fit in the caches.
    """

    weights: int
    position: int
    quantised: int = 0

    def total(self, *, batch: int, positions: float) -> float:
        """Return the bytes of a step: weights once, keys and values of `positions` read, those of `batch` new ones
        written."""
        return self.weights + self.position * (positions + batch)

    def floor_tokens_per_s(self, *, batch: int, positions: float, bytes_per_s: float) -> float:
        """Return the tokens per second of a step that only moves its bytes."""
        return batch * bytes_per_s / self.total(batch=batch, positions=positions)


def step_bytes(model: Any) -> StepBytes:
    """Return the bytes that a loaded Hugging Face causal model must move in a decode step.

    An input embedding that is not the output matrix too does not count: a step reads one row of it a token.
    """
    from tailgate.servers.engine.quantisation import stored_bytes, weight_bytes  # brings torch along

    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    position = 2 * config.num_hidden_layers * heads * size * model.dtype.itemsize
    embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    every, quantised = weight_bytes(model)
    weights = every if embedding is output else every - stored_bytes(embedding)
    return StepBytes(weights=weights, position=position, quantised=quantised)


def measure_bandwidth(device: Any, dtype: Any, *, tensor_bytes: int = 0, repeats: int = 15) -> dict[str, float]:
    """Measure bytes per second on random data, medians: each is a lower bound of what the device can do.

    copy: device to device, bytes read and bytes written; sum: a reduction to one number; matvec: a matrix times a
    vector, as decode's projections at batch 1; best: the fastest of them, which the floor is computed with.
    tensor_bytes 0: 4 GiB on a GPU, 256 MiB on a CPU, far past every cache. A GPU's stay with torch's allocator.
    """
    import torch

    from tailgate.servers.reference import device_times

    columns = 8192
    rows = (tensor_bytes or (4 << 30 if device.type == "cuda" else 256 << 20)) // (dtype.itemsize * columns)
    matrix = torch.empty((rows, columns), dtype=dtype, device=device).normal_()
    target = torch.empty_like(matrix)
    vector = torch.empty((1, columns), dtype=dtype, device=device).normal_()
    held = rows * columns * dtype.itemsize

    def rate(work: Callable[[], object], moved: int) -> float:
        work()  # the first call picks a kernel
        return moved / median(device_times(device, work, 1)[0] for _ in range(repeats))

    with torch.no_grad():
        rates = {
            "copy": rate(lambda: target.copy_(matrix), 2 * held),
            "sum": rate(matrix.sum, held),
            "matvec": rate(lambda: torch.nn.functional.linear(vector, matrix), held),
        }
    return {**rates, "best": max(rates.values())}


@dataclass(frozen=True, slots=True, kw_only=True)
class SteadyDecode:
    """Decode while every row was busy: `steps` steps of `batch` rows in `seconds`, attending to `positions` each."""

    batch: int
    steps: int
    seconds: float
    step_ms: float  # the median step
    positions: float  # cache positions read by a step, summed over its rows; mean over the steps

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second over the steady steps."""
        return self.batch * self.steps / self.seconds


def steady_decode(outputs: Sequence[StepOutput], prompt_tokens: int, batch: int) -> SteadyDecode:
    """Measure the decode steps with `batch` rows that followed on another such step, from emission to emission.

    prompt_tokens: the length of each prompt. A step that waited behind a prefill, or that follows on a step with
    fewer or more rows, does not count. Raises MeasurementError when there is none.
    """
    emitted: Counter[str] = Counter()
    durations: list[int] = []
    positions: list[int] = []
    last_ns: int | None = None  # when the step before was emitted, if that was a full decode step
    for output in outputs:
        full = output.step is not None and output.step.kind == "decode" and output.step.batch == batch
        full = full and len(output.tokens) == batch
        if full and last_ns is not None:
            durations.append(output.emit_ns - last_ns)
            positions.append(sum(prompt_tokens + emitted[name] for name, _ in output.tokens))
        if output.step is not None:
            last_ns = output.emit_ns if full else None
        emitted.update(name for name, _ in output.tokens)
    if not durations:
        raise MeasurementError(f"no decode step had {batch} rows twice in a row: ask for more new tokens")
    return SteadyDecode(
        batch=batch,
        steps=len(durations),
        seconds=sum(durations) / 1e9,
        step_ms=float(np.median(durations)) / 1e6,
        positions=float(np.mean(positions)),
    )


class Bench:
    """Measures one warm arm."""

    def __init__(self, runner: ModelRunner, options: argparse.Namespace, ledger: Ledger) -> None:
        self.runner = runner
        self.options = options
        self.ledger = ledger
        self.rng = np.random.default_rng(options.seed)

    def floor(self) -> tuple[StepBytes, float]:
        """Return (the bytes of a decode step, bytes per second of the device)."""
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
        """Measure steady decode against the floor. The first repeat warms caches and clocks and does not count."""
        answered = [self._answered(batch, self.options.new_tokens)[1] for _ in range(1 + self.options.repeats)][1:]
        steady = [steady_decode(outputs, self.options.prompt_tokens, batch) for outputs in answered]
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
        """Measure simultaneous prompts until each has its first token. The first repeat does not count."""
        rates = []
        for _ in range(1 + self.options.repeats):
            start_ns, outputs = self._answered(batch, 1)
            last_ns = max(output.emit_ns for output in outputs if output.tokens)
            rates.append(batch * self.options.prompt_tokens / ((last_ns - start_ns) / 1e9))
        self.ledger.add("prefill", batch=batch, prompt_tokens_s=spread(rates[1:]), samples=rates[1:])

    def _answered(self, batch: int, new_tokens: int) -> tuple[int, Sequence[StepOutput]]:
        """Return (start, outputs) of `batch` random prompts at once. Raises MeasurementError for a compile event."""
        from tailgate.servers.engine.in_process import ask, requests_of

        self.runner.recorder.drain()
        size = (batch, self.options.prompt_tokens)
        prompts = self.rng.integers(FIRST_TOKEN_ID, self.runner.vocab_size, size=size).tolist()
        requests = requests_of(prompts, [new_tokens] * batch)
        answers = ask(self.runner, requests)
        if events := [*answers.events, *self.runner.recorder.drain()]:
            kinds = dict(Counter(event.kind for event in events))
            raise MeasurementError(f"the compiler worked after the warm-up: {kinds}")
        return requests[0].recv_ns, answers.outputs


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    options = parser().parse_args(arguments)
    try:
        arm = arm_of(options)
    except ConfigError as error:
        parser().error(str(error))
    ledger = Ledger()
    with tempfile.TemporaryDirectory(prefix="tailgate-bench-cache-", ignore_cleanup_errors=True) as scratch:
        # before torch is imported, which reads it once
        isolate_compiler(os.environ, options.cache_dir or scratch)
        from tailgate.servers.engine.in_process import warm_runner
        from tailgate.servers.engine.placement import product_name, resolve_device
        from tailgate.servers.engine.runner import ModelRunner

        with warm_runner(arm, lambda *at: ledger.note("{}: warm-up {} of {}: {}".format(arm.name, *at))) as runner:
            assert isinstance(runner, ModelRunner)
            gc.collect()
            gc.freeze()  # as the device loop does
            bench = Bench(runner, options, ledger)
            needed, bytes_per_s = bench.floor()
            for batch in options.batch:
                bench.decode(batch, needed, bytes_per_s)
                bench.prefill(batch)
    machine = {"device": product_name(resolve_device(arm.model.device)), **describe_environment()}
    return ledger.finish("engine", arguments, arm=arm.to_dict(), machine=machine, seed=options.seed)


if __name__ == "__main__":
    end_in_order()
    sys.exit(main(sys.argv[1:]))
