"""Measure every arm of an experiment alone, and have its parity with the control judged: `tailgate parity`.

Each arm runs in a process of its own, one after the other, control first; then the float64 reference. They leave their
answers and outputs in files, which analysis/parity compares.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from tailgate.analysis.parity.judge import Answers, Places, Task, judge
from tailgate.analysis.parity.measures import EPSILON
from tailgate.analysis.parity.vectors import LEAST_COSINE, TextRows, judge_vectors
from tailgate.analysis.records.documents import with_checksum, write_json
from tailgate.analysis.summary.summary import EXIT_CODES
from tailgate.loadtests.experiments.checks import check_parity
from tailgate.loadtests.experiments.model import Experiment, ManagedArm
from tailgate.loadtests.trials.context import RunError
from tailgate.loadtests.trials.preflight import check_arm
from tailgate.loadtests.trials.processes import child_environment, thread_variables
from tailgate.loadtests.trials.status import ReplicaState, Status
from tailgate.servers.complaint import ConfigError
from tailgate.servers.processes import Child, Loaded, Refused, Stage, messages_of
from tailgate.servers.program import isolate_compiler

PARITY_COMMAND = (sys.executable, "-P", "-m", "tailgate.servers.parity")
REFERENCE = "float64 reference"  # with a space: no arm can be called so
SCHEMA = 2
_QUANTISED_PROMPTS = 64  # twice as many as set an interval

_POLL_S = 0.1
_IDS = TypeAdapter(Annotated[list[Annotated[int, Field(strict=True, ge=0)]], Field(min_length=2)])
Text = tuple[list[int], list[int]]  # what is read, and what is predicted after it

_write = partial(write_json, indent=1, ensure_ascii=False, allow_nan=False)


def check_measurable(experiment: Experiment) -> None:
    """Raise ConfigError where arms, machine or texts do not allow a measurement, as far as is known before it."""
    check_parity(experiment)
    for arm in experiment.managed_arms:
        check_arm(arm.config)
    read_texts(experiment)


def read_texts(experiment: Experiment) -> list[Text]:
    """Return each text cut in two: its first half, as far as a prompt may be long, and what is predicted after it,
    `parity.tokens` at most. Texts that are equal as they are asked are one: copies tell nothing new.

    Returns none where no file is named. Raises ConfigError, which names the line.
    """
    if not experiment.parity.texts:
        return []
    path = Path(experiment.parity.texts)
    what = f'parity.texts "{path}"'
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{what} cannot be read ({error}): give a file with a list of token ids on each line"
        ) from None
    engines = [arm.engine for arm in experiment.managed_arms]
    longest = min(engine.max_prompt_tokens for engine in engines)
    most = min(experiment.parity.tokens, *(engine.max_new_tokens for engine in engines))
    texts: dict[tuple[tuple[int, ...], int], Text] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            ids = _IDS.validate_json(line)
        except ValidationError:
            why = "give a list of two token ids or more, such as [1, 15043, 3186]"
            raise ConfigError(f"{what}, line {number}: {why}") from None
        read = min((len(ids) + 1) // 2, longest)
        prompt = ids[: read + most]
        texts.setdefault((tuple(prompt), read), (prompt[:read], prompt[read:]))
    if not texts:
        raise ConfigError(f"{what} has no texts: give a list of token ids on each line")
    return list(texts.values())


@dataclass(slots=True)
class ParityRun:
    """Measures and judges the parity of one experiment in `folder`.

    `check` is called often and may raise to end it. `status` says what goes on. `shared_cache` is where compiled code
    is kept between runs when the experiment wants that. `command` is what starts a measurement.
    """

    experiment: Experiment
    folder: Path
    shared_cache: Path
    status: Status = field(default_factory=Status)
    check: Callable[[], None] = lambda: None
    command: Sequence[str] = PARITY_COMMAND

    def run(self) -> dict[str, Any]:
        """Write the outcome to `parity.json` in `folder`, and return it.

        Raises ConfigError when arms differ in more than their policy, as loaded; RunError when a measurement breaks.
        """
        experiment = self.experiment
        texts = read_texts(experiment)
        arms = sorted(experiment.managed_arms, key=lambda arm: not arm.control)
        control = arms[0]
        self.status.replicas = {name: ReplicaState() for name in (*(arm.name for arm in arms), REFERENCE)}
        work = self.folder / "parity"
        work.mkdir(parents=True)
        _write(
            work / "task.json",
            {
                "plan": str((work / "plan.json").resolve()),
                "arms": [arm.config.to_dict() for arm in arms],
                "texts": texts,
                "prompts": experiment.parity.prompts or (_QUANTISED_PROMPTS if experiment.quantised_arms else 0),
                "tokens": experiment.parity.tokens,
                "seed": experiment.seed,
            },
        )
        began = time.monotonic()
        try:
            facts: dict[str, dict[str, Any]] = {}
            for arm in arms:
                facts[arm.name] = self._measure(arm, arm.name, "arm", facts.get(control.name, {}))
            weights = {"weights": facts[control.name]["weights"]}
            facts[REFERENCE] = self._measure(control, REFERENCE, "reference", weights)
            self.status.phase, self.status.detail = f"comparing {'vectors' if control.model.embeds else 'logits'}", ""
            document = self._judge(work, arms, facts) | {"seconds": time.monotonic() - began}
        finally:
            for path in work.glob("*/*.npy"):
                path.unlink()
        _write(self.folder / "parity.json", with_checksum(document))
        return document

    def _measure(self, arm: ManagedArm, name: str, what: str, expected: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the process says it loaded, once it is done. Raises ConfigError if that is not as `expected`."""
        self.check()
        state = self.status.replicas[name]
        self.status.phase, state.stage = f"measuring {name}", "starting"
        work = self.folder / "parity" / name
        work.mkdir()
        _write(work / "config.json", arm.config.to_dict())
        fresh = self.experiment.trials.compile_cache == "fresh"
        cache = work / "compile-cache" if fresh else self.shared_cache
        environment = child_environment(self.folder / "logs")
        isolate_compiler(environment, str(cache.resolve()))
        if what == "arm":
            environment |= thread_variables(arm.config)
        command = [*self.command, what, "--config", str((work / "config.json").resolve()), "--out", str(work.resolve())]
        command += ["--task", str((self.folder / "parity" / "task.json").resolve())]
        log = self.folder / "logs" / f"parity-{name}.log"
        parse = messages_of(Stage, Loaded, Refused)
        child = Child(name, command, log_path=log, environment=environment, parse=parse)
        try:
            return self._follow(child, name, state, expected)
        finally:
            child.kill()
            shutil.rmtree(work / "compile-cache", ignore_errors=True)

    def _follow(self, child: Child, name: str, state: ReplicaState, expected: Mapping[str, Any]) -> dict[str, Any]:
        limit_s = self.experiment.trials.ready_timeout_s
        last_heard_at = time.monotonic()
        facts: dict[str, Any] = {}
        while True:
            self.check()
            messages, ended = child.receive(_POLL_S)
            for message in messages:
                last_heard_at = time.monotonic()
                match message:
                    case Loaded():
                        facts = dict(message.facts)
                        self._compare_facts(name, facts, expected)
                    case Refused():
                        raise ConfigError(f"{name}: {message.why}")
                    case Stage():
                        counted = f" {message.done}/{message.total}" if message.total else ""
                        state.stage = f"{message.name}{counted}"
            if ended is not None:
                break
            if time.monotonic() - last_heard_at > limit_s:
                raise RunError(
                    f"{name} said nothing for {limit_s:g} s (it was at: {state.text()}): raise "
                    f"trials.ready_timeout_s, or see {child.log_path}: {child.log_tail(2)}"
                )
        if ended != 0 or not facts:
            raise RunError(f"{name} {child.ending(ended, 5)}: see {child.log_path}")
        state.stage = "measured"
        return facts

    def _compare_facts(self, name: str, facts: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
        for key, value in expected.items():
            if facts.get(key) != value:
                remedy = "the files of model.id must not change" if key == "weights" else "make them equal"
                raise ConfigError(
                    f'{name} loaded {key} {facts.get(key)} but the control "{self.experiment.control.name}" has '
                    f"{value}: parity compares policies alone; {remedy}"
                )

    def _judge(self, work: Path, arms: Sequence[ManagedArm], facts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Compare what the measurements left in `work`, and return what `parity.json` holds."""
        parity, control = self.experiment.parity, arms[0]
        refusals = {arm.name: work / arm.name / "refused.json" for arm in arms}
        refused = {name: str(_read(path)["reason"]) for name, path in refusals.items() if path.exists()}
        # The coarsest of the dtypes that the control was loaded in.
        dtype = max(str(facts[control.name]["dtypes"]).split(", "), key=lambda item: EPSILON.get(item, 0.0))
        names = [arm.name for arm in arms if arm.name not in refused]
        outputs = {name: np.load(work / name / "outputs.npy", mmap_mode="r") for name in (*names, REFERENCE)}
        answers = {name: _read(work / name / "answers.json") for name in names}
        plan = _read(work / "plan.json")
        asked, prompts = plan["asked"], [len(request["prompt"]) for request in plan["requests"]]
        if control.model.embeds:
            numbers, batches = zip(*answers[control.name], strict=True)
            outcome = judge_vectors(
                control.name,
                {name: outputs[name] for name in names},
                outputs[REFERENCE],
                rows=TextRows(texts=numbers, batches=batches, lengths=prompts[:asked]),
                limit=parity.min_cosine or LEAST_COSINE[dtype],
                refused=refused,
            )
        else:
            lengths = [len(request["places"]) for request in plan["requests"]]
            fed = len(lengths) - plan["texts"]
            source = Path(parity.texts).name if plan["texts"] else f"{control.name}'s answers to random prompts"
            kinds = {arm.name: arm.model.quantisation for arm in self.experiment.quantised_arms}
            said = [
                Answers(name=name, tokens=answers[name], logits=outputs[name], quantised=kinds.get(name, ""))
                for name in names
            ]
            task = Task(
                control=said[0],
                reference=outputs[REFERENCE],
                place=Places(lengths=lengths[:fed], prompts=prompts),
                dtype=dtype,
                seed=self.experiment.seed,
                max_kl=parity.max_kl,
                source=source,
                texts=lengths[fed:],
            )
            outcome = judge(task, said[1:], refused=refused)
        rows, width = outputs[control.name].shape
        return {
            "schema": SCHEMA,
            "name": self.experiment.name,
            "exit_code": EXIT_CODES[outcome.verdict],
            "dtype": dtype,
            "prompts": asked,
            "rows": rows,
            "width": width,
            "seed": self.experiment.seed,
            "facts": facts,
            **json.loads(outcome.model_dump_json()),
        }


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
