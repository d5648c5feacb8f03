"""Measure what articles claim of torch.compile (claims.toml): one command, a row a claim, one JSON line.

    python benchmarks/claims.py --model llama-3-8b --only decode-default,memory > claims-1.json
    python benchmarks/claims.py --results claims-1.json claims-2.json --markdown benchmarks/results/claims.md

Plain transformers with random weights, called as articles call it. Both sides of a claim have one dtype, attention and
configuration, unless the claim is about that; each side starts with an empty compiler and an empty cache. Times are the
host's, device idle before and after; compile and warm-up are apart from the timed repeats. A claim that fails is a row
with its error. --markdown replaces the first table of FILE; with --results nothing is measured and the table has the
rows of those files. Exit code: 0 all measured, 1 a claim failed, 2 bad usage.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import os
import re
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from pydantic import TypeAdapter

if not __package__:  # as a script: the repository is importable
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.command import Ledger, MeasurementError, Row, count, end_in_order, parser_of, several
from tailgate.analysis.arrays import Floats
from tailgate.loadtests.trials.environment import describe_environment
from tailgate.servers.complaint import named, one_line
from tailgate.servers.presets import RANDOM_ENCODERS, RANDOM_PRESETS
from tailgate.servers.program import isolate_compiler

SHORTEST, LONGEST = 16, 512  # tokens of prompts of several lengths
SHAPES, CALLS = 4, 3  # called before a repeat counts: the first call compiles, two record CUDA graphs
GPU_MODES: Final = {"reduce-overhead", "max-autotune-no-cudagraphs"}  # the same as others on a CPU
PREFILLS: Final = ("prefill", "prompts")


@dataclass(frozen=True, slots=True)
class Arm:
    """What is compiled, how, and the work that it is timed on."""

    mode: str = "eager"  # of torch.compile, unless eager
    # serve: decode, then draw the next token; prompts: prefill of one length after another
    work: Literal["decode", "serve", "prefill", "prompts"] = "decode"
    batch: int = 1
    tokens: int = 512  # held before a decode step; of a prefill
    every_layer: bool = False
    on_cpu: bool = False
    buckets: tuple[int, ...] = ()  # lengths that prompts are padded to
    cache: Literal["static", "dynamic"] = "static"  # of decode
    attention: str = ""  # of transformers; by default sdpa, which prefill calls without a mask
    scope: Literal["model", "blocks", "function"] = "model"
    dynamic: bool | None = None
    quantised: Literal["", "before", "after"] = ""  # weights to int8, before or after the first compile
    start: int = 0  # tells apart arms that are equal but for their compile

    def eager(self) -> Arm:
        """Return the eager arm with the same work."""
        return replace(self, mode="eager", scope="model", dynamic=None, buckets=())

    @property
    def does(self) -> str:
        """The work."""
        tokens = f"{SHORTEST} to {LONGEST}" if self.work == "prompts" else self.tokens
        return f"{self.work} of {self.batch} × {tokens} tokens{' on the CPU' * self.on_cpu}"

    def __str__(self) -> str:
        """Name the mode and what else can differ between the arms of a claim."""
        own = {field.name: getattr(self, field.name) for field in fields(self)[6:] if field.name != "start"}
        return " ".join([self.mode, *(f"{key}={value}" for key, value in own.items() if value != getattr(Arm(), key))])


@dataclass(frozen=True, slots=True)
class Measured:
    """An arm's repeats, the seconds of its first calls less what they take warm, and its peak of a GPU's memory."""

    times_ms: Floats
    compile_s: float
    peak_gb: float

    def ms(self, share: float = 0.5) -> float:
        """Return a quantile of the latency in ms."""
        return float(np.quantile(self.times_ms, share))


# How a claim's figure comes from its arms, by the figure's unit. The first arm is the base.
FIGURES: Final[Mapping[str, Callable[..., float]]] = {
    "% lower latency": lambda base, arm: 100 * (1 - arm.ms() / base.ms()),
    "% lower p99": lambda base, arm: 100 * (1 - arm.ms(0.99) / base.ms(0.99)),
    "× as fast": lambda base, arm: base.ms() / arm.ms(),
    "% of the saved time": lambda base, part, all_of_it: 100 * (base.ms() - part.ms()) / (base.ms() - all_of_it.ms()),
    "% more memory": lambda base, arm: 100 * (arm.peak_gb / base.peak_gb - 1),
    "s": lambda base, arm: arm.compile_s,
    "× shorter compile": lambda base, arm: base.compile_s / arm.compile_s,
    "× the compile time": lambda base, arm: arm.compile_s / base.compile_s,
    "% from p10 to p90": lambda *arms: max(100 * (arm.ms(0.9) - arm.ms(0.1)) / arm.ms() for arm in arms),
    "% between medians": lambda *arms: 100 * (max(arm.ms() for arm in arms) / min(arm.ms() for arm in arms) - 1),
}


@dataclass(frozen=True, slots=True)
class Claim:
    """What is said, the arms that show it, and the published range of the figure, nan without one."""

    text: str
    unit: str
    arms: tuple[Arm, ...]
    low: float = math.nan
    high: float = math.nan

    def sides(self) -> tuple[Arm, ...]:
        """Return all arms."""
        return self.arms if len(self.arms) > 1 else (self.arms[0].eager(), self.arms[0])

    def verdict(self, low: float, high: float) -> str:
        """Judge the interval of the measured figure in one sentence."""
        if math.isnan(self.low):
            return "No figure is published."
        if self.low <= low and high <= self.high:
            return "Holds."
        if high < self.low or low > self.high:
            return f"Does not hold: {'less' if high < self.low else 'more'} than published."
        return "Open: an end of the published range lies within the interval."


CLAIMS: Final = TypeAdapter(dict[str, Claim]).validate_python(
    tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
)


def without_mask(_: Any, query: Any, key: Any, value: Any, *__: Any, scaling: float, **___: Any) -> tuple[Any, None]:
    """Attend causally, as transformers calls it. It makes masks for its own kinds of attention alone; its sdpa gets one
    once compiled (up to torch 2.13), and flash attention takes none."""
    from torch.nn.functional import scaled_dot_product_attention

    found = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    return found.transpose(1, 2), None


class Bench:
    """Measures arms, each once."""

    def __init__(self, options: argparse.Namespace, scratch: str) -> None:
        import torch
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        self.torch = torch
        self.options = options
        self.scratch = scratch
        self._models: dict[str, Any] = {}  # by device
        self._done: dict[Arm, Measured] = {}
        ALL_ATTENTION_FUNCTIONS.register("without_mask", without_mask)
        first = torch.zeros(8, device="cuda" if torch.cuda.is_available() else "cpu")
        torch.compile(torch.sin)(first)  # the compiler's own start is in no arm

    def row(self, claim: Claim) -> Row:
        """Measure a claim. Raises MeasurementError, and whatever an arm raises."""
        sides = claim.sides()
        needs_gpu = claim.unit == "% more memory" or {arm.mode for arm in sides} & GPU_MODES
        if needs_gpu and not self.torch.cuda.is_available():
            raise MeasurementError("needs a GPU")
        for arm in sides:
            if arm not in self._done:
                self._done[arm] = self._measure(arm)
        measured = [self._done[arm] for arm in sides]
        figure, rng = FIGURES[claim.unit], np.random.default_rng(self.options.seed)
        # One draw for all arms: repeat n of each is the same prompt.
        picks = rng.integers(measured[0].times_ms.size, size=(500, measured[0].times_ms.size))
        draws = [figure(*(replace(side, times_ms=side.times_ms[pick]) for side in measured)) for pick in picks]
        low, high = np.quantile(draws, (0.025, 0.975)).tolist()
        arms = [
            {"arm": str(arm), "repeats": side.times_ms.size, "compile_s": side.compile_s, "peak_gb": side.peak_gb}
            | {f"p{percent}_ms": side.ms(percent / 100) for percent in (10, 50, 90, 99)}
            for arm, side in zip(sides, measured, strict=True)
        ]
        value, verdict = figure(*measured), claim.verdict(low, high)
        return {"arms": arms, "figure": value, "low": low, "high": high, "verdict": verdict}

    def model_of(self, arm: Arm) -> tuple[str, int]:
        """Return the name of the arm's model and how many of its layers the arm goes through."""
        name = self.options.cpu_model if arm.on_cpu else self.options.model
        every = int(RANDOM_PRESETS[name]["num_hidden_layers"])
        return name, every if arm.every_layer else min(every, self.options.layers)

    def _measure(self, arm: Arm) -> Measured:
        from torch._inductor.utils import fresh_cache

        torch = self.torch
        torch._dynamo.reset()
        if arm.quantised:  # it has a model of its own
            self._models.clear()
        gc.collect()
        torch.cuda.empty_cache()
        with fresh_cache(dir=self.scratch), torch.no_grad():
            model = self._model(arm)
            on_gpu = model.device.type == "cuda"
            step, before, turns = self._steps(arm, model)

            def timed(ids: Any) -> float:
                before()
                torch.compiler.cudagraph_mark_step_begin()
                torch.cuda.synchronize() if on_gpu else None
                begin = time.perf_counter()
                step(ids)
                torch.cuda.synchronize() if on_gpu else None
                return 1e3 * (time.perf_counter() - begin)

            shapes = list({ids.shape: ids for ids in turns}.values())[:SHAPES] * CALLS
            first_ms = [timed(ids) for ids in shapes]
            if arm.quantised == "after":
                from tailgate.servers.config import ModelConfig
                from tailgate.servers.engine.quantisation import quantise

                quantise(model, ModelConfig(quantisation="int8-weight-only"))
                first_ms += [timed(ids) for ids in shapes]
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats() if on_gpu else None
            for ids in (*shapes, *turns):  # attention and products are planned at the first call of each length
                timed(ids)
            repeats = self.options.repeats * (10 if arm.work == "serve" else 1)  # for a p99
            times_ms = np.array([timed(ids) for ids in itertools.islice(itertools.cycle(turns), repeats)])
            compile_s = (sum(first_ms) - len(first_ms) * float(np.median(times_ms))) / 1e3
            peak_gb = torch.cuda.max_memory_reserved() / 1e9 if on_gpu else 0.0
            return Measured(times_ms, max(0.0, compile_s), peak_gb)

    def _model(self, arm: Arm) -> Any:
        """Return the model as the arm reads it."""
        from tailgate.servers.config import ModelConfig
        from tailgate.servers.engine.model import load_model

        name, layers = self.model_of(arm)
        device = "cpu" if arm.on_cpu else "auto"
        model: Any = self._models.get(device)
        if model is None:
            bits: Any = "int8-weight-only" if arm.quantised == "before" else "none"
            model = load_model(ModelConfig(id=f"random:{name}", device=device, quantisation=bits), plain=True)
        if not arm.quantised:
            self._models[device] = model
        model.config.num_hidden_layers = layers  # what a call goes through
        model.set_attn_implementation(arm.attention or ("without_mask" if arm.work in PREFILLS else "sdpa"))
        for block in model.model.layers:
            block._compiled_call_impl = None  # of an arm before, by blocks
        return model

    def _steps(self, arm: Arm, model: Any) -> tuple[Callable[[Any], Any], Callable[[], None], list[Any]]:
        """Return (what is timed, what precedes each call, the token ids of the calls)."""
        from transformers import DynamicCache, StaticCache

        torch, rng = self.torch, np.random.default_rng(self.options.seed)
        how: dict[str, Any] = {"mode": None if arm.mode == "default" else arm.mode, "dynamic": arm.dynamic}
        compiled = arm.mode != "eager"
        forward = torch.compile(model, **how) if compiled and arm.scope == "model" else model

        def drawn(tokens: int) -> Any:
            ids = rng.integers(3, model.config.vocab_size, (arm.batch, tokens))
            return torch.from_numpy(ids).to(model.device)

        if arm.work in PREFILLS:
            for block in model.model.layers if compiled and arm.scope == "blocks" else ():
                block.compile(**how)
            lengths = [arm.tokens]
            if arm.work == "prompts":
                lengths = rng.lognormal(5.0, 0.8, self.options.repeats).clip(SHORTEST, LONGEST).astype(int).tolist()
            prompts = [
                drawn(min((size for size in arm.buckets if size >= length), default=length)) for length in lengths
            ]
            return lambda ids: forward(ids, use_cache=False, logits_to_keep=1).logits, lambda: None, prompts
        room = arm.tokens + 256  # for an answer
        static = arm.cache == "static"
        cache: Any = StaticCache(model.config, max_cache_len=room) if static else DynamicCache(config=model.config)
        position = torch.full((arm.batch, 1), arm.tokens, device=model.device)
        model(drawn(arm.tokens), past_key_values=cache, use_cache=True, logits_to_keep=1)

        def forget() -> None:
            for layer in cache.layers if static else ():
                layer.cumulative_length.fill_(arm.tokens)
            if not static:
                cache.crop(arm.tokens - cache.get_seq_length())

        def decode(ids: Any) -> Any:
            return forward(ids, position_ids=position, past_key_values=cache, use_cache=True).logits

        def serve(ids: Any) -> Any:
            top, places = (decode(ids)[:, -1].float() / 0.8).topk(50)
            noise = torch.empty_like(top).exponential_(1)
            return places.gather(-1, (top.softmax(-1) / noise).argmax(-1, keepdim=True))

        step = serve if arm.work == "serve" else decode
        return torch.compile(step, **how) if arm.scope == "function" else step, forget, [drawn(1)]


def measure(bench: Bench, ledger: Ledger) -> None:
    """Measure the claims that were asked for."""
    for name in bench.options.only:
        claim = CLAIMS[name]
        arm = claim.arms[-1]
        about = {"claim": name, "unit": claim.unit, "work": "{}, {} layers, ".format(*bench.model_of(arm)) + arm.does}
        try:
            ledger.add("claims", **about, **bench.row(claim))
        except MeasurementError as error:
            ledger.add("claims", **about, error=str(error))
        except Exception as error:
            ledger.add("claims", **about, error=one_line(named(error)))
            ledger.missed.append(name)


def table(rows: Mapping[str, Row]) -> str:
    """Format every claim as a line of Markdown."""
    head = ["claim", "published", "measured: median (p10–p90)", "figure (95 % interval)", "verdict"]
    lines = [head, ["---"] * len(head)]
    for name, claim in CLAIMS.items():
        row = rows.get(name, {"error": "not measured yet"})
        cells = ["–", "–", row["error"]] if "error" in row else _cells(row)
        published = "–" if math.isnan(claim.low) else f"{claim.low:g} to {claim.high:g} {claim.unit}"
        lines.append([f"{claim.text} (`{name}`)", published.replace("to inf ", "or more "), *cells])
    return "".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |\n" for line in lines)


def _cells(row: Row) -> list[str]:
    sides = []
    for arm in row["arms"]:
        more = f", compile {arm['compile_s']:.3g} s" if not arm["arm"].startswith("eager") else ""
        more += f", {arm['peak_gb']:.3g} GB" if arm["peak_gb"] else ""
        sides.append(f"{arm['arm']} {arm['p50_ms']:.3g} ms ({arm['p10_ms']:.3g}–{arm['p90_ms']:.3g}){more}")
    interval = "" if row["low"] == row["high"] else f" ({row['low']:.3g} to {row['high']:.3g})"
    return [f"{row['work']}: {'; '.join(sides)}", f"{row['figure']:.3g}{interval} {row['unit']}", row["verdict"]]


def main(arguments: Sequence[str]) -> int:
    """Run the command; return the exit code."""
    parser = parser_of("claims.py", __doc__, repeats=100)
    models = sorted({*RANDOM_PRESETS} - RANDOM_ENCODERS)
    add = parser.add_argument
    add("--model", choices=models, default="tiny", help="shape (default %(default)s)")
    add("--cpu-model", choices=models, default="tiny", help="shape of claims about a CPU (default %(default)s)")
    add("--layers", type=count, default=8, help="layers of most claims, some have all (default %(default)s)")
    add("--only", type=several(str, "memory,quantise"), default=tuple(CLAIMS), help=f"of {', '.join(CLAIMS)}")
    add("--results", metavar="FILE", type=Path, nargs="+", help="take the rows of these outputs instead")
    add("--markdown", metavar="FILE", type=Path, help="write the table to this file")
    options = parser.parse_args(arguments)
    if unknown := {*options.only} - {*CLAIMS}:
        parser.error(f"--only {unknown.pop()} is no claim: give names of {', '.join(CLAIMS)}")
    ledger = Ledger()
    if options.results:
        for path in options.results:
            ledger.rows += json.loads(path.read_text(encoding="utf-8").splitlines()[-1])["results"]
    else:
        with tempfile.TemporaryDirectory(prefix="tailgate-claims-", ignore_cleanup_errors=True) as scratch:
            isolate_compiler(os.environ, scratch)  # before torch is imported
            measure(Bench(options, scratch), ledger)
    if options.markdown:
        lines = table({row["claim"]: row for row in ledger.rows})
        text = options.markdown.read_text(encoding="utf-8") if options.markdown.exists() else "| |\n"
        options.markdown.write_text(re.sub(r"(?m)(^\|.*\n)+", lambda _: lines, text, count=1), encoding="utf-8")
    return ledger.finish("claims", arguments, machine=describe_environment(), seed=options.seed)


if __name__ == "__main__":
    end_in_order()
    sys.exit(main(sys.argv[1:]))
