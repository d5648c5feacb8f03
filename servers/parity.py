"""Measure what one arm answers to a plan, and what float64 would: `python -m tailgate.servers.parity arm | reference`.

Each runs in a process of its own: compile caches belong to code objects, and two models may not fit one device. Prints
one JSON line for each stage; results are files in --out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import math
import os
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tailgate.servers.compiler.policy import UnforeseenShapeError
from tailgate.servers.compiler.recorder import CompileRecorder
from tailgate.servers.complaint import ConfigError
from tailgate.servers.config import ArmConfig, ModelConfig, Pooling
from tailgate.servers.engine.encoder import EncoderRunner, EncodeStep
from tailgate.servers.engine.in_process import ask, requests_of
from tailgate.servers.engine.model import load_model
from tailgate.servers.engine.quantisation import weight_bytes
from tailgate.servers.engine.runner import ModelRunner, runner_for
from tailgate.servers.engine.scheduler import Job
from tailgate.servers.engine.shapes import late_contexts, prompt_borders
from tailgate.servers.fields import Listed, Settings, read
from tailgate.servers.processes import Loaded, Refused, Stage, say
from tailgate.servers.program import log_to_stderr, pin_to_card, read_arm

log = logging.getLogger("tailgate.parity")

MAX_LOGITS_BYTES = 8 << 30

Batches = Sequence[tuple[int, ...]]  # the numbers of the texts of each batch


@dataclass(frozen=True, slots=True)
class Fed:
    """A prompt, the tokens that follow it whatever a model prefers, and the row of the logits by compared place: the
    token at place n follows n positions more than the prompt has. The last token is fed nowhere."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    rows: dict[int, int]


Numbers = Annotated[tuple[int, ...], Listed]
Lists = Annotated[tuple[Numbers, ...], Listed]


class Plan(Settings):
    """What every arm answers: prompts, how many tokens to answer each with, and, from the control, the continuations
    along which all logits are compared.

    `late_prompt` is one more request, fed `late_tokens` and never asked to answer by itself: its logits are compared at
    `late_places`, counted from its first answer, where contexts are longer than any prompt.
    """

    prompts: Lists
    counts: Numbers
    continuations: Lists = ()
    late_prompt: Numbers = ()
    late_tokens: Numbers = ()
    late_places: Numbers = ()

    @property
    def positions(self) -> int:
        """Rows of the logits: one for each token of each continuation, then one for each late place."""
        return sum(self.counts) + len(self.late_places)

    def sequences(self) -> list[Fed]:
        """Return what is fed token by token: the continuations, then the late request, if any."""
        fed, first = [], 0
        for prompt, tokens in zip(self.prompts, self.continuations, strict=True):
            fed.append(Fed(prompt, tokens, {place: first + place for place in range(len(tokens))}))
            first += len(tokens)
        if self.late_places:
            rows = {place: first + index for index, place in enumerate(self.late_places)}
            fed.append(Fed(self.late_prompt, (*self.late_tokens, 0), rows))
        return fed


def read_plan(path: str | Path) -> Plan:
    """Return the plan in the JSON file."""
    return read(Plan, json.loads(Path(path).read_text(encoding="utf-8")), where="plan")


def make_plan(
    arms: Sequence[ArmConfig], *, vocab_size: int, prompts: int, tokens: int, seed: int, least: int = 0
) -> Plan:
    """Draw random prompts that reach every length at which an arm changes its shape.

    The other lengths spread evenly over orders of magnitude. Answers differ in length, so that rows become free at
    different steps. `prompts` and `least` are raised to the number of such lengths. With `prompts` 0, half as many
    again as the engine has slots, from 16 to 64, or as there are such lengths.
    """
    engine = arms[0].engine
    longest = engine.max_prompt_tokens
    most = min(tokens, engine.max_new_tokens)
    # two tokens at least where there may be: the first is of the prefill, and a decode step is asked too
    fewest = max((most + 1) // 2, min(2, most))
    borders = sorted(frozenset[int]().union(*map(prompt_borders, arms)))
    slots = min(64, max(16, engine.slots + engine.slots // 2))
    count = max(prompts or max(slots, len(borders) + len(borders) // 2, least), len(borders))
    rng = random.Random(f"parity {seed}")
    lengths = rng.sample(borders, len(borders))
    lengths += [round(math.exp(rng.uniform(0.0, math.log(longest)))) for _ in range(count - len(lengths))]
    rng.shuffle(lengths)
    late = sorted(frozenset[int]().union(*map(late_contexts, arms)))
    # a generator of its own leaves the other prompts as they are without it
    late_rng = random.Random(f"parity late {seed}")
    return Plan(
        prompts=tuple(tuple(rng.randrange(vocab_size) for _ in range(length)) for length in lengths),
        counts=tuple(rng.randint(fewest, most) for _ in lengths),
        late_prompt=tuple(late_rng.randrange(vocab_size) for _ in range(longest if late else 0)),
        late_tokens=tuple(late_rng.randrange(vocab_size) for _ in range(late[-1] - longest if late else 0)),
        late_places=tuple(context - longest for context in late),
    )


def free_run(runner: ModelRunner, plan: Plan) -> list[list[int]]:
    """Return the greedy answers [request][token], requests joining while others run."""
    requests = requests_of(plan.prompts, plan.counts)
    return list(ask(runner, requests, slots=runner.arm.engine.slots).tokens.values())


def forced_logits(runner: ModelRunner, plan: Plan, out: np.ndarray[Any, Any]) -> None:
    """Fill `out` [positions, vocabulary] float32 with the logits for every compared token of the plan.

    The engine serves as always; only the tokens are the plan's. Rows join, run together and leave. The late request
    runs alone, so that the steps at its borders have one row.
    """
    sequences = plan.sequences()
    done = 0

    def choose(logits: torch.Tensor, greedy: torch.Tensor, jobs: Sequence[Job], places: Sequence[int]) -> torch.Tensor:
        nonlocal done
        values = logits[list(places)].float().cpu().numpy()
        tokens = [0] * len(greedy)
        for job, place, row in zip(jobs, places, values, strict=True):
            if job.prefilled < len(job.prompt):
                continue  # more of its prompt to come
            fed, at = sequences[int(job.request_id)], job.launched - 1
            tokens[place] = fed.tokens[at]
            if at in fed.rows:
                out[fed.rows[at]] = row
                done += 1
        _report("teacher forcing", done, plan.positions)
        return torch.tensor(tokens, dtype=greedy.dtype, device=greedy.device)

    choosing, runner.choose = runner.choose, choose
    try:
        together = len(plan.prompts)
        for first, last in ((0, together), (together, len(sequences))):
            some = sequences[first:last]
            ask(runner, requests_of([fed.prompt for fed in some], [len(fed.tokens) for fed in some], first=first))
    finally:
        runner.choose = choosing


def make_batches(slots: int, texts: int) -> Batches:
    """Put each of `texts` alone, then with others, in batches of each power of two, one more, and all `slots`."""
    powers = [1 << power for power in range(slots.bit_length())]
    sizes = sorted({slots, *powers, *(size + 1 for size in powers if size < slots)} - {1})
    batches: list[tuple[int, ...]] = [(text,) for text in range(texts)]
    at = turn = 0
    while sizes and (turn < len(sizes) or at < texts):
        size = sizes[turn % len(sizes)]
        batches.append(tuple((at + place) % texts for place in range(size)))
        at, turn = at + size, turn + 1
    return batches


def rows_of(batches: Batches) -> list[tuple[int, int]]:
    """Return (text, size of its batch) for each row of the vectors, in order."""
    return [(text, len(batch)) for batch in batches for text in batch]


def served_vectors(runner: EncoderRunner, texts: Sequence[Sequence[int]], batches: Batches) -> np.ndarray[Any, Any]:
    """Return the vectors [rows, width] float32 that the serving engine gives; NaN where a vector has no direction.

    Raises as `ask`, and RuntimeError when a batch is split.
    """
    vectors: list[bytes] = []
    for batch in batches:
        try:
            ended = ask(runner, requests_of([texts[text] for text in batch], [0] * len(batch))).ended
        except UnforeseenShapeError as error:
            raise UnforeseenShapeError(f"texts {', '.join(map(str, batch))} in one batch: {error}") from None
        for place in range(len(batch)):
            finished = ended[str(place)]
            if finished.timing.batch_size != len(batch):
                raise RuntimeError(f"the engine made a batch of {finished.timing.batch_size} of {len(batch)} texts")
            vectors.append(finished.vector)
        _report("embedding", len(vectors), len(rows_of(batches)))
    width = max(map(len, vectors)) // 4
    unknown = np.full(width, np.nan, dtype=np.float32).tobytes()
    return np.frombuffer(b"".join(vector or unknown for vector in vectors), dtype=np.float32).reshape(
        len(vectors), width
    )


def arm_facts(runner: ModelRunner | EncoderRunner, weights: str) -> dict[str, Any]:
    """Return what must be equal between arms, as loaded; in `held`, how the arm holds its weights. `weights` is their
    checksum before they were quantised."""
    model = runner.model
    every, quantised = weight_bytes(model)
    return {
        "weights": weights,
        "held": {"quantisation": runner.arm.model.quantisation, "bytes": every, "quantised_bytes": quantised},
        "dtypes": ", ".join(sorted({str(item.dtype).removeprefix("torch.") for item in model.parameters()})),
        "attention": str(getattr(model.config, "_attn_implementation", "unknown")),
        "vocabulary": runner.vocab_size,
        "device": runner.device_name(),
        "float32 products": torch.get_float32_matmul_precision(),
        "torch": torch.__version__,
    }


def weights_of(model: ModelConfig) -> str:
    """Load the weights without quantisation and return their checksum."""
    loaded = load_model(model.replace(quantisation="none"))
    digest = checksum(loaded)
    del loaded
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return digest


@torch.no_grad()
def checksum(model: nn.Module) -> str:
    """Digest every parameter and buffer: the result changes when any element does, in value or in place."""
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in sorted((*model.named_parameters(), *model.named_buffers())):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


class NothingBelowFloat64(TorchFunctionMode):
    """Keep at float64 what a model rounds to float32 on purpose: norms, softmax, rotary angles."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        widened = {key: _widened(value) for key, value in (kwargs or {}).items()}
        return func(*(_widened(value) for value in args), **widened)


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@torch.no_grad()
def reference_logits(model: nn.Module, plan: Plan, out: np.ndarray[Any, Any]) -> None:
    """Fill `out` [positions, vocabulary] float64 with what whole sequences give, one by one, without any cache. The
    model's weights are widened."""
    model.double()
    device = next(model.parameters()).device
    done = 0
    for fed in plan.sequences():
        ids = torch.tensor([[*fed.prompt, *fed.tokens[:-1]]], device=device)
        places = torch.tensor([len(fed.prompt) - 1 + place for place in fed.rows], device=device)
        with NothingBelowFloat64():
            logits = model(input_ids=ids, use_cache=False, logits_to_keep=places).logits[0]
        out[list(fed.rows.values())] = in_float64(logits)
        done += len(fed.rows)
        _report("float64", done, plan.positions)


@torch.no_grad()
def reference_vectors(model: nn.Module, pooling: Pooling, texts: Sequence[Sequence[int]]) -> np.ndarray[Any, Any]:
    """Return the vectors [texts, width] float64 of each text alone, unpadded. The model's weights are widened."""
    step = EncodeStep(model.double(), pooling)
    device = next(model.parameters()).device
    rows = []
    for number, text in enumerate(texts):
        ids = torch.tensor([list(text)], device=device)
        with NothingBelowFloat64():
            (vector,) = step(ids, torch.ones_like(ids))
        rows.append(in_float64(vector[0]))
        _report("float64", number + 1, len(texts))
    return np.stack(rows)


def in_float64(values: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return `values` as an array. Raises RuntimeError when a model has rounded them."""
    if values.dtype != torch.float64:
        raise RuntimeError(
            f"the reference came out as {values.dtype}: the model rounds where it cannot be prevented from it"
        )
    return values.cpu().numpy()


def run_arm(arm: ArmConfig, task: dict[str, Any], folder: Path) -> None:
    """Write answers.json and logits.npy of `arm` to `folder`, of an encoder vectors.npy and rows.json
    instead of the last two; or refused.json where it is strict and refuses a shape. The control (no plan yet) writes
    the plan; one that refuses is no measure: ConfigError."""
    recorder = CompileRecorder()
    recorder.install()
    runner = runner_for(arm, recorder)
    _report("loading")
    weights = weights_of(arm.model) if arm.model.quantisation != "none" else ""
    runner.load()
    say(Loaded(facts=arm_facts(runner, weights or checksum(runner.model))))
    texts = _given_texts(task, runner.vocab_size) if task["texts"] and arm.name in task["on_texts"] else None
    runner.warm_up(lambda done, total, detail: _report(f"warm-up {detail}", done, total))
    plan_path = Path(task["plan"])
    is_control = not plan_path.exists()
    arms = [ArmConfig.from_dict(table) for table in task["arms"]]
    if is_control:
        sizes = {name: task[name] for name in ("prompts", "tokens", "seed", "least")}
        plan = make_plan(arms, vocab_size=runner.vocab_size, **sizes)
    else:
        plan = read_plan(plan_path)
    try:
        if isinstance(runner, EncoderRunner):
            batches = make_batches(min(item.engine.slots for item in arms), len(plan.prompts))
            np.save(folder / "vectors.npy", served_vectors(runner, plan.prompts, batches))
            _write(folder / "rows.json", rows_of(batches))
        else:
            plan = _write_answers(runner, plan, folder)
            if texts is not None:
                logits = _matrix(folder / "texts.npy", texts, runner.vocab_size, np.float32)
                forced_logits(runner, texts, logits)
                logits.flush()
    except UnforeseenShapeError as error:
        if is_control:
            raise ConfigError(
                f"the control refuses what it is asked: {error}; take a control that is not strict"
            ) from None
        _write(folder / "refused.json", {"reason": str(error)})
        log.warning("%s", error)
    if is_control:
        plan_path.write_text(plan.model_dump_json(), encoding="utf-8")


def _write_answers(runner: ModelRunner, plan: Plan, folder: Path) -> Plan:
    """Write answers and logits to `folder`; returns the plan, with the answers as its continuations if it had none."""
    logits = _matrix(folder / "logits.npy", plan, runner.vocab_size, np.float32)
    _report("free run")
    answers = free_run(runner, plan)
    if not plan.continuations:
        plan = plan.replace(continuations=tuple(map(tuple, answers)))
    forced_logits(runner, plan, logits)
    logits.flush()
    # an answer like the others: the tokens that the arm prefers at the late places
    late = logits[sum(plan.counts) :].argmax(axis=1).tolist()
    _write(folder / "answers.json", [*answers, late] if late else answers)
    return plan


def run_reference(arm: ArmConfig, task: dict[str, Any], folder: Path) -> None:
    """Write logits.npy, or vectors.npy, of the float64 reference for the control `arm` to `folder`: its weights before
    they are quantised, and attention as plain products."""
    _report("loading")
    model: Any = load_model(arm.model.replace(quantisation="none"), plain=True)
    say(Loaded(facts={"weights": checksum(model)}))
    if arm.model.embeds:
        texts = read_plan(task["plan"]).prompts
        np.save(folder / "vectors.npy", reference_vectors(model, arm.model.pooling, texts))
        return
    vocab_size = int(model.config.get_text_config().vocab_size)
    plans = {"logits.npy": read_plan(task["plan"])}
    if task["texts"]:
        plans["texts.npy"] = _given_texts(task, vocab_size)
    for name, plan in plans.items():
        logits = _matrix(folder / name, plan, vocab_size, np.float64)
        reference_logits(model, plan, logits)
        logits.flush()


def _given_texts(task: dict[str, Any], vocab_size: int) -> Plan:
    """Read the texts of the task. Raises ConfigError when they are of another vocabulary."""
    texts = read_plan(task["texts"])
    largest = max(token for ids in (*texts.prompts, *texts.continuations) for token in ids)
    if largest >= vocab_size:
        raise ConfigError(
            f"parity.texts has token {largest} but the model's vocabulary has {vocab_size}: write the texts with the "
            "model's own tokenizer"
        )
    return texts


def _write(path: Path, document: Any) -> None:
    path.write_text(json.dumps(document), encoding="utf-8")


def _matrix(path: Path, plan: Plan, vocab_size: int, dtype: type) -> np.memmap[Any, Any]:
    """Create a memory-mapped file of [positions, vocabulary]. Raises ConfigError when it would be too large."""
    size = plan.positions * vocab_size * np.dtype(dtype).itemsize
    if size > MAX_LOGITS_BYTES:
        raise ConfigError(
            f"{plan.positions} positions × {vocab_size} tokens of vocabulary are {size / 2**30:.1f} GiB of logits, "
            f"limit {MAX_LOGITS_BYTES >> 30} GiB: lower parity.prompts or parity.tokens, or give fewer parity.texts"
        )
    return np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=(plan.positions, vocab_size))


def _report(stage: str, done: int = 0, total: int = 0) -> None:
    say(Stage(name=stage, done=done, total=total))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 0 done, 2 cannot be configured so, 1 broke."""
    parser = argparse.ArgumentParser(prog="python -m tailgate.servers.parity")
    parser.add_argument("what", choices=("arm", "reference"))
    parser.add_argument("--config", required=True, help="the arm, or the reference's control, as JSON")
    parser.add_argument("--task", required=True, help="what to ask, as JSON: plan, texts, arms, prompts, tokens, seed")
    parser.add_argument("--out", required=True, help="folder for answers and logits")
    options = parser.parse_args(arguments)
    log_to_stderr()
    try:
        arm = pin_to_card(read_arm(options.config), os.environ)
        task = json.loads(Path(options.task).read_text(encoding="utf-8"))
        run = run_arm if options.what == "arm" else run_reference
        run(arm, task, Path(options.out))
    except ConfigError as error:
        say(Refused(why=str(error)))
        return 2
    except torch.OutOfMemoryError as error:
        # float64 takes four times the memory of bfloat16
        remedy = "lower the engine's limits" if options.what == "arm" else "set parity.reference = false"
        say(Refused(why=f"the device is too small ({str(error).splitlines()[0]}): {remedy}, or take a larger one"))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
