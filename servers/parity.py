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
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel
from torch import nn
from torch.overrides import TorchFunctionMode

from tailgate.servers.compiler.policy import UnforeseenShapeError
from tailgate.servers.complaint import ConfigError
from tailgate.servers.config import ArmConfig, ModelConfig, Pooling
from tailgate.servers.engine.encoder import EncoderRunner, EncodeStep
from tailgate.servers.engine.in_process import ask, requests_of, warm_runner
from tailgate.servers.engine.model import load_model
from tailgate.servers.engine.runner import ModelRunner
from tailgate.servers.engine.scheduler import Job
from tailgate.servers.engine.shapes import prompt_borders
from tailgate.servers.processes import Loaded, Refused, Stage, say
from tailgate.servers.program import log_to_stderr, pin_to_card, read_arm

log = logging.getLogger("tailgate.parity")

MAX_LOGITS_BYTES = 8 << 30
OUTPUTS = "outputs.npy"

Batches = Sequence[tuple[int, ...]]  # the numbers of the texts of each batch


Numbers = tuple[int, ...]
Text = tuple[Sequence[int], Sequence[int]]  # what is read, and what is predicted after it


class Request(BaseModel, frozen=True):
    """A prompt, the tokens that follow it, and the `places` of those whose logits are compared.

    The token at place n follows n positions more than the prompt has. The last token is fed nowhere.
    """

    prompt: Numbers
    tokens: Numbers
    places: Numbers

    @classmethod
    def whole(cls, prompt: Sequence[int], tokens: Sequence[int]) -> Request:
        """Return a request of which every token is compared."""
        return cls(prompt=tuple(prompt), tokens=tuple(tokens), places=tuple(range(len(tokens))))


class Plan(BaseModel, frozen=True):
    """What every arm is asked.

    It answers the first `asked` requests by itself, with as many tokens as they have; an encoder embeds their prompts.
    Then it is fed every request whatever it prefers: the control's answers, one that reaches contexts longer than any
    prompt, and last, where its weights are quantised, as many given `texts`.
    """

    asked: int
    texts: int
    requests: tuple[Request, ...]

    @property
    def rows(self) -> dict[tuple[int, int], int]:
        """The row of the logits for each (request, place) that is compared."""
        compared = [(number, place) for number, request in enumerate(self.requests) for place in request.places]
        return {key: row for row, key in enumerate(compared)}

    @property
    def prompts(self) -> list[Numbers]:
        """The prompts that an arm answers by itself."""
        return [request.prompt for request in self.requests[: self.asked]]

    def answered(self, answers: Sequence[Sequence[int]]) -> Plan:
        """Return the plan along the control's `answers`."""
        own = (Request.whole(prompt, tokens) for prompt, tokens in zip(self.prompts, answers, strict=True))
        return self.model_copy(update={"requests": (*own, *self.requests[self.asked :])})

    def without_texts(self) -> Plan:
        return self.model_copy(update={"texts": 0, "requests": self.requests[: len(self.requests) - self.texts]})


def read_plan(path: str | Path) -> Plan:
    """Return the plan in the JSON file."""
    return Plan.model_validate_json(Path(path).read_text(encoding="utf-8"))


def make_plan(
    arms: Sequence[ArmConfig], *, vocab_size: int, prompts: int, tokens: int, seed: int, texts: Sequence[Text] = ()
) -> Plan:
    """Draw random prompts that reach every length at which an arm changes its shape.

    The other lengths spread evenly over orders of magnitude. Answers differ in length, so that rows become free at
    different steps. `prompts` is raised to the number of such lengths; 0 is half as many again as the engine has slots,
    from 16 to 64, or as there are such lengths. Raises ConfigError where `texts` are of another vocabulary.
    """
    engine = arms[0].engine
    longest = engine.max_prompt_tokens
    most = min(tokens, engine.max_new_tokens)
    # two tokens at least where there may be: the first is of the prefill, and a decode step is asked too
    fewest = max((most + 1) // 2, min(2, most))
    borders = sorted(frozenset[int]().union(*map(prompt_borders, arms)))
    slots = min(64, max(16, engine.slots + engine.slots // 2))
    count = max(prompts or max(slots, len(borders) + len(borders) // 2), len(borders))
    rng = random.Random(f"parity {seed}")
    lengths = rng.sample(borders, len(borders))
    lengths += [round(math.exp(rng.uniform(0.0, math.log(longest)))) for _ in range(count - len(lengths))]
    rng.shuffle(lengths)

    def drawn(length: int) -> Numbers:
        return tuple(rng.randrange(vocab_size) for _ in range(length))

    requests = [Request.whole(drawn(length), [0] * rng.randint(fewest, most)) for length in lengths]
    last = engine.longest_context - longest
    if last > 1:  # the longest context, which an answer reaches only as it grows
        requests.append(Request(prompt=drawn(longest), tokens=drawn(last + 1), places=(last,)))
    requests += [Request.whole(read, predicted) for read, predicted in texts]
    largest = max((token for text in texts for ids in text for token in ids), default=0)
    if largest >= vocab_size:
        raise ConfigError(
            f"parity.texts has token {largest} but the model's vocabulary has {vocab_size}: write the texts with the "
            "model's own tokenizer"
        )
    return Plan(asked=count, texts=len(texts), requests=tuple(requests))


def free_run(runner: ModelRunner, plan: Plan) -> list[list[int]]:
    """Return the greedy answers [request][token], all asked at once: several prompts share a step."""
    counts = [len(request.tokens) for request in plan.requests[: plan.asked]]
    return list(ask(runner, requests_of(plan.prompts, counts)).tokens.values())


def forced_logits(runner: ModelRunner, plan: Plan, out: np.ndarray[Any, Any]) -> None:
    """Fill `out` [rows, vocabulary] float32 with the logits for every compared token of the plan.

    The engine serves as always; only the tokens are the plan's. Requests join one by one while others run, so that
    steps have many sizes: together, prompts would fill the largest.
    """
    requests, rows, done = plan.requests, plan.rows, 0

    def choose(logits: torch.Tensor, greedy: torch.Tensor, jobs: Sequence[Job], places: Sequence[int]) -> torch.Tensor:
        nonlocal done
        values = logits[list(places)].float().cpu().numpy()
        tokens = [0] * len(greedy)
        for job, place, row in zip(jobs, places, values, strict=True):
            if job.prefilled < len(job.prompt):
                continue  # more of its prompt to come
            number, at = int(job.request_id), job.launched - 1
            tokens[place] = requests[number].tokens[at]
            if (number, at) in rows:
                out[rows[number, at]] = row
                done += 1
        _report("teacher forcing", done, len(rows))
        return torch.tensor(tokens, dtype=greedy.dtype, device=greedy.device)

    choosing, runner.choose = runner.choose, choose
    try:
        asked = requests_of([item.prompt for item in requests], [len(item.tokens) for item in requests])
        ask(runner, asked, slots=runner.arm.engine.slots)
    finally:
        runner.choose = choosing


def make_batches(slots: int, texts: int) -> Batches:
    """Put every text into batches of one, of each power of two, of one more, and of all `slots`."""
    powers = [1 << power for power in range(slots.bit_length())]
    sizes = sorted({slots, *powers, *(size + 1 for size in powers if size < slots)})
    starts = ((size, first) for size in sizes for first in range(0, texts, size))
    return [tuple((first + place) % texts for place in range(size)) for size, first in starts]


def rows_of(batches: Batches) -> list[tuple[int, int]]:
    """Return (text, size of its batch) for each row of the vectors, in order."""
    return [(text, len(batch)) for batch in batches for text in batch]


def served_vectors(runner: EncoderRunner, texts: Sequence[Sequence[int]], batches: Batches) -> np.ndarray[Any, Any]:
    """Return the vectors [rows, width] float32 that the serving engine gives; NaN where a vector has no direction.

    Raises as `ask`, and RuntimeError when a batch is split.
    """
    vectors: list[bytes] = []
    for batch in batches:
        ended = ask(runner, requests_of([texts[text] for text in batch], [0] * len(batch))).ended
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
    """Return what must be equal between arms, as loaded. `weights` is their checksum before they were quantised."""
    model = runner.model
    return {
        "weights": weights,
        "dtypes": ", ".join(sorted({str(item.dtype).removeprefix("torch.") for item in model.parameters()})),
        "attention": str(getattr(model.config, "_attn_implementation", "unknown")),
        "vocabulary": runner.vocab_size,
        "device": runner.device_name(),
        "float32 products": torch.get_float32_matmul_precision(),
        "torch": torch.__version__,
    }


def weights_of(model: ModelConfig) -> str:
    """Load the weights without quantisation and return their checksum."""
    digest = checksum(load_model(model.replace(quantisation="none")))
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
        widened = {key: _doubled(value) for key, value in (kwargs or {}).items()}
        return func(*(_doubled(value) for value in args), **widened)


def _doubled(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def widened(model: nn.Module) -> nn.Module:
    """Return the model with weights in float64, on the host where the device is too small for them."""
    try:
        return model.double()
    except torch.OutOfMemoryError:
        log.warning("the device is too small for float64: the reference runs on the host")
        return model.cpu().double()


@torch.no_grad()
def reference_logits(model: nn.Module, plan: Plan, out: np.ndarray[Any, Any]) -> None:
    """Fill `out` [rows, vocabulary] float64 with what whole sequences give, one by one, without any cache."""
    model = widened(model)
    device = next(model.parameters()).device
    done = 0
    for request in plan.requests:
        ids = torch.tensor([[*request.prompt, *request.tokens[:-1]]], device=device)
        places = torch.tensor([len(request.prompt) - 1 + place for place in request.places], device=device)
        with NothingBelowFloat64():
            logits = model(input_ids=ids, use_cache=False, logits_to_keep=places).logits[0]
        out[done : done + len(places)] = in_float64(logits)
        done += len(places)
        _report("float64", done, len(out))


@torch.no_grad()
def reference_vectors(model: nn.Module, pooling: Pooling, texts: Sequence[Sequence[int]]) -> np.ndarray[Any, Any]:
    """Return the vectors [texts, width] float64 of each text alone, unpadded."""
    step = EncodeStep(widened(model), pooling)
    device = next(model.parameters()).device
    rows = []
    for number, text in enumerate(texts):
        ids = torch.tensor([list(text)], device=device)
        with NothingBelowFloat64():
            (vector,) = step(ids)
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
    """Write outputs.npy of `arm` to `folder`: its logits, or an encoder's vectors; and answers.json: its tokens, or the
    text and the size of the batch of each vector. Or refused.json where it is strict and refuses a shape.

    The control (no plan yet) writes the plan; one that refuses is no measure: ConfigError.
    """
    _report("loading")
    quantised = arm.model.quantisation != "none"
    weights = weights_of(arm.model) if quantised else ""
    with warm_runner(arm, lambda done, total, detail: _report(f"warm-up {detail}", done, total)) as runner:
        say(Loaded(facts=arm_facts(runner, weights or checksum(runner.model))))
        plan_path = Path(task["plan"])
        is_control = not plan_path.exists()
        arms = [ArmConfig.from_dict(table) for table in task["arms"]]
        if is_control:
            sizes = {name: task[name] for name in ("prompts", "tokens", "seed", "texts")}
            plan = make_plan(arms, vocab_size=runner.vocab_size, **sizes)
        else:
            plan = read_plan(plan_path)
        try:
            if isinstance(runner, EncoderRunner):
                batches = make_batches(min(item.engine.slots for item in arms), plan.asked)
                np.save(folder / OUTPUTS, served_vectors(runner, plan.prompts, batches))
                _write(folder / "answers.json", rows_of(batches))
            else:
                _report("free run")
                answers = free_run(runner, plan)
                _write(folder / "answers.json", answers)
                plan = plan.answered(answers) if is_control else plan
                fed = plan if quantised else plan.without_texts()
                logits = _matrix(folder / OUTPUTS, fed, runner.vocab_size, np.float32)
                forced_logits(runner, fed, logits)
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


def run_reference(arm: ArmConfig, task: dict[str, Any], folder: Path) -> None:
    """Write outputs.npy of the float64 reference for the control `arm` to `folder`: its weights before they are
    quantised, and attention as plain products."""
    _report("loading")
    model: Any = load_model(arm.model.replace(quantisation="none"), plain=True)
    say(Loaded(facts={"weights": checksum(model)}))
    plan = read_plan(task["plan"])
    if arm.model.embeds:
        np.save(folder / OUTPUTS, reference_vectors(model, arm.model.pooling, plan.prompts))
        return
    logits = _matrix(folder / OUTPUTS, plan, int(model.config.get_text_config().vocab_size), np.float64)
    reference_logits(model, plan, logits)
    logits.flush()


def _write(path: Path, document: Any) -> None:
    path.write_text(json.dumps(document), encoding="utf-8")


def _matrix(path: Path, plan: Plan, vocab_size: int, dtype: type) -> np.memmap[Any, Any]:
    """Create a memory-mapped file of [rows, vocabulary]. Raises ConfigError when it would be too large."""
    positions = len(plan.rows)
    size = positions * vocab_size * np.dtype(dtype).itemsize
    if size > MAX_LOGITS_BYTES:
        raise ConfigError(
            f"{positions} positions × {vocab_size} tokens of vocabulary are {size / 2**30:.1f} GiB of logits, "
            f"limit {MAX_LOGITS_BYTES >> 30} GiB: lower parity.prompts or parity.tokens, or give fewer parity.texts"
        )
    return np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=(positions, vocab_size))


def _report(stage: str, done: int = 0, total: int = 0) -> None:
    say(Stage(name=stage, done=done, total=total))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 0 done, 2 cannot be configured so, 1 broke."""
    parser = argparse.ArgumentParser(prog="python -m tailgate.servers.parity")
    parser.add_argument("what", choices=("arm", "reference"))
    parser.add_argument("--config", required=True, help="the arm, or the reference's control, as JSON")
    parser.add_argument("--task", required=True, help="what to ask, as JSON: plan, arms, prompts, tokens, seed, texts")
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
        why = f"the device is too small ({str(error).splitlines()[0]})"
        say(Refused(why=f"{why}: lower the engine's limits, or take a larger one"))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
