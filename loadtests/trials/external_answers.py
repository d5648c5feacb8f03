"""Ask every external arm the same prompts, before the load and after it, and record what each answered.

Each time every arm is asked twice, the second time with another seed, in the opposite order and at another replica: who
answers greedily does not care. Nothing is judged here: `tailgate.analysis.judging.gates.greedy` reads the files again
at any time.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Final

import numpy as np

from tailgate.analysis.records.asked_answers import PATTERN
from tailgate.analysis.records.documents import write_document
from tailgate.loadtests.experiments.model import Experiment
from tailgate.loadtests.external.answers import Answer, ask
from tailgate.loadtests.external.arms import ExternalArm
from tailgate.loadtests.external.asking import Asking, prompt_text
from tailgate.loadtests.traffic.prompts import load_prompt_text
from tailgate.loadtests.traffic.schedule import PlannedRequest, Schedule, planned_requests
from tailgate.loadtests.trials.context import TrialContext
from tailgate.loadtests.trials.served_parity import in_threads

PROMPTS: Final = 48  # with none that departs, fewer than 1 answer in 16 can be another one, with 95 % confidence
AT_ONCE: Final = 8
ROUND_S: Final = 300.0  # a server that hangs must not hold up the run for hours
_SEEDS: Final = (20_011, 40_009)  # of the first and the second time


class ExternalAnswers:
    """The answers of the trial's external arms, in `answers-ARM.json` of its folder."""

    def __init__(self, trial: TrialContext, schedule: Schedule) -> None:
        """Make the prompts, once servers were probed. Raises ConfigError for prompts that cannot be made."""
        self._trial = trial
        self._asked: list[tuple[ExternalArm, list[Asking], dict[str, Any]]] = []
        if arms := greedy_arms(trial.experiment):
            contexts = [probe["context"] for row in trial.facts.arms for probe in row.get("probe", ())]
            plans = questions(trial.experiment, schedule, contexts=contexts)
            for arm in arms:
                askings = requests_for(trial.experiment, arm, plans)
                prompts = [{"max_tokens": asking.max_tokens, "digest": _digest(asking)} for asking in askings]
                document = {"schema": 2, "trial": trial.number, "arm": arm.name, "prompts": prompts, "answers": {}}
                self._asked.append((arm, askings, document))

    def ask(self, when: str) -> None:
        """Ask every arm twice and write what it answered; what a server does wrong is in its answers."""
        if not self._asked:
            return
        trial = self._trial
        trial.status.phase, trial.status.detail = f"asking for greedy answers {when} the load", ""
        trial.facts.asked = [arm.name for arm, _, _ in self._asked]
        trial.write_facts()
        for arm, askings, document in self._asked:
            document["answers"][when] = [self._round(arm, askings, number) for number in (0, 1)]
            write_document(trial.folder / PATTERN.replace("*", arm.name), document)
        trial.status.phase = ""

    def _round(self, arm: ExternalArm, askings: Sequence[Asking], number: int) -> list[dict[str, Any]]:
        """Return the arm's answers the first (0) or the second time (1), in the order of the questions."""
        trial, replicas = self._trial, len(arm.address)
        placed = [
            (replace(asking, seed=_SEEDS[number] + place), (place + number) % replicas)
            for place, asking in enumerate(askings)
        ]

        def wait(count: int) -> None:
            trial.check()
            trial.status.detail = f"{arm.name}, {count} of {len(placed)}"

        answers = ask_all(arm, placed, wait, timeout_s=trial.experiment.traffic.timeout_s, backwards=number == 1)
        return [
            {"replica": arm.replica_names[replica], **asdict(answer)}
            for (_, replica), answer in zip(placed, answers, strict=True)
        ]


def ask_all(
    arm: ExternalArm,
    placed: Sequence[tuple[Asking, int]],
    wait: Callable[[int], None],
    *,
    timeout_s: float,
    backwards: bool,
) -> list[Answer]:
    """Return the answer to each question at the replica of that number, `AT_ONCE` under way at a time.

    `wait` is called often with how many have their answer, and may raise to end it. Questions that are left after
    `ROUND_S` are not asked.
    """
    deadline = time.monotonic() + ROUND_S

    def answer(asking: Asking, replica: int) -> Answer:
        if (left_s := deadline - time.monotonic()) <= 0:
            return Answer(error=f"it was not asked: all answers had {ROUND_S:g} s")
        return ask(arm, arm.address[replica], asking, timeout_s=min(timeout_s, left_s))

    tasks = [partial(answer, *question) for question in (reversed(placed) if backwards else placed)]
    answers = in_threads(tasks, at_once=AT_ONCE, wait=wait)
    return answers[::-1] if backwards else answers


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


def requests_for(experiment: Experiment, arm: ExternalArm, plans: Sequence[PlannedRequest]) -> list[Asking]:
    """Return the questions in the words of the arm; the seed is each round's."""
    traffic = experiment.traffic
    shared = None if traffic.prompts == "ids" else load_prompt_text(traffic.tokenizer or experiment.counting_model)
    text = prompt_text(arm, shared)
    return [
        Asking(
            prompt=text.prompt(plan),
            max_tokens=plan.max_tokens,
            whole_length=traffic.ignore_eos,
            seed=0,
            greedy=True,
        )
        for plan in plans
    ]


def _digest(asking: Asking) -> str:
    """Return what tells prompts apart, without the prompt itself."""
    return hashlib.sha256(json.dumps(asking.prompt).encode()).hexdigest()[:16]
