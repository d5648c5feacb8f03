"""Ask every external arm the same prompts after the load, and record what each answered.

Every arm is asked twice, the second time with another seed, in the opposite order and at another replica: who answers
greedily does not care. Nothing is judged here: `tailgate.analysis.judging.gates.greedy` reads the files again at any
time.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, Final

import numpy as np

from tailgate.analysis.records.asked_answers import PATTERN, GreedyAnswer
from tailgate.analysis.records.documents import write_document
from tailgate.loadtests.experiments.model import Experiment
from tailgate.loadtests.external.answers import FailedError, ask, in_threads
from tailgate.loadtests.external.arms import ExternalArm, OpenAiOptions
from tailgate.loadtests.external.asking import Asking, prompt_text
from tailgate.loadtests.traffic.prompts import load_prompt_text
from tailgate.loadtests.traffic.schedule import PlannedRequest, Schedule, planned_requests
from tailgate.loadtests.trials.context import TrialContext

PROMPTS: Final = 48  # with none that departs, fewer than 1 answer in 16 can be another one, with 95 % confidence
AT_ONCE: Final = 8
MOST_S: Final = 600.0  # for all answers of an arm: a server that hangs must not hold up the run for hours


def ask_external_arms(trial: TrialContext, schedule: Schedule) -> None:
    """Ask every arm twice and write what it answered to `answers-ARM.json`; what a server does wrong is in its answers.

    Raises ConfigError for prompts that cannot be made.
    """
    if not (arms := greedy_arms(trial.experiment)):
        return
    contexts = [probe["context"] for row in trial.facts.arms for probe in row.get("probe", ())]
    plans = questions(trial.experiment, schedule, contexts=contexts)
    trial.status.phase = "asking for greedy answers"
    for arm in arms:
        answers = _twice(trial, arm, plans)
        document = {"schema": 3, "trial": trial.number, "arm": arm.name, "answers": answers}
        write_document(trial.folder / PATTERN.replace("*", arm.name), document)
    trial.status.phase, trial.status.detail = "", ""


def _twice(trial: TrialContext, arm: ExternalArm, plans: Sequence[PlannedRequest]) -> list[list[dict[str, Any]]]:
    """Return the arm's answers the first and the second time, each in the order of the questions."""
    traffic, tokenizer = trial.experiment.traffic, trial.experiment.tokenizer
    text = prompt_text(arm, load_prompt_text(tokenizer) if tokenizer else None)
    prompts = [text.prompt(plan) for plan in plans]
    count, deadline = len(plans), time.monotonic() + MOST_S
    in_template = isinstance(arm.options, OpenAiOptions) and arm.options.endpoint == "chat"

    def answer(place: int, turn: int) -> GreedyAnswer:
        replica, tokens = (place + turn) % len(arm.address), plans[place].max_tokens
        given = partial(
            GreedyAnswer,
            # The same text is another prompt in the template of a chat.
            digest=hashlib.sha256(f"{in_template} {prompts[place]}".encode()).hexdigest()[:16],
            asked=tokens,
            replica=arm.replica_names[replica],
        )
        left_s = min(traffic.timeout_s, deadline - time.monotonic())
        if left_s <= 0:
            return given(error=f"it was not asked: all answers had {MOST_S:g} s")
        asking = Asking(
            prompt=prompts[place],
            max_tokens=tokens,
            whole_length=traffic.ignore_eos,
            seed=place + turn * count,
            greedy=True,
        )
        try:
            found = ask(arm, arm.address[replica], asking, timeout_s=left_s)
        except FailedError as error:
            return given(error=str(error))
        return given(text=found.text, pieces=found.pieces)

    def wait(done: int) -> None:
        trial.check()
        trial.status.detail = f"{arm.name}, {done} of {2 * count}"

    first = [partial(answer, place, 0) for place in range(count)]
    second = [partial(answer, place, 1) for place in reversed(range(count))]
    answers = [asdict(item) for item in in_threads([*first, *second], at_once=AT_ONCE, wait=wait)]
    return [answers[:count], answers[count:][::-1]]


def greedy_arms(experiment: Experiment) -> tuple[ExternalArm, ...]:
    """Return whom the trial asks: the external arms where the control is one, unless `parity.served` is false."""
    if not experiment.parity.served or not isinstance(experiment.control, ExternalArm):
        return ()
    return experiment.external_arms if len(experiment.external_arms) > 1 else ()


def questions(
    experiment: Experiment, schedule: Schedule, *, contexts: Sequence[int | None]
) -> tuple[PlannedRequest, ...]:
    """Return requests of the lengths planned all over the trial, each with words of its own.

    An answer has `parity.tokens`, or as many as were planned where its prompt leaves no space for more in one of the
    `contexts` that servers reported.
    """
    wanted, rows = experiment.parity.prompts or PROMPTS, len(schedule)
    if not rows:
        return ()
    tokens = min(experiment.parity.tokens, experiment.engine.max_new_tokens)
    context = min((context for context in contexts if context is not None), default=1 << 31)
    places = np.linspace(0, rows - 1, wanted).round().astype(np.int64)
    found = []
    for number, plan in enumerate(planned_requests(schedule.table.take(places))):
        seed = (plan.prompt_seed + number * 0x9E3779B97F4A7C15) & 0x7FFFFFFFFFFFFFFF
        fits = plan.prompt_tokens + tokens <= context
        found.append(plan._replace(prompt_seed=seed, max_tokens=tokens if fits else min(tokens, plan.max_tokens)))
    return tuple(found)
