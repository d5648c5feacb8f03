"""Asks every external arm the same prompts, before the load and after it, and records what each answered.

Each time every arm is asked twice, the second time with another seed, in the opposite order and at another replica: who
answers greedily does not care, and how far the control differs from itself is the yardstick for how far an arm may
differ from it. Nothing is judged here: `analysis.judging.greedy_parity` reads the files again at any time.
"""

from __future__ import annotations

import hashlib
import json
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np

from analysis.records.asked_answers import PATTERN
from analysis.records.documents import write_document
from loadtests.experiments.model import Experiment, ExternalArm
from loadtests.external.answers import ALTERNATIVES, Answer, Asking, ask
from loadtests.external.planned_prompts import plain_prompt_of, prompt_of, prompt_source
from loadtests.traffic.prompts import PromptSource
from loadtests.traffic.schedule import PlannedRequest, Schedule, planned_requests
from loadtests.trials.context import TrialContext

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
        self._arms = asked_arms(trial.experiment)
        self._questions: tuple[Question, ...] = ()
        self._documents: dict[str, dict[str, Any]] = {}
        self._schedule = schedule

    def ask(self, when: str) -> None:
        """Every arm was asked twice, and its file has what it answered. ConfigError for prompts that
        cannot be made; what a server does wrong is in its answers."""
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
            askings = self._askings(arm)
            document = self._documents.setdefault(arm.name, self._document(arm, askings))
            document["answers"][when] = [self._round(arm, document, askings, number) for number in (0, 1)]
            write_document(trial.folder / PATTERN.replace("*", arm.name), document)
        trial.status.phase = ""

    def _askings(self, arm: ExternalArm) -> list[Asking]:
        """The questions in the words of the arm; the seed is each round's."""
        experiment, config = self._trial.experiment, arm.external
        traffic = experiment.traffic
        sizes = [other.external.vocab_size for other in experiment.external_arms if other.external.vocab_size]
        source = prompt_source(
            config,
            PromptSource.of(
                traffic.prompts,
                model=traffic.tokenizer or experiment.counting_model,
                vocab_size=min(sizes, default=1 << 31 if traffic.prompts != "ids" else 256),
            ),
        )
        made = prompt_of if config.kind == "openai" else plain_prompt_of
        return [
            Asking(
                prompt=made(config, source, question.plan),
                max_tokens=question.max_tokens,
                whole_length=traffic.ignore_eos,
                seed=0,
            )
            for question in self._questions
        ]

    def _document(self, arm: ExternalArm, askings: Sequence[Asking]) -> dict[str, Any]:
        rows = zip(self._questions, askings, strict=True)
        return {
            "schema": 1,
            "trial": self._trial.number,
            "arm": arm.name,
            "alternatives": ALTERNATIVES if arm.kind == "openai" else 0,
            "refused": "",
            "prompts": [
                {
                    "index": question.plan.index,
                    "tokens": question.plan.prompt_tokens,
                    "max_tokens": question.max_tokens,
                    "digest": _digest(asking),
                }
                for question, asking in rows
            ],
            "answers": {},
        }

    def _round(
        self, arm: ExternalArm, document: dict[str, Any], askings: Sequence[Asking], number: int
    ) -> list[dict[str, Any]]:
        """An answer to each question, in their order."""
        trial, replicas = self._trial, arm.external.addresses
        order = list(range(len(askings)))
        asked = Round(
            arm,
            [
                (place, replace(askings[place], seed=_SEEDS[number] + place), (place + number) % len(replicas))
                for place in (order if number == 0 else reversed(order))
            ],
            alternatives=0 if document["refused"] else document["alternatives"],
            timeout_s=trial.experiment.traffic.timeout_s,
        )
        try:
            while not asked.ended():
                trial.check()
                trial.status.detail = f"{arm.name}, {asked.count} of {len(askings)}"
                time.sleep(_POLL_S)
        finally:
            asked.stop()
        document["refused"] = document["refused"] or asked.refused
        return [_row(asked.answers.get(place), arm.replica_names[(place + number) % len(replicas)]) for place in order]


class Round:
    """Questions being put to one arm, `AT_ONCE` at a time, by threads that end with the process."""

    def __init__(
        self,
        arm: ExternalArm,
        questions: Sequence[tuple[int, Asking, int]],  # place, what is asked, number of the replica
        *,
        alternatives: int,
        timeout_s: float,
        round_s: float = ROUND_S,
    ) -> None:
        self.answers: dict[int, Answer] = {}
        self.refused = ""
        self._arm, self._alternatives, self._timeout_s = arm, alternatives, timeout_s
        self._deadline = time.monotonic() + round_s
        self._round_s = round_s
        self._left: queue.SimpleQueue[tuple[int, Asking, int]] = queue.SimpleQueue()
        for question in questions:
            self._left.put(question)
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(min(AT_ONCE, len(questions)))]
        for thread in self._threads:
            thread.start()

    @property
    def count(self) -> int:
        """Questions that have their answer."""
        return len(self.answers)

    def ended(self) -> bool:
        """Whether every question has its answer, or none will come any more."""
        return not any(thread.is_alive() for thread in self._threads)

    def stop(self) -> None:
        """No further question is put."""
        self._deadline = 0.0

    def _ask(self) -> None:
        while True:
            try:
                place, asking, replica = self._left.get_nowait()
            except queue.Empty:
                return
            left_s = self._deadline - time.monotonic()
            if left_s <= 0:
                self.answers[place] = Answer(error=f"it was not asked: all answers had {self._round_s:g} s")
                continue
            answer = ask(
                self._arm.external,
                self._arm.external.addresses[replica],
                asking,
                timeout_s=min(self._timeout_s, left_s),
                alternatives=self._alternatives,
            )
            if answer.refused:
                # From now on it is asked at once without.
                self.refused, self._alternatives = answer.refused, 0
            self.answers[place] = answer


def asked_arms(experiment: Experiment) -> tuple[ExternalArm, ...]:
    """Whom the trial asks: the external arms where the control is one, unless the experiment does not want it."""
    if not experiment.parity.served or not isinstance(experiment.control, ExternalArm):
        return ()
    return experiment.external_arms if len(experiment.external_arms) > 1 else ()


def questions(experiment: Experiment, schedule: Schedule, *, contexts: Sequence[int | None]) -> tuple[Question, ...]:
    """Planned requests from all over the trial; of a short one they come again with other words.

    An answer has `parity.tokens`, or as many as were planned where its prompt leaves no room for more in one of the
    `contexts` that servers told.
    """
    wanted, rows = experiment.parity.prompts or PROMPTS, len(schedule)
    if not rows:
        return ()
    tokens = min(experiment.parity.tokens, experiment.engine.max_new_tokens)
    room = min((context for context in contexts if context is not None), default=1 << 31)
    places = np.unique(np.linspace(0, rows - 1, min(wanted, rows)).round().astype(np.int64))
    plans = list(planned_requests(schedule.table.take(places)))
    found = []
    for number in range(wanted):
        turn, plan = number // len(plans), plans[number % len(plans)]
        if turn:
            plan = plan._replace(prefix_seed=(plan.prefix_seed + turn * 0x9E3779B97F4A7C15) & 0x7FFFFFFFFFFFFFFF)
        fits = plan.prompt_tokens + tokens <= room
        found.append(Question(plan=plan, max_tokens=tokens if fits else min(tokens, plan.max_tokens)))
    return tuple(found)


def _row(answer: Answer | None, replica: str) -> dict[str, Any]:
    answer = answer or Answer(error="it was not asked")
    row: dict[str, Any] = {"replica": replica, "text": answer.text, "pieces": answer.pieces, "error": answer.error}
    if answer.tokens:
        row["tokens"] = [token.text for token in answer.tokens]
        row["log_probs"] = [token.log_prob for token in answer.tokens]
        row["likeliest"] = [token.likeliest for token in answer.tokens]
    return row


def _digest(asking: Asking) -> str:
    """What tells prompts apart, without the prompt itself."""
    prompt = asking.prompt if isinstance(asking.prompt, str) else [_plain(item) for item in asking.prompt]
    return hashlib.sha256(json.dumps(prompt).encode()).hexdigest()[:16]


def _plain(item: Any) -> Any:
    return item if isinstance(item, int) else asdict(item)
