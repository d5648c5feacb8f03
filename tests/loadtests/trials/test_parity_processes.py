import json
import sys
from pathlib import Path
from typing import Any

import pytest

from analysis.records.documents import read_document
from analysis.summary.summary import EXIT_CODES
from loadtests.commands.main import main
from loadtests.commands.parity import parity_table, vector_table
from loadtests.experiments.model import Experiment
from loadtests.trials.errors import RunError, StopRequestedError
from loadtests.trials.parity_processes import ParityRun
from loadtests.trials.progress import Status
from loadtests.trials.run import Orchestrator
from servers.fields import ConfigError
from tests.fakes.whole_run import experiment as small

FAKE_MEASURE = Path(__file__).resolve().parents[2] / "fakes" / "measure.py"


pytestmark = pytest.mark.process  # each measures two to four arms, a process each

ARMS = [{"name": "padded", "preset": "eager-padded"}, {"name": "eager", "preset": "eager", "control": True}]
QUANTISED = [*reversed(ARMS), {"name": "int8", "preset": "eager", "model": {"quantisation": "int8-weight-only"}}]
QUIET = ("--noise", "eager=1e-6", "--noise", "padded=1e-6")
ENCODERS = {"model": {"id": "random:bert-tiny", "task": "embed"}, "engine": {"max_new_tokens": 128}}


def experiment(dtype: str = "bfloat16", **tables: Any) -> Experiment:
    tables["model"] = {"dtype": dtype, **tables.get("model", {})}
    return small(**{"arms": ARMS, "engine": {"threads": 1}, **tables})


def measured(what: Experiment, folder: Path, *flags: str, **more: Any) -> dict[str, Any]:
    more.setdefault("command", [sys.executable, str(FAKE_MEASURE), *flags])
    return ParityRun(what, folder=folder, shared_cache=folder / "cache", **more).run()


def test_every_arm_is_measured_alone_and_the_outcome_is_kept_without_the_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    status = Status()
    outcome = measured(experiment(), tmp_path, status=status)
    assert read_document(tmp_path / "parity.json").content == outcome
    assert (outcome["verdict"], outcome["exit_code"]) == ("PASS", 0)
    assert (outcome["requests"], outcome["positions"], outcome["vocabulary"]) == (16, 128, 50)
    assert [arm["name"] for arm in outcome["arms"]] == ["padded"]
    assert outcome["control"]["name"] == "eager"
    assert list(status.replicas) == ["eager", "padded", "float64 reference"]  # the control answers first
    assert {state.stage for state in status.replicas.values()} == {"measured"}
    assert not list(tmp_path.rglob("logits.npy"))
    environment = json.loads((tmp_path / "parity" / "padded" / "environment.json").read_text())
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "parity" / "padded" / "compile-cache")
    assert "a library says hello" in (tmp_path / "logs" / "parity-padded.log").read_text()


def test_logits_are_kept_on_request(tmp_path: Path) -> None:
    measured(experiment(), tmp_path, keep_logits=True)
    assert len(list(tmp_path.rglob("logits.npy"))) == 3


@pytest.mark.parametrize(
    ("tables", "flags", "verdict", "words"),
    [
        ({}, ("--noise", "padded=0.004"), "FAIL", ("×4.",)),
        ({"parity": {"reference": False}}, (), "INCONCLUSIVE", ("KL(control‖arm)",)),
        ({"parity": {"prompts": 4}}, (), "INCONCLUSIVE", ("1.5", "parity.prompts = 8")),
        ({"dtype": "float32"}, (*QUIET, "--token", "padded=9"), "FAIL", ("15 of 16", "request 2", "7 and padded 9")),
        ({"arms": QUANTISED, "parity": {"prompts": 6}}, (), "INCONCLUSIVE", ("parity.prompts", "32")),
        ({"arms": QUANTISED, "parity": {"prompts": 40}}, ("--noise", "int8=0.05"), "PASS", ("perplexity", "×1.00")),
        (
            {"arms": QUANTISED, "parity": {"prompts": 40}},
            ("--noise", "int8=0.05", "--token", "int8=3"),
            "FAIL",
            ("1 not computed",),
        ),
        (
            {"arms": QUANTISED, "parity": {"prompts": 40, "max_kl": 1e-6}},
            ("--noise", "int8=0.05"),
            "FAIL",
            ("nats a token", "1e-06"),
        ),
    ],
)
def test_an_arm_is_judged_by_what_it_computes(
    tables: dict[str, Any], flags: tuple[str, ...], verdict: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    outcome = measured(experiment(**tables), tmp_path, *flags)
    assert (outcome["verdict"], outcome["exit_code"]) == (verdict, EXIT_CODES[verdict])
    table = parity_table(outcome)
    assert all(word in table for word in ("padded", *words)), table


@pytest.mark.parametrize("tables", [{}, ENCODERS], ids=["decoders", "encoders"])
@pytest.mark.parametrize(
    ("flags", "verdict", "unasked", "words"),
    [
        ((), "PASS", ([], []), ()),
        (("--unasked", "padded=16"), "INCONCLUSIVE", ([16], []), ("prompts of 16 tokens", "parity.prompts = 24")),
        (("--unrun", "padded=8"), "INCONCLUSIVE", ([], [8]), ("8", "parity.prompts = 24")),
        (("--unforeseen", "padded"), "FAIL", ([], [1, 2, 8]), ("2 of 16 requests",)),
    ],
)
def test_a_border_that_is_not_asked_leaves_an_arm_open_and_one_that_is_refused_fails_it(
    tables: dict[str, Any],
    flags: tuple[str, ...],
    verdict: str,
    unasked: tuple[list[int], list[int]],
    words: tuple[str, ...],
    tmp_path: Path,
) -> None:
    outcome = measured(experiment(**tables), tmp_path, *flags)
    assert (outcome["verdict"], outcome["exit_code"]) == (verdict, EXIT_CODES[verdict])
    kind = "encode" if tables else "decode"
    borders = outcome["borders"]["padded"]
    assert (borders["unasked_prompts"], borders["unasked_batches"]) == (unasked[0], {kind: unasked[1]})
    assert outcome["borders"]["eager"]["unasked_batches"] == {kind: []}
    table = (vector_table if tables else parity_table)(outcome)
    assert all(word in table for word in words), table


def test_a_quantised_arm_is_judged_by_its_accuracy_beside_one_that_refuses_a_border(tmp_path: Path) -> None:
    what = experiment(arms=QUANTISED)
    outcome = measured(what, tmp_path, "--noise", "int8=0.05", "--unforeseen", "padded")
    assert outcome["requests"] == 64, "enough for an interval where no number is given"
    arms = {arm["name"]: arm for arm in outcome["arms"]}
    assert {name: arm["verdict"] for name, arm in arms.items()} == {"padded": "FAIL", "int8": "PASS"}
    names = ["finite", "answers", "worst prompt", "worst position", "perplexity", "kl", "borders"]
    assert [item["name"] for item in arms["int8"]["findings"]] == names
    assert [outcome["facts"][name]["held"] for name in ("eager", "int8")] == ["none", "int8-weight-only"]


@pytest.mark.parametrize("reference", [True, False])
def test_given_texts_are_asked_of_the_control_and_of_quantised_arms_alone(reference: bool, tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text("\n".join(json.dumps([number, *range(number % 7 + 3)]) for number in range(36)))
    what = experiment("float32", arms=QUANTISED, parity={"texts": str(path), "reference": reference})
    outcome = measured(what, tmp_path / "out", *QUIET, "--noise", "int8=0.05", keep_logits=True)
    assert outcome["verdict"] == "PASS", parity_table(outcome)
    assert outcome["arms"][1]["figures"]["texts"] == 36
    assert outcome["arms"][1]["figures"]["text_source"] == "of own.jsonl"
    asked = {"eager", "int8"} | ({"float64 reference"} if reference else set())
    assert {item.parent.name for item in (tmp_path / "out").rglob("texts.npy")} == asked


@pytest.mark.parametrize(
    ("fact", "words"),
    [
        ("padded:weights=ffff", ("padded", "weights ffff", "abcd")),
        ("padded:attention=eager", ("padded", "attention eager", "sdpa")),
        ("padded:dtypes=float32", ("padded", "dtypes float32", "bfloat16")),
        ("float64 reference:weights=ffff", ("float64 reference", "weights ffff", "abcd")),
    ],
)
def test_arms_that_loaded_something_else_are_refused(fact: str, words: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        measured(experiment(), tmp_path, "--fact", fact)
    assert all(word in str(caught.value) for word in (*words, 'control "eager"'))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arm", "words"),
    [
        ({"model": {"dtype": "float16"}}, ("arms[1].model.dtype", "float16", "bfloat16")),
        ({"model": {"seed": 4}}, ("arms[1].model.seed", "4", "0")),
        ({"engine": {"slots": 4}}, ("arms[1].engine.slots", "4", "8")),
    ],
)
def test_arms_that_differ_in_more_than_the_policy_are_refused_even_where_models_are_compared(
    arm: dict[str, Any], words: tuple[str, ...], tmp_path: Path
) -> None:
    arms = [ARMS[1], {**ARMS[0], **arm}]
    what = experiment(arms=arms, compare_models=True)
    with pytest.raises(ConfigError) as caught:
        measured(what, tmp_path)
    assert all(word in str(caught.value) for word in words)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match="parity"):
        experiment(arms=arms, compare_models=True, parity={"full": True})


@pytest.mark.parametrize(
    ("flags", "error", "words"),
    [
        (("--crash", "padded"), RunError, ("the weights are missing",)),
        (("--refuse", "float64 reference"), ConfigError, ("float64 reference", "take a larger one")),
        (("--silent", "eager"), RunError, ("eager", "1 s", "loading")),
    ],
)
def test_a_measurement_that_breaks_says_so_in_its_own_words(
    flags: tuple[str, ...], error: type[Exception], words: tuple[str, ...], tmp_path: Path
) -> None:
    with pytest.raises(error) as caught:
        measured(experiment(trials={"ready_timeout_s": 1}), tmp_path, *flags)
    assert all(word in str(caught.value) for word in words)
    assert "\n" not in str(caught.value)


def test_an_interruption_ends_the_measurement(tmp_path: Path) -> None:
    calls = iter(range(10**6))

    def check() -> None:
        if next(calls) > 3:
            raise StopRequestedError

    with pytest.raises(StopRequestedError):
        measured(experiment(), tmp_path, "--silent", "eager", check=check)


@pytest.mark.parametrize(("flags", "verdict"), [(("--noise", "padded=0.004"), "FAIL"), (("--crash", "eager"), None)])
def test_a_run_starts_nothing_where_parity_fails_or_breaks(
    flags: tuple[str, ...], verdict: str | None, tmp_path: Path
) -> None:
    command = [sys.executable, str(FAKE_MEASURE), *flags]
    outcome = Orchestrator(experiment(parity={"full": True}), out=tmp_path, parity_command=command).run()
    assert not outcome.complete
    assert not list(outcome.run_dir.glob("trial-*"))
    if verdict is None:
        assert "the weights are missing" in (outcome.error or "")
    else:
        assert outcome.failed_parity is not None
        assert (outcome.error, outcome.failed_parity["verdict"]) == (None, verdict)
        assert read_document(outcome.run_dir / "parity.json").content == outcome.failed_parity


OTHER_BACKEND = ("arms[1].compile.mode=default",)


@pytest.mark.usefixtures("torch_asked_once")
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["arms.compiled-naive.model.dtype=bfloat16"], ("arms[2].model.dtype", "bfloat16", "float32")),
        (["arms[1].compile.artifact=/no/such/file"], ("/no/such/file",)),
        (["arms[1].model.quantisation=int8-weight-only", "parity.texts=/no/texts.jsonl"], ("/no/texts.jsonl",)),
        (["model.device=cuda"], ("model.device", "GPU")),
        ([*OTHER_BACKEND, "arms[1].compile.backend=none-such"], ("compile.backend", "none-such")),
        (["arms[1].compile.options.fastest=1"], ("compile.options.fastest",)),
    ],
)
def test_what_cannot_be_measured_is_one_line_and_leaves_no_folder(
    settings: list[str],
    words: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("loadtests.trials.preflight.sees_gpu", lambda: False)
    flags = [flag for setting in settings for flag in ("--set", setting)]
    assert main(["parity", "demo", *flags, "--out", str(tmp_path / "out")]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert all(word in err for word in words), err
    assert not (tmp_path / "out").exists()


def test_the_table_of_encoders_names_what_is_off_and_leaves_open_what_is_not_known() -> None:
    outcome = {
        "name": "small",
        "dtype": "float32",
        "texts": 3,
        "rows": 9,
        "width": 8,
        "control": {"name": "eager", "figures": {}},
        "arms": [
            {
                "name": "padded",
                "verdict": "FAIL",
                "figures": {"cosine_control": {"least": 0.5, "median": None}},
                "reasons": ["2 vectors of 9 of padded are off eager's."],
            }
        ],
    }
    lines = vector_table(outcome).splitlines()
    assert lines[0].endswith("3 texts, alone and in batches: 9 vectors of 8 · control eager")
    assert lines[3].split() == ["padded", "FAIL", "0.500000", "–", "–", "–"]
    assert lines[-1] == "padded: 2 vectors of 9 of padded are off eager's."
