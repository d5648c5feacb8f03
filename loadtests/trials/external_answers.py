"""Ask every external arm the same prompts, before the load and after it, and record what each answered.

Each time every arm is asked twice, the second time with another seed, in the opposite order and at another replica: who
answers greedily does not care. Nothing is judged here: `tailgate.analysis.judging.gates.greedy` reads the files again
at any time.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np

from tailgate.analysis.records.asked_answers import PATTERN
from tailgate.analysis.records.documents import write_document
from tailgate.loadtests.experiments.model import Experiment
from tailgate.loadtests.external.answers import Answer, ask
from tailgate.loadtests.external.arms import ExternalArm
from tailgate.loadtests.external.asking import Asking, prompt_of, prompt_source
from tailgate.loadtests.traffic.prompts import PromptSource
from tailgate.loadtests.traffic.schedule import PlannedRequest, Schedule, planned_requests
from tailgate.loadtests.trials.context import TrialContext

PROMPTS: Final = 48  # with none that departs, fewer than 1 answer in 16 can be another one, with 95 % confidence
AT_ONCE: Final = 8
ROUND_S: Final = 300.0  # a server that hangs must not hold up the run for hours
_POLL_S: Final = 0.05
_SEEDS: Final = (20_011, 40_009)  # of the first and the second time


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A planned request, and how long an answer it gets."""

    plan: PlannedRequest
    max_tokens: int


class ExternalAnswers:
    """The answers of the trial's external arms, in `answers-ARM.json` of its folder."""

    def __init__(self, trial: TrialContext, schedule: Schedule) -> None:
        self._trial = trial
        self._arms = greedy_arms(trial.experiment)
        self._questions: tuple[Question, ...] = ()
        self._documents: dict[str, dict[str, Any]] = {}
        self._schedule = schedule

    def ask(self, when: str) -> None:
        """Ask every arm twice and write what it answered. Raises ConfigError for prompts that cannot be made; what a
        server does wrong is in its answers."""
        if not self._arms:
            return
        trial = self._trial
        trial.status.phase, trial.status.detail = f"asking for greedy answers {when} the load", ""
        if not self._questions:
            contexts = [probe["context"] for row in trial.facts.arms for probe in row.get("probe", ())]
            self._questions = questions(trial.experiment, self._schedule, contexts=contexts)
            trial.facts.asked = [arm.name for arm in self._arms]
            trial.write_facts()
        for arm in self._arms:
            askings = self._requests_for(arm)
            document = self._documents.setdefault(arm.name, self._document(arm, askings))
            document["answers"][when] = [self._round(arm, askings, number) for number in (0, 1)]
            write_document(trial.folder / PATTERN.replace("*", arm.name), document)
        trial.status.phase = ""

    def _requests_for(self, arm: ExternalArm) -> list[Asking]:
        """Return the questions in the words of the arm; the seed is each round's."""
        experiment, config = self._trial.experiment, arm
        traffic = experiment.traffic
        sizes = [other.vocab_size for other in experiment.external_arms if other.vocab_size]
        source = prompt_source(
            config,
            PromptSource.of(
                traffic.prompts,
                model=traffic.tokenizer or experiment.counting_model,
                vocab_size=min(sizes, default=1 << 31 if traffic.prompts != "ids" else 256),
            ),
        )
        return [
            Asking(
                prompt=prompt_of(config, source, question.plan),
                max_tokens=question.max_tokens,
                whole_length=traffic.ignore_eos,
                seed=0,
                greedy=True,
            )
            for question in self._questions
        ]

    def _document(self, arm: ExternalArm, askings: Sequence[Asking]) -> dict[str, Any]:
        prompts = [
            {
                "index": question.plan.index,
                "tokens": question.plan.prompt_tokens,
                "max_tokens": question.max_tokens,
                "digest": _digest(asking),
            }
            for question, asking in zip(self._questions, askings, strict=True)
        ]
        return {"schema": 2, "trial": self._trial.number, "arm": arm.name, "prompts": prompts, "answers": {}}

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
    config: ExternalArm,
    placed: Sequence[tuple[Asking, int]],
    wait: Callable[[int], None],
    *,
    timeout_s: float,
    backwards: bool,
    round_s: float = ROUND_S,
) -> list[Answer]:
    """Return the answer to each question at the replica of that number, `AT_ONCE` under way at a time.

    `wait` is called often with how many have their answer, and may raise to end it. Questions that are left after
    `round_s` are not asked.
    """
    answers = [Answer(error=f"it was not asked: all answers had {round_s:g} s") for _ in placed]
    left = deque(reversed(range(len(placed))) if backwards else range(len(placed)))
    done: list[int] = []
    deadline = time.monotonic() + round_s

    def work() -> None:
        with suppress(IndexError):  # nothing is left
            while (left_s := deadline - time.monotonic()) > 0:
                place = left.popleft()
                asking, replica = placed[place]
                address, least_s = config.address[replica], min(timeout_s, left_s)
                answers[place] = ask(config, address, asking, timeout_s=least_s)
                done.append(place)

    # a server that hangs must not keep the process: an executor's threads would
    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(AT_ONCE, len(placed)))]
    for thread in threads:
        thread.start()
    try:
        while any(thread.is_alive() for thread in threads):
            wait(len(done))
            time.sleep(_POLL_S)
    finally:
        left.clear()
    return answers


def greedy_arms(experiment: Experiment) -> tuple[ExternalArm, ...]:
    """Return whom the trial asks: the external arms where the control is one, unless `parity.served` is false."""
    if not experiment.parity.served or not isinstance(experiment.control, ExternalArm):
        return ()
    return experiment.external_arms if len(experiment.external_arms) > 1 else ()


def questions(experiment: Experiment, schedule: Schedule, *, contexts: Sequence[int | None]) -> tuple[Question, ...]:
    """Return planned requests from all over the trial; of a short one they come again with other words.

    An answer has `parity.tokens`, or as many as were planned where its prompt leaves no space for more in one of the
    `contexts` that servers reported.
    """
    wanted, rows = experiment.parity.prompts or PROMPTS, len(schedule)
    if not rows:
        return ()
    tokens = min(experiment.parity.tokens, experiment.engine.max_new_tokens)
    context = min((context for context in contexts if context is not None), default=1 << 31)
    places = np.unique(np.linspace(0, rows - 1, min(wanted, rows)).round().astype(np.int64))
    plans = list(planned_requests(schedule.table.take(places)))
    found = []
    for number in range(wanted):
        turn, plan = number // len(plans), plans[number % len(plans)]
        if turn:
            plan = plan._replace(prompt_seed=(plan.prompt_seed + turn * 0x9E3779B97F4A7C15) & 0x7FFFFFFFFFFFFFFF)
        fits = plan.prompt_tokens + tokens <= context
        found.append(Question(plan=plan, max_tokens=tokens if fits else min(tokens, plan.max_tokens)))
    return tuple(found)


def _digest(asking: Asking) -> str:
    """Return what tells prompts apart, without the prompt itself."""
    prompt = asking.prompt if isinstance(asking.prompt, str) else list(asking.prompt)
    return hashlib.sha256(json.dumps(prompt).encode()).hexdigest()[:16]
