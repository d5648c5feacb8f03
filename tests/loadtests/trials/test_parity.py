"""Parity: arms measured in processes of their own, texts of the user, and answers that replicas serve."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import grpc
import pytest

from tailgate.analysis.records.documents import read_document
from tailgate.analysis.summary.summary import EXIT_CODES
from tailgate.loadtests.commands.main import main
from tailgate.loadtests.commands.parity import parity_table
from tailgate.loadtests.experiments.model import Experiment
from tailgate.loadtests.external.answers import in_threads
from tailgate.loadtests.trials import parity_processes, served_parity
from tailgate.loadtests.trials.context import RunError
from tailgate.loadtests.trials.parity_processes import ParityRun, Text, read_texts
from tailgate.loadtests.trials.run import Orchestrator
from tailgate.loadtests.trials.status import Status
from tailgate.servers.complaint import ConfigError
from tailgate.servers.config import ArmConfig
from tailgate.servers.processes import Child
from tailgate.servers.rpc import inference_pb2_grpc
from tests.fakes import measure
from tests.fakes.arm import Arm
from tests.fakes.grpc_servers import serving
from tests.fakes.processes import refusal
from tests.fakes.whole_run import experiment as small

ARMS = [{"name": "padded", "preset": "eager-padded"}, {"name": "eager", "preset": "eager", "control": True}]
QUANTISED = [*reversed(ARMS), {"name": "int8", "preset": "eager", "model": {"quantisation": "int8-weight-only"}}]
QUIET = ("--noise", "eager=1e-6", "--noise", "padded=1e-6")
ENCODERS = {"model": {"id": "random:bert-tiny", "task": "embed"}, "engine": {"max_new_tokens": 128}}


def experiment(dtype: str = "bfloat16", **tables: Any) -> Experiment:
    tables["model"] = {"dtype": dtype, **tables.get("model", {})}
    return small(**{"arms": ARMS, "engine": {"threads": 1}, **tables})


def measured(what: Experiment, folder: Path, *flags: str, **more: Any) -> dict[str, Any]:
    more.setdefault("command", [sys.executable, measure.__file__, *flags])
    return ParityRun(what, folder=folder, shared_cache=folder / "cache", **more).run()


class Measurement(Child):
    """A measurement in this process, which has ended once it is made."""

    def __init__(self, name: str, command: Sequence[str], *, log_path: Path, parse: Any, **_: Any) -> None:
        self._log_path = log_path
        log_path.parent.mkdir(parents=True, exist_ok=True)
        printed = io.StringIO()
        with log_path.open("w") as log, redirect_stdout(printed), redirect_stderr(log):
            self._code = measure.main(command[2:])
        self._messages = [parse(line.encode()) for line in printed.getvalue().splitlines()]

    def receive(self, timeout_s: float = 0.0) -> tuple[list[object], int | None]:
        return self._messages, self._code

    def kill(self) -> int:
        return self._code


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity_processes, "Child", Measurement)


@pytest.mark.process
def test_every_arm_is_measured_alone_and_the_outcome_is_kept_without_the_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    status = Status()
    outcome = measured(experiment(), tmp_path, status=status)
    assert read_document(tmp_path / "parity.json") == (outcome, "")
    assert (outcome["verdict"], outcome["exit_code"]) == ("PASS", 0)
    assert (outcome["prompts"], outcome["rows"], outcome["width"]) == (16, 128, 50)
    assert [arm["name"] for arm in outcome["arms"]] == ["padded"]
    assert outcome["control"]["name"] == "eager"
    assert list(status.replicas) == ["eager", "padded", "float64 reference"]  # the control answers first
    assert not list(tmp_path.rglob("*.npy"))
    environment = json.loads((tmp_path / "parity" / "padded" / "environment.json").read_text())
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "parity" / "padded" / "compile-cache")


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    ("tables", "flags", "verdict", "words"),
    [
        ({}, ("--noise", "padded=0.004"), "FAIL", ("error", "4.")),
        ({"parity": {"prompts": 4}}, (), "INCONCLUSIVE", ("1.5", "parity.prompts decide, 8")),
        (
            {"dtype": "float32"},
            (*QUIET, "--token", "padded=9"),
            "FAIL",
            ("is 1, limit 0", "request 2", "7 and padded 9"),
        ),
        ({"arms": QUANTISED, "parity": {"prompts": 6}}, (), "INCONCLUSIVE", ("parity.prompts", "32")),
        ({"arms": QUANTISED, "parity": {"prompts": 40}}, ("--noise", "int8=0.05"), "PASS", ("padded",)),
        (
            {"arms": QUANTISED, "parity": {"prompts": 40, "max_kl": 1e-6}},
            ("--noise", "int8=0.05"),
            "FAIL",
            ("nats a token", "1e-06"),
        ),
        (ENCODERS, (), "PASS", ("padded",)),
        *((kind, ("--unforeseen", "padded"), "FAIL", ("2 of 16 requests",)) for kind in ({}, ENCODERS)),
    ],
)
def test_an_arm_is_judged_by_its_answers(
    tables: dict[str, Any], flags: tuple[str, ...], verdict: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    outcome = measured(experiment(**tables), tmp_path, *flags)
    assert (outcome["verdict"], outcome["exit_code"]) == (verdict, EXIT_CODES[verdict])
    table = parity_table(outcome)
    assert all(word in table for word in words), table


@pytest.mark.usefixtures("in_process")
def test_texts_of_the_user_decide_what_a_quantised_arm_loses(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text("\n".join(json.dumps([number % 36, *range(number % 36 % 7 + 3)]) for number in range(72)))
    what = experiment("float32", arms=QUANTISED, parity={"texts": str(path), "prompts": 20})
    outcome = measured(what, tmp_path / "out", *QUIET, "--noise", "int8=0.05")
    assert outcome["verdict"] == "PASS", parity_table(outcome)
    # Copies are one text: they would make the interval too narrow.
    assert "on 36 texts (own.jsonl)" in outcome["arms"][1]["findings"][0]["reason"]
    assert outcome["rows"] == outcome["prompts"] * measure.TOKENS == 160


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    ("flags", "error", "words"),
    [
        (("--fact", "padded:weights=ffff"), ConfigError, ("padded", "weights ffff", "abcd", 'control "eager"')),
        (("--fact", "padded:attention=eager"), ConfigError, ("padded", "attention eager", "sdpa")),
        (("--fact", "float64 reference:weights=ffff"), ConfigError, ("float64 reference", "weights ffff")),
        (("--crash", "padded"), RunError, ("the weights are missing",)),
        (("--refuse", "float64 reference"), ConfigError, ("float64 reference", "take a larger one")),
    ],
)
def test_a_measurement_of_other_weights_or_one_that_breaks_is_refused_with_its_reason(
    flags: tuple[str, ...], error: type[Exception], words: tuple[str, ...], tmp_path: Path
) -> None:
    message = refusal(error, measured, experiment(), tmp_path, *flags)
    assert all(word in message for word in words)


@pytest.mark.process
def test_a_measurement_that_says_nothing_is_ended(tmp_path: Path) -> None:
    what = experiment(trials={"ready_timeout_s": 1})
    message = refusal(RunError, measured, what, tmp_path, "--silent", "eager")
    assert message.startswith("eager said nothing for 1 s (it was at: ")  # a busy machine may not get to "loading"


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(("flags", "verdict"), [(("--noise", "padded=0.004"), "FAIL"), (("--crash", "eager"), None)])
def test_a_run_starts_nothing_where_parity_fails_or_breaks(
    flags: tuple[str, ...], verdict: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = (sys.executable, measure.__file__, *flags)
    monkeypatch.setattr("tailgate.loadtests.trials.parity_processes.PARITY_COMMAND", command)
    outcome = Orchestrator(experiment(parity={"full": True}), out=tmp_path).run()
    assert not outcome.complete
    assert not list(outcome.run_dir.glob("trial-*"))
    if verdict is None:
        assert "the weights are missing" in (outcome.error or "")
    else:
        assert outcome.failed_parity is not None
        assert (outcome.error, outcome.failed_parity["verdict"]) == (None, verdict)
        assert read_document(outcome.run_dir / "parity.json") == (outcome.failed_parity, "")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["arms.compiled-naive.model.dtype=bfloat16"], ("arms.compiled-naive.model.dtype", "bfloat16", "float32")),
        (
            ["arms.compiled-padded.model.quantisation=int8-weight-only", "parity.texts=/no/texts.jsonl"],
            ("/no/texts.jsonl",),
        ),
        (["model.device=cuda"], ("model.device", "GPU")),
    ],
)
def test_a_measurement_that_cannot_work_is_refused_and_leaves_no_folder(
    settings: list[str],
    words: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tailgate.loadtests.trials.preflight.sees_gpu", lambda: False)
    flags = [flag for setting in settings for flag in ("--set", setting)]
    assert main(["parity", "demo", *flags, "--out", str(tmp_path / "out")]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert all(word in err for word in words), err
    assert not (tmp_path / "out").exists()


def texts(path: Path) -> list[Text]:
    engine = {"max_prompt_tokens": 8, "max_new_tokens": 6}
    return read_texts(experiment(arms=QUANTISED, engine=engine, parity={"texts": str(path), "tokens": 24}))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file or directory"),
        (b"\xff\xfe", "'utf-8' codec"),
        (b"\n\n", "no texts"),
        *(
            (f"[1, 2, 3]\n{line}\n".encode(), 'texts.jsonl", line 2')
            for line in ("[7]", "[1, -2]", "[1, 2.0]", "[1, true]", "hello", '{"ids": [1, 2]}', "[" * 100_000)
        ),
    ],
)
def test_a_file_without_texts_or_with_a_bad_line_is_refused(content: bytes | None, words: str, tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    if content is not None:
        path.write_bytes(content)
    assert words in refusal(ConfigError, texts, path)


def nothing() -> None:
    """The check of a wait that is not interrupted."""


def test_questions_fit_every_arm_and_differ_by_trial() -> None:
    short = experiment(engine={"max_prompt_tokens": 40, "max_new_tokens": 9})
    asked = served_parity.questions(short, trial=1, vocab_size=50)
    assert len(asked) == served_parity.PROMPTS
    prompts = [list(question.token_ids.ids) for question in asked]
    assert all(1 <= len(prompt) <= 40 for prompt in prompts)
    assert {question.max_tokens for question in asked} == {9}  # type: ignore[union-attr]
    assert {token for prompt in prompts for token in prompt} <= set(range(50))
    assert served_parity.questions(short, trial=1, vocab_size=50) == asked
    assert served_parity.questions(short, trial=2, vocab_size=50) != asked
    assert served_parity.questions(experiment(), trial=1, vocab_size=50)[0].max_tokens == served_parity.TOKENS  # type: ignore[union-attr]


def test_every_question_is_answered_in_full_or_the_status_says_why_not() -> None:
    asked = [
        served_parity.questions(experiment(engine={"max_new_tokens": most}), trial=1, vocab_size=50)[0]
        for most in (4, 7)
    ]
    add: Any = inference_pb2_grpc.add_InferenceServicer_to_server
    arm = Arm(ArmConfig(), "eager-0", stall_s=0.0)
    with serving(add, arm) as address, grpc.insecure_channel(address) as channel:
        assert served_parity.ask(channel, asked, check=nothing, timeout_s=60.0) == [[5] * 4, [5] * 7]
    with grpc.insecure_channel("127.0.0.1:1") as nowhere:
        answer = served_parity.ask(nowhere, asked, check=nothing, timeout_s=60.0)
    assert str(answer).startswith("UNAVAILABLE")


def test_what_goes_wrong_in_a_thread_goes_wrong_for_who_waits() -> None:
    tasks = [lambda: 1, Mock(side_effect=ValueError("of the task")), lambda: 3]
    with pytest.raises(ValueError, match="of the task"):
        in_threads(tasks, at_once=2, wait=lambda _: None)


def test_each_replica_is_compared_with_the_first_of_the_control() -> None:
    answers: dict[str, Any] = {"eager-0": [[1, 2], [3, 4]], "padded-0": [[1, 2], [3, 9]], "padded-1": "gone"}
    arms = {"eager-0": "eager", "padded-0": "padded", "padded-1": "padded"}
    rows = [tuple(row.values()) for row in served_parity.compared(answers, arms, first="eager-0")]
    assert rows == [
        ("eager", "eager-0", None, 2, 2),
        ("padded", "padded-0", None, 1, 2),
        ("padded", "padded-1", "gone", 0, 0),
    ]
    without = served_parity.compared({**answers, "eager-0": "gone"}, arms, first="eager-0")
    assert all("gone" in row["error"] for row in without)


def test_vectors_are_held_to_the_cosine_with_the_control() -> None:
    near, far = [[1.0, 0.0], [0.6, 0.8]], [[2.0, 0.0], [0.8, 0.6]]
    odd = [[1.0, 0.0, 0.0], [0.0, 0.0]]  # of another size, and without direction
    answers: dict[str, Any] = {"eager-0": near, "far-0": far, "odd-0": odd, "gone-0": "UNAVAILABLE: gone"}
    arms = {replica: replica[:-2] for replica in answers}
    rows = served_parity.compared(answers, arms, first="eager-0", least=0.99)
    assert [(row["same"], row["of"], row["error"], row.get("cosine")) for row in rows] == [
        (2, 2, None, 1.0),
        (1, 2, None, pytest.approx(0.96)),
        (0, 2, None, -1.0),
        (0, 0, "UNAVAILABLE: gone", None),
    ]
