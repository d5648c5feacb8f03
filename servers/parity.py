"""What one arm answers to a plan of prompts, and what float64 would have: `python -m servers.parity arm | reference`.

Each runs in a process of its own, started by loadtests/trials/parity_processes.py: compile caches belong to code
objects, and two models may not fit one device. Prints one JSON line for each stage; results are files in --out. Nothing
is judged here.
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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from servers.clock import now_ns
from servers.compiler.policy import UnforeseenShapeError
from servers.compiler.recorder import CompileRecorder
from servers.config import ArmConfig, ModelConfig
from servers.engine.borders import late_contexts, prompt_borders
from servers.engine.encoder import EncoderRunner
from servers.engine.engine import REFUSED, Arrivals, Engine
from servers.engine.messages import Submit
from servers.engine.model import load_model
from servers.engine.quantisation import weight_bytes
from servers.engine.runner import ModelRunner
from servers.engine.runners import runner_for
from servers.engine.scheduler import Job, Scheduler
from servers.fields import ConfigError, build
from servers.program import log_to_stderr, on_its_card_alone, read_arm
from servers.vectors import Batches, make_batches, reference_vectors, served_vectors

log = logging.getLogger("tailgate.parity")

MAX_LOGITS_BYTES = 8 << 30
_CHECKSUM_CHUNK = 1 << 24
_TURNS_APART = 2

Report = Callable[[str, int, int], None]  # what goes on, done, total


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What every arm answers: prompts, how many tokens to answer each with, and, once the control has answered, the
    continuations along which all logits are compared.

    `late_prompt` is one more request, fed `late_tokens` and never asked to answer by itself: its logits are compared at
    `late_places`, counted from its first answer, where contexts are longer than any prompt.
    """

    prompts: tuple[tuple[int, ...], ...]
    counts: tuple[int, ...]
    continuations: tuple[tuple[int, ...], ...] = ()
    late_prompt: tuple[int, ...] = ()
    late_tokens: tuple[int, ...] = ()
    late_places: tuple[int, ...] = ()

    @property
    def positions(self) -> int:
        """Rows of the logits: one for each token of each continuation, then one for each late place."""
        return sum(self.counts) + len(self.late_places)

    def write(self, path: Path) -> None:
        """`path` holds the plan."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Plan:
        """The plan in `path`."""
        return build(cls, json.loads(path.read_text(encoding="utf-8")), where="plan")


def make_plan(
    arms: Sequence[ArmConfig], *, vocab_size: int, prompts: int, tokens: int, seed: int, least: int = 0
) -> Plan:
    """Fresh random prompts that reach every length at which an arm changes its shape.

    Lengths are those of `prompt_borders` of every arm, and the rest spread evenly over orders of magnitude. Answers
    differ in length, so that rows fall free at different steps. `prompts` and `least` are raised to the number of
    lengths at which shapes change. With `prompts` 0, half as many again as the engine has slots, from 16 to 64, or as
    there are such lengths where these are more.
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
    # beside the others, whose numbers are what they were without it
    late_rng = random.Random(f"parity late {seed}")
    return Plan(
        prompts=tuple(tuple(rng.randrange(vocab_size) for _ in range(length)) for length in lengths),
        counts=tuple(rng.randint(fewest, most) for _ in lengths),
        late_prompt=tuple(late_rng.randrange(vocab_size) for _ in range(longest if late else 0)),
        late_tokens=tuple(late_rng.randrange(vocab_size) for _ in range(late[-1] - longest if late else 0)),
        # the token at place n of an answer is decoded from n positions more than the prompt has
        late_places=tuple(context - longest for context in late),
    )


# --- An arm -----------------------------------------------------------------------------------------------------------


def free_run(arm: ArmConfig, runner: ModelRunner, recorder: CompileRecorder, plan: Plan) -> list[list[int]]:
    """The greedy answers [request][token] that the engine itself gives, requests joining while others run.

    Raises RuntimeError, with the engine's own words where it has some, when a request fails or loses tokens;
    UnforeseenShapeError, once all were asked, when a strict arm refuses any.
    """
    engine, arrivals = Engine(arm, runner, recorder.drain), Arrivals()
    answers: list[list[int]] = [[] for _ in plan.prompts]
    waiting = list(range(len(answers)))
    refused: list[str] = []
    turn = 0
    while waiting or not engine.idle:
        # requests join while others run, and none waits for a row
        if waiting and (turn % _TURNS_APART == 0 or engine.idle) and len(engine.scheduler) < arm.engine.slots:
            request = waiting.pop(0)
            arrivals.put(
                Submit(
                    request_id=str(request),
                    prompt=list(plan.prompts[request]),
                    max_tokens=plan.counts[request],
                    recv_ns=now_ns(),
                    ignore_eos=True,
                )
            )
        turn += 1
        arrivals.take(engine)
        outputs, _ = engine.advance(arrivals)
        for output in outputs:
            for name, token in output.tokens:
                answers[int(name)].append(token)
            for finished in output.finished:
                if finished.status == REFUSED:
                    length = len(plan.prompts[int(finished.request_id)])
                    refused.append(f"request {finished.request_id} (prompt of {length} tokens): {finished.message}")
                elif finished.status != "OK":
                    raise RuntimeError(f"request {finished.request_id} ended {finished.status}: {finished.message}")
    if refused:
        raise UnforeseenShapeError(f"{len(refused)} of {len(answers)} requests are refused, first {refused[0]}")
    for request, (answer, count) in enumerate(zip(answers, plan.counts, strict=True)):
        if len(answer) != count:
            raise RuntimeError(f"the engine answered request {request} with {len(answer)} tokens instead of {count}")
    return answers


def forced_logits(runner: ModelRunner, plan: Plan, out: np.ndarray[Any, Any], report: Report) -> None:
    """`out` [positions, vocabulary] float32 holds the logits for every token of every continuation, fed as it is.

    Rows join, run together and leave as they do while serving.
    """
    scheduler = Scheduler(runner.arm.engine)
    for request, (prompt, count) in enumerate(zip(plan.prompts, plan.counts, strict=True)):
        scheduler.submit(Job(request_id=str(request), prompt=list(prompt), max_tokens=count, recv_ns=0))
    first = np.concatenate(([0], np.cumsum(plan.counts)))
    done = 0
    while (step := scheduler.next_step()) is not None:
        rows = runner.logits(step).cpu().numpy()
        for index, job in enumerate(step.jobs):
            if step.chunks and step.chunks[index][1] < len(job.prompt):
                continue  # more of its prompt to come
            request = int(job.request_id)
            out[first[request] + len(job.output)] = rows[index]
            done += 1
            outcome = scheduler.record(job, plan.continuations[request][len(job.output)])
            if outcome is not None and (move := scheduler.release(job.request_id)) is not None:
                runner.move(move)
        report("teacher forcing", done, sum(plan.counts))


def late_logits(runner: ModelRunner, plan: Plan, out: np.ndarray[Any, Any], report: Report) -> list[int]:
    """`out` [late places, vocabulary] holds the logits at the late places; the tokens that they prefer are returned.

    The request stands alone, so that the steps to its borders have one row."""
    if not plan.late_places:
        return []
    scheduler = Scheduler(runner.arm.engine)
    fed = (*plan.late_tokens, 0)  # the last answer is compared and fed nowhere
    scheduler.submit(Job(request_id="late", prompt=list(plan.late_prompt), max_tokens=len(fed), recv_ns=0))
    rows = {place: row for row, place in enumerate(plan.late_places)}
    while (step := scheduler.next_step()) is not None:
        logits = runner.logits(step)
        (job,) = step.jobs
        if step.chunks and step.chunks[0][1] < len(job.prompt):
            continue
        place = len(job.output)
        if place in rows:
            out[rows[place]] = logits[0].cpu().numpy()
        if scheduler.record(job, fed[place]) is not None:
            scheduler.release(job.request_id)
        report("late contexts", place + 1, len(fed))
    return [int(token) for token in out.argmax(axis=1)]


def arm_facts(runner: ModelRunner | EncoderRunner, weights: str) -> dict[str, Any]:
    """What must be equal between arms, as it was loaded and not as it was configured; and in `held`, how the arm holds
    its weights. `weights` is their checksum before they were quantised."""
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
    """The checksum of the weights that are loaded before any is quantised. They are gone again afterwards."""
    loaded = load_model(replace(model, quantisation="none"))
    digest = checksum(loaded)
    del loaded
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return digest


@torch.no_grad()
def checksum(model: nn.Module) -> str:
    """A digest of every parameter and buffer that changes when any element does, in value or in place.

    Each tensor counts as Σ word·(2·index + 1) modulo 2^64, exact in whatever order a device adds; an odd factor keeps
    a change of one word from cancelling itself.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted((*model.named_parameters(), *model.named_buffers())):
        words = _words(tensor.detach())
        total = 0
        for start in range(0, words.numel(), _CHECKSUM_CHUNK):
            part = words[start : start + _CHECKSUM_CHUNK].to(torch.int64)
            odd = torch.arange(start, start + part.numel(), device=part.device, dtype=torch.int64) * 2 + 1
            total = (total + int((part * odd).sum())) % (1 << 64)
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {total};".encode())
    return digest.hexdigest()[:16]


def _words(tensor: torch.Tensor) -> torch.Tensor:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().flatten().view(kinds[tensor.element_size()])


# --- The reference ----------------------------------------------------------------------------------------------------


class NothingBelowFloat64(TorchFunctionMode):
    """Whatever a model rounds to float32 on purpose (norms, softmax, rotary angles) stays float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        widened = {key: _widened(value) for key, value in (kwargs or {}).items()}
        return func(*(_widened(value) for value in args), **widened)


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def load_reference(model: ModelConfig) -> nn.Module:
    """The arms' model with the arms' weights before any is quantised, and attention as plain products."""
    return load_model(replace(model, attention="eager", quantisation="none"))


@torch.no_grad()
def reference_logits(model: nn.Module, plan: Plan, out: np.ndarray[Any, Any], report: Report) -> None:
    """`out` [positions, vocabulary] float64 holds what the whole sequences give, one by one, without any cache.

    The model's weights are widened to float64.
    """
    model.double()
    device = next(model.parameters()).device
    at = 0
    for prompt, continuation in zip(plan.prompts, plan.continuations, strict=True):
        ids = torch.tensor([[*prompt, *continuation[:-1]]], device=device)
        with NothingBelowFloat64():
            logits = model(input_ids=ids, use_cache=False, logits_to_keep=len(continuation)).logits[0]
        if logits.dtype != torch.float64:
            raise RuntimeError(
                f"the reference came out as {logits.dtype}: the model rounds where it cannot be kept from it"
            )
        out[at : at + len(continuation)] = logits.cpu().numpy()
        at += len(continuation)
        report("float64", at, plan.positions)
    if plan.late_places:
        ids = torch.tensor([[*plan.late_prompt, *plan.late_tokens]], device=device)
        places = torch.tensor([len(plan.late_prompt) - 1 + place for place in plan.late_places], device=device)
        with NothingBelowFloat64():
            logits = model(input_ids=ids, use_cache=False, logits_to_keep=places).logits[0]
        out[at:] = logits.cpu().numpy()
        report("float64", plan.positions, plan.positions)


# --- The process ------------------------------------------------------------------------------------------------------


def run_arm(arm: ArmConfig, task: dict[str, Any], folder: Path) -> None:
    """`folder` holds facts.json, answers.json and logits.npy of `arm`, of an encoder vectors.npy and
    rows.json instead of the last two; or refused.json where it is strict and refuses a shape. The control (no plan yet)
    writes the plan; one that refuses is no measure: ConfigError."""
    recorder = CompileRecorder()
    recorder.install()
    runner = runner_for(arm, recorder)
    _report("loading", 0, 0)
    weights = weights_of(arm.model) if arm.model.quantisation != "none" else ""
    runner.load()
    _write_facts(folder, arm_facts(runner, weights or checksum(runner.model)))
    texts = _given_texts(task, runner.vocab_size) if task["texts"] and arm.name in task["on_texts"] else None
    runner.warm_up(lambda done, total, detail: _report(f"warm-up {detail}", done, total))
    plan_path = Path(task["plan"])
    makes_plan = not plan_path.exists()
    arms = [ArmConfig.from_dict(table) for table in task["arms"]]
    if makes_plan:
        sizes = {name: task[name] for name in ("prompts", "tokens", "seed", "least")}
        plan = make_plan(arms, vocab_size=runner.vocab_size, **sizes)
    else:
        plan = Plan.read(plan_path)
    new_plan = plan_path if makes_plan else None
    try:
        if isinstance(runner, EncoderRunner):
            _leave_vectors(arm, runner, recorder, plan, make_batches(arms, len(plan.prompts)), new_plan, folder)
        else:
            _leave_answers(arm, runner, recorder, plan, texts, new_plan, folder)
    except UnforeseenShapeError as error:
        if makes_plan:
            raise ConfigError(
                f"the control refuses what it is asked: {error}; take a control that is not strict"
            ) from None
        (folder / "refused.json").write_text(json.dumps({"reason": str(error)}), encoding="utf-8")
        log.warning("%s", error)


def _leave_answers(
    arm: ArmConfig,
    runner: ModelRunner,
    recorder: CompileRecorder,
    plan: Plan,
    texts: Plan | None,
    new_plan: Path | None,
    folder: Path,
) -> None:
    """Answers and logits are in `folder`, and the plan with the answers as its continuations in `new_plan`, if any."""
    logits = _matrix(folder / "logits.npy", plan, runner.vocab_size, np.float32)
    _report("free run", 0, 0)
    answers = free_run(arm, runner, recorder, plan)
    (folder / "answers.json").write_text(json.dumps(answers), encoding="utf-8")
    if new_plan is not None:
        plan = replace(plan, continuations=tuple(map(tuple, answers)))
        plan.write(new_plan)
    forced_logits(runner, plan, logits, _report)
    late = late_logits(runner, plan, logits[sum(plan.counts) :], _report)
    if late:  # an answer like the others: what the arm prefers there
        (folder / "answers.json").write_text(json.dumps([*answers, late]), encoding="utf-8")
    logits.flush()
    if texts is not None:
        logits = _matrix(folder / "texts.npy", texts, runner.vocab_size, np.float32)
        forced_logits(runner, texts, logits, _report)
        logits.flush()


def _leave_vectors(
    arm: ArmConfig,
    runner: EncoderRunner,
    recorder: CompileRecorder,
    plan: Plan,
    batches: Batches,
    new_plan: Path | None,
    folder: Path,
) -> None:
    """Vectors are in `folder`, and which text stands in which row of them; the plan is in `new_plan`, if any."""
    if new_plan is not None:
        plan.write(new_plan)
    np.save(folder / "vectors.npy", served_vectors(arm, runner, recorder, plan.prompts, batches, _report))
    (folder / "rows.json").write_text(json.dumps(batches.rows), encoding="utf-8")


def run_reference(arm: ArmConfig, task: dict[str, Any], folder: Path) -> None:
    """`folder` holds facts.json and logits.npy, or vectors.npy, of the float64 reference for the control `arm`."""
    _report("loading", 0, 0)
    model: Any = load_reference(arm.model)
    _write_facts(folder, {"weights": checksum(model)})
    if arm.model.embeds:
        texts = Plan.read(Path(task["plan"])).prompts
        vectors = reference_vectors(model, arm.model.pooling, texts, NothingBelowFloat64, _report)
        np.save(folder / "vectors.npy", vectors)
        return
    vocab_size = int(model.config.get_text_config().vocab_size)
    plans = {"logits.npy": Plan.read(Path(task["plan"]))}
    if task["texts"]:
        plans["texts.npy"] = _given_texts(task, vocab_size)
    for name, plan in plans.items():
        logits = _matrix(folder / name, plan, vocab_size, np.float64)
        reference_logits(model, plan, logits, _report)
        logits.flush()


def _given_texts(task: dict[str, Any], vocab_size: int) -> Plan:
    """The texts of the task, which are of this vocabulary. Raises ConfigError."""
    texts = Plan.read(Path(task["texts"]))
    largest = max(token for ids in (*texts.prompts, *texts.continuations) for token in ids)
    if largest >= vocab_size:
        raise ConfigError(
            f"parity.texts has token {largest} but the model's vocabulary has {vocab_size}: write the texts with the "
            "model's own tokenizer"
        )
    return texts


def _write_facts(folder: Path, facts: dict[str, Any]) -> None:
    (folder / "facts.json").write_text(json.dumps(facts), encoding="utf-8")
    _print({"facts": facts})


def _matrix(path: Path, plan: Plan, vocab_size: int, dtype: type) -> np.memmap[Any, Any]:
    """A new memory-mapped file for [positions, vocabulary]. Raises ConfigError when it would be too large."""
    size = plan.positions * vocab_size * np.dtype(dtype).itemsize
    if size > MAX_LOGITS_BYTES:
        raise ConfigError(
            f"{plan.positions} positions × {vocab_size} tokens of vocabulary are {size / 2**30:.1f} GiB of logits, "
            f"limit {MAX_LOGITS_BYTES >> 30} GiB: lower parity.prompts or parity.tokens, or give fewer parity.texts"
        )
    return np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=(plan.positions, vocab_size))


def _print(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


def _report(stage: str, done: int, total: int) -> None:
    _print({"stage": stage, "done": done, "total": total})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 0 done, 2 cannot be configured so, 1 broke."""
    parser = argparse.ArgumentParser(prog="python -m servers.parity", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("arm", "reference"))
    parser.add_argument(
        "--config", required=True, help="the arm as JSON (ArmConfig.to_dict()); the control's for reference"
    )
    parser.add_argument("--task", required=True, help="what to ask, as JSON: plan, texts, arms, prompts, tokens, seed")
    parser.add_argument("--out", required=True, help="folder for facts, answers and logits")
    options = parser.parse_args(arguments)
    log_to_stderr()
    try:
        arm = on_its_card_alone(read_arm(options.config), os.environ)
        task = json.loads(Path(options.task).read_text(encoding="utf-8"))
        run = run_arm if options.what == "arm" else run_reference
        run(arm, task, Path(options.out))
    except ConfigError as error:
        _print({"refused": str(error)})
        return 2
    except torch.OutOfMemoryError as error:
        # float64 takes four times the memory of bfloat16
        remedy = "lower the engine's limits" if options.what == "arm" else "set parity.reference = false"
        _print({"refused": f"the device is too small ({str(error).splitlines()[0]}): {remedy}, or take a larger one"})
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
