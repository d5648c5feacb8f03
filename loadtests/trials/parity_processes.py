"""Measure every arm of an experiment alone, and have its parity with the control judged: `tailgate parity`.

Each arm runs in a process of its own, one after the other, control first; then the float64 reference. They leave their
answers and logits in files, which analysis/parity compares.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tailgate.analysis.parity.judge import Accuracy, Answers, judge
from tailgate.analysis.parity.measures import EPSILON
from tailgate.analysis.parity.outcome import Parity
from tailgate.analysis.parity.vectors import TextRows, judge_vectors
from tailgate.analysis.records.documents import with_checksum, write_json
from tailgate.analysis.summary.summary import EXIT_CODES
from tailgate.loadtests.experiments.checks import check_parity
from tailgate.loadtests.experiments.model import Experiment, OwnArm
from tailgate.loadtests.trials.context import RunError
from tailgate.loadtests.trials.parity_texts import read_texts
from tailgate.loadtests.trials.preflight import check_arm
from tailgate.loadtests.trials.processes import child_environment, thread_variables
from tailgate.loadtests.trials.status import ReplicaState, Status
from tailgate.servers.complaint import ConfigError
from tailgate.servers.processes import Child, Loaded, Refused, Stage, messages_of
from tailgate.servers.program import isolate_compiler

PARITY_COMMAND = (sys.executable, "-P", "-m", "tailgate.servers.parity")
REFERENCE = "float64 reference"  # with a space: no arm can be called so
TEXTS = "given texts.json"  # likewise
SCHEMA = 1
# What a measurement says of its own arm and not of the model that all share.
OWN_FACTS = ("held",)
_QUANTISED_PROMPTS = 64  # twice as many as set an interval

_POLL_S = 0.1
_write = partial(write_json, indent=1, ensure_ascii=False, allow_nan=False)


def check_measurable(experiment: Experiment) -> None:
    """Raise ConfigError where arms, machine or texts do not allow a measurement, as far as is known before it."""
    check_parity(experiment)
    for arm in experiment.own_arms:
        check_arm(arm.config)
    read_texts(experiment)


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
        texts = read_texts(experiment) if experiment.quantised_arms else []
        arms = sorted(experiment.own_arms, key=lambda arm: not arm.control)
        control = arms[0]
        reference = [REFERENCE] if experiment.parity.reference else []
        self.status.replicas = {name: ReplicaState() for name in (*(arm.name for arm in arms), *reference)}
        work = self.folder / "parity"
        work.mkdir(parents=True)
        if texts:
            prompts, continuations = zip(*texts, strict=True)
            counts = [len(continuation) for continuation in continuations]
            _write(work / TEXTS, {"prompts": prompts, "counts": counts, "continuations": continuations})
        _write(
            work / "task.json",
            {
                "plan": str((work / "plan.json").resolve()),
                "arms": [arm.config.to_dict() for arm in arms],
                "texts": str((work / TEXTS).resolve()) if texts else "",
                "on_texts": [control.name, *(arm.name for arm in experiment.quantised_arms)],
                "prompts": experiment.parity.prompts,
                "least": _QUANTISED_PROMPTS if experiment.quantised_arms else 0,
                "tokens": experiment.parity.tokens,
                "seed": experiment.seed,
            },
        )
        began = time.monotonic()
        try:
            facts: dict[str, dict[str, Any]] = {}
            for arm in arms:
                shared = {key: value for key, value in facts.get(control.name, {}).items() if key not in OWN_FACTS}
                facts[arm.name] = self._measure(arm, arm.name, "arm", shared)
            for name in reference:
                facts[name] = self._measure(control, name, "reference", {"weights": facts[control.name]["weights"]})
            self.status.phase, self.status.detail = f"comparing {'vectors' if control.model.embeds else 'logits'}", ""
            document = self._judge(work, arms, facts, time.monotonic() - began)
        finally:
            for path in work.glob("*/*.npy"):
                path.unlink()
        _write(self.folder / "parity.json", with_checksum(document))
        return document

    def _measure(self, arm: OwnArm, name: str, what: str, expected: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the process says it loaded, once it is done. Raises ConfigError if that is not as `expected`."""
        self.check()
        state = self.status.replicas[name]
        self.status.phase, state.stage = f"measuring {name}", "starting"
        work = self.folder / "parity" / name
        work.mkdir()
        _write(work / "config.json", arm.config.to_dict())
        fresh = self.experiment.trials.compile_cache == "fresh"
        cache = work / "compile-cache" if fresh else self.shared_cache
        environment = child_environment()
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
        facts: Mapping[str, Any] = {}
        while True:
            self.check()
            messages, ended = child.receive(_POLL_S)
            for message in messages:
                last_heard_at = time.monotonic()
                match message:
                    case Loaded():
                        facts = message.facts
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
        return dict(facts)

    def _compare_facts(self, name: str, facts: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
        for key, value in expected.items():
            if facts.get(key) != value:
                remedy = "the files of model.id must not change" if key == "weights" else "make them equal"
                raise ConfigError(
                    f'{name} loaded {key} {facts.get(key)} but the control "{self.experiment.control.name}" has '
                    f"{value}: parity compares policies alone; {remedy}"
                )

    def _judge(
        self, work: Path, arms: Sequence[OwnArm], facts: Mapping[str, Mapping[str, Any]], seconds: float
    ) -> dict[str, Any]:
        """Compare what the measurements left in `work`, and return what `parity.json` holds."""
        control, refusals = arms[0], {arm.name: work / arm.name / "refused.json" for arm in arms}
        refused = {name: str(_read(path)["reason"]) for name, path in refusals.items() if path.exists()}
        # The coarsest of the dtypes that the control was loaded in.
        dtype = max(str(facts[control.name]["dtypes"]).split(", "), key=lambda item: EPSILON.get(item, 0.0))
        answered = [arm.name for arm in arms if arm.name not in refused]
        judge_files = self._judge_vectors if control.model.embeds else self._judge_logits
        outcome, sizes = judge_files(work, answered, dtype=dtype, refused=refused)
        return {
            "schema": SCHEMA,
            "name": self.experiment.name,
            "exit_code": EXIT_CODES[outcome.verdict],
            "dtype": dtype,
            "reference": REFERENCE in facts,
            **sizes,
            "seed": self.experiment.seed,
            "seconds": seconds,
            "facts": facts,
            **outcome.to_dict(),
        }

    def _judge_logits(
        self, work: Path, arms: Sequence[str], *, dtype: str, refused: Mapping[str, str]
    ) -> tuple[Parity, dict[str, int]]:
        plan = _read(work / "plan.json")
        answers = [
            Answers(
                name=arm,
                tokens=_read(work / arm / "answers.json"),
                logits=np.load(work / arm / "logits.npy", mmap_mode="r"),
                texts=_matrix(work / arm / "texts.npy"),
            )
            for arm in arms
        ]
        late = [plan["late_prompt"]] if plan["late_places"] else []
        outcome = judge(
            answers[0],
            answers[1:],
            np.load(work / REFERENCE / "logits.npy", mmap_mode="r") if self.experiment.parity.reference else None,
            dtype=dtype,
            prompts=[len(prompt) for prompt in (*plan["prompts"], *late)],
            seed=self.experiment.seed,
            accuracy=self._accuracy(work),
            refused=refused,
        )
        positions, vocabulary = answers[0].logits.shape
        return outcome, {"requests": len(plan["prompts"]), "positions": positions, "vocabulary": vocabulary}

    def _judge_vectors(
        self, work: Path, arms: Sequence[str], *, dtype: str, refused: Mapping[str, str]
    ) -> tuple[Parity, dict[str, int]]:
        lengths = [len(prompt) for prompt in _read(work / "plan.json")["prompts"]]
        texts, batches = zip(*_read(work / arms[0] / "rows.json"), strict=True)
        vectors = {arm: np.load(work / arm / "vectors.npy") for arm in arms}
        outcome = judge_vectors(
            arms[0],
            vectors,
            np.load(work / REFERENCE / "vectors.npy", mmap_mode="r") if self.experiment.parity.reference else None,
            rows=TextRows(texts=texts, batches=batches, lengths=lengths),
            dtype=dtype,
            least=self.experiment.parity.min_cosine or None,
            refused=refused,
        )
        return outcome, {"texts": len(lengths), "rows": len(texts), "width": vectors[arms[0]].shape[1]}

    def _accuracy(self, work: Path) -> Accuracy | None:
        """Return what the quantised arms are judged by; None without such."""
        settings, quantised = self.experiment.parity, self.experiment.quantised_arms
        if not quantised:
            return None
        kinds = {arm.name: arm.model.quantisation for arm in quantised}
        accuracy = Accuracy(quantised=kinds, max_kl=settings.max_kl)
        if not (work / TEXTS).exists():
            return accuracy
        return replace(
            accuracy,
            lengths=_read(work / TEXTS)["counts"],
            reference=_matrix(work / REFERENCE / "texts.npy"),
            source=Path(settings.texts).name,
        )


def _matrix(path: Path) -> Any:
    """Return the matrix in the file, read a page at a time; None where there is no file."""
    return np.load(path, mmap_mode="r") if path.exists() else None


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
