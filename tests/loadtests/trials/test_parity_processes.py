import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from analysis.records.documents import read_document
from loadtests.commands.main import main
from loadtests.commands.parity import parity_table, vector_table
from loadtests.experiments.model import Experiment
from loadtests.experiments.reading import from_table
from loadtests.trials.errors import RunError
from loadtests.trials.parity_processes import ParityRun
from loadtests.trials.progress import Status
from loadtests.trials.run import Orchestrator, RunOutcome
from servers.fields import ConfigError

ROOT = Path(__file__).resolve().parents[3]
FAKE_MEASURE = ROOT / "tests" / "fakes" / "measure.py"
FAKE_ARM = ROOT / "tests" / "fakes" / "arm.py"

pytestmark = pytest.mark.process


def experiment(dtype: str = "bfloat16", **tables: Any) -> Experiment:
    table: dict[str, Any] = {
        "name": "small",
        "seed": 3,
        "model": {"device": "cpu", "dtype": dtype},
        "engine": {"threads": 1},
        "arms": [
            {"name": "padded", "preset": "eager-padded"},
            {"name": "eager", "preset": "eager", "control": True},
        ],
        "traffic": {"duration_s": 2, "rate": 6, "length_scale": 0.05, "block_s": 1, "timeout_s": 10},
        "bed": {"reference_s": 0},
    }
    for key, value in tables.items():
        table[key] = {**table.get(key, {}), **value} if isinstance(value, dict) else value
    return from_table(table)


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


def test_an_arm_that_errs_more_fails_with_its_numbers(tmp_path: Path) -> None:
    outcome = measured(experiment(), tmp_path, "--noise", "padded=0.004")
    assert (outcome["verdict"], outcome["exit_code"]) == ("FAIL", 99)
    table = parity_table(outcome)
    (line,) = [line for line in table.splitlines() if line.startswith("padded ")]
    assert "FAIL" in line
    assert "×4." in line
    assert "padded: The typical error of padded is" in table
    assert "parity of small · bfloat16 · 16 answers, 128 positions × 50 logits · control eager" in table


def test_without_a_reference_lower_precision_stays_open(tmp_path: Path) -> None:
    outcome = measured(experiment(parity={"reference": False}), tmp_path)
    assert (outcome["verdict"], outcome["exit_code"], outcome["reference"]) == ("INCONCLUSIVE", 3, False)
    assert "KL(control‖arm)" in parity_table(outcome)


def test_a_border_that_no_request_asks_leaves_its_arm_open_and_is_kept(tmp_path: Path) -> None:
    outcome = measured(experiment(), tmp_path, "--unasked", "padded=16")
    assert (outcome["verdict"], outcome["exit_code"]) == ("INCONCLUSIVE", 3)
    assert outcome["borders"]["padded"]["prompts"] == [1, 2, 16]
    assert outcome["borders"]["padded"]["unasked_prompts"] == [16]
    assert outcome["borders"]["eager"]["unasked_prompts"] == []
    assert "padded: No request asks 1 of the 6 borders of padded (prompts of 16 tokens)" in parity_table(outcome)


def test_a_batch_border_that_no_step_ran_leaves_its_arm_open_and_is_kept(tmp_path: Path) -> None:
    outcome = measured(experiment(), tmp_path, "--unrun", "padded=8")
    assert (outcome["verdict"], outcome["exit_code"]) == ("INCONCLUSIVE", 3)
    assert outcome["borders"]["padded"]["unasked_batches"] == {"decode": [8]}
    assert outcome["borders"]["eager"]["unasked_batches"] == {"decode": []}
    expected = (
        "padded: No request asks 1 of the 6 borders of padded (decode steps of 8 rows): give parity.prompts = 24."
    )
    assert expected in parity_table(outcome)


@pytest.mark.parametrize("arms", [False, True])
def test_an_arm_that_refuses_a_border_fails_and_the_others_are_judged(arms: bool, tmp_path: Path) -> None:
    what = experiment(arms=QUANTISED, parity={"prompts": 40}) if arms else experiment()
    outcome = measured(what, tmp_path, "--unforeseen", "padded")
    assert (outcome["verdict"], outcome["exit_code"]) == ("FAIL", 99)
    verdicts = {arm["name"]: arm["verdict"] for arm in outcome["arms"]}
    assert verdicts == {"padded": "FAIL", **({"int8": "PASS"} if arms else {})}
    assert outcome["borders"]["padded"]["unasked_batches"] == {"decode": [1, 2, 8]}
    table = parity_table(outcome)
    assert "padded: padded refuses what it is asked: 2 of 16 requests are refused, first request 0." in table


def encoders() -> Experiment:
    return experiment(model={"id": "random:bert-tiny", "task": "embed"})


@pytest.mark.parametrize(
    ("flags", "open_at"), [(("--unasked", "padded=16"), "prompts of 16 tokens"), (("--unrun", "padded=8"), "8 texts")]
)
def test_a_border_that_no_text_asks_leaves_an_encoder_open_and_is_kept(
    flags: tuple[str, str], open_at: str, tmp_path: Path
) -> None:
    whole = measured(encoders(), tmp_path / "whole")
    assert (whole["verdict"], whole["borders"]["padded"]["batches"]) == ("PASS", {"encode": [1, 2, 8]})
    outcome = measured(encoders(), tmp_path, *flags)
    assert (outcome["verdict"], outcome["exit_code"]) == ("INCONCLUSIVE", 3)
    assert "padded: No request asks 1 of the 6 borders of padded (" in vector_table(outcome)
    assert f"{open_at}): give parity.prompts = 24." in vector_table(outcome)


def test_an_encoder_that_refuses_a_border_fails_instead_of_breaking_the_run(tmp_path: Path) -> None:
    outcome = measured(encoders(), tmp_path, "--unforeseen", "padded")
    assert (outcome["verdict"], outcome["exit_code"]) == ("FAIL", 99)
    assert "padded: padded refuses what it is asked: 2 of 16 requests are refused" in vector_table(outcome)


def test_too_few_prompts_for_an_interval_leave_parity_open(tmp_path: Path) -> None:
    outcome = measured(experiment(parity={"prompts": 4}), tmp_path)
    assert outcome["verdict"] == "INCONCLUSIVE"
    assert "(4 prompts set no interval), limit 1.5: give parity.prompts = 8 at least." in parity_table(outcome)


def test_float32_answers_must_be_equal(tmp_path: Path) -> None:
    quiet = ["--noise", "eager=1e-6", "--noise", "padded=1e-6"]
    outcome = measured(experiment("float32"), tmp_path, *quiet, "--token", "padded=9")
    assert outcome["verdict"] == "FAIL"
    assert "15 of 16" in parity_table(outcome)
    assert "first at request 2 (prompt of 3 tokens), token 4 of 8: eager takes 7 and padded 9" in parity_table(outcome)


@pytest.mark.parametrize(
    ("fact", "expected"),
    [
        ("padded:weights=ffff", 'padded loaded weights ffff but the control "eager" has abcd'),
        ("padded:attention=eager", 'padded loaded attention eager but the control "eager" has sdpa'),
        ("padded:dtypes=float32", 'padded loaded dtypes float32 but the control "eager" has bfloat16'),
        ("float64 reference:weights=ffff", 'float64 reference loaded weights ffff but the control "eager" has abcd'),
    ],
)
def test_arms_that_loaded_something_else_are_refused(fact: str, expected: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="parity compares policies alone") as caught:
        measured(experiment(), tmp_path, "--fact", fact)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arm", "expected"),
    [
        ({"model": {"dtype": "float16"}}, "arms[1].model.dtype is 'float16' but the control \"eager\" has 'bfloat16'"),
        ({"model": {"seed": 4}}, 'arms[1].model.seed is 4 but the control "eager" has 0'),
        ({"engine": {"slots": 4}}, 'arms[1].engine.slots is 4 but the control "eager" has 8'),
    ],
)
def test_arms_that_differ_in_more_than_the_policy_are_refused_even_where_models_are_compared(
    arm: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    arms = [
        {"name": "eager", "preset": "eager", "control": True},
        {"name": "padded", "preset": "eager-padded", **arm},
    ]
    what = experiment(arms=arms, compare_models=True)
    with pytest.raises(ConfigError) as caught:
        measured(what, tmp_path)
    assert expected in str(caught.value)
    assert str(caught.value).endswith("as parity compares policies alone")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match="parity compares policies alone"):
        experiment(arms=arms, compare_models=True, parity={"full": True})


QUANTISED = [
    {"name": "eager", "preset": "eager", "control": True},
    {"name": "padded", "preset": "eager-padded"},
    {"name": "int8", "preset": "eager", "model": {"quantisation": "int8-weight-only"}},
]


def test_a_quantised_arm_is_judged_by_its_accuracy_and_the_others_as_ever(tmp_path: Path) -> None:
    noise = ("--noise", "int8=0.05", "--token", "int8=3")
    outcome = measured(experiment(arms=QUANTISED, parity={"prompts": 40}), tmp_path, "--noise", "int8=0.05")
    assert outcome["verdict"] == "PASS"
    padded, int8 = outcome["arms"]
    assert {item["name"] for item in padded["findings"]} >= {"error", "flips"}
    names = ["finite", "answers", "worst prompt", "worst position", "perplexity", "kl", "borders"]
    assert [item["name"] for item in int8["findings"]] == names
    assert int8["figures"]["text_source"] == "eager's own answers to random prompts"
    assert [outcome["facts"][name]["held"] for name in ("eager", "int8")] == ["none", "int8-weight-only"]
    titles, *lines = parity_table(outcome).splitlines()[2:5]
    assert "perplexity" in titles
    assert "×1.00" in lines[1]
    wrong = measured(experiment(arms=QUANTISED, parity={"prompts": 40}), tmp_path / "wrong", *noise)
    assert wrong["verdict"] == "FAIL"
    assert "1 not computed" in parity_table(wrong)
    assert "1 token of int8's answers is not what it computes" in parity_table(wrong)


def test_a_quantised_arm_answers_enough_prompts_for_an_interval_unless_told_how_many(tmp_path: Path) -> None:
    outcome = measured(experiment(arms=QUANTISED), tmp_path)
    assert outcome["requests"] == 64
    few = measured(experiment(arms=QUANTISED, parity={"prompts": 6}), tmp_path / "few")
    assert few["verdict"] == "INCONCLUSIVE"
    assert "so few set no interval: raise parity.prompts, at least 32." in parity_table(few)


def test_limits_are_the_experiment_s(tmp_path: Path) -> None:
    strict = experiment(arms=QUANTISED, parity={"prompts": 40, "max_kl": 1e-6})
    outcome = measured(strict, tmp_path, "--noise", "int8=0.05")
    assert outcome["verdict"] == "FAIL"
    assert "nats a token" in parity_table(outcome)
    assert "limit 1e-06" in parity_table(outcome)


@pytest.mark.parametrize("reference", [True, False])
def test_given_texts_are_asked_of_the_control_and_of_quantised_arms_alone(reference: bool, tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text("\n".join(json.dumps([number, *range(number % 7 + 3)]) for number in range(36)))
    what = experiment("float32", arms=QUANTISED, parity={"texts": str(path), "reference": reference})
    quiet = ("--noise", "eager=1e-6", "--noise", "padded=1e-6", "--noise", "int8=0.05")
    outcome = measured(what, tmp_path / "out", *quiet, keep_logits=True)
    assert outcome["verdict"] == "PASS", parity_table(outcome)
    assert outcome["arms"][1]["figures"]["texts"] == 36
    assert outcome["arms"][1]["figures"]["text_source"] == "of own.jsonl"
    asked = {"eager", "int8"} | ({"float64 reference"} if reference else set())
    assert {item.parent.name for item in (tmp_path / "out").rglob("texts.npy")} == asked


def test_arms_on_other_devices_of_a_kind_are_not_refused() -> None:
    arms = [
        {"name": "eager", "preset": "eager", "control": True, "device": "cuda:0"},
        {"name": "padded", "preset": "eager-padded", "device": "cuda:1"},
    ]
    experiment(arms=arms, parity={"full": True})


@pytest.mark.parametrize(
    ("flags", "error", "expected"),
    [
        (("--crash", "padded"), RunError, "RuntimeError: the weights are missing"),
        (
            ("--refuse", "float64 reference"),
            ConfigError,
            "float64 reference: the device is too small: take a larger one",
        ),
        (("--silent", "eager"), RunError, "eager said nothing for 1 s (it was at: loading)"),
    ],
)
def test_a_measurement_that_breaks_says_so_in_its_own_words(
    flags: tuple[str, ...], error: type[Exception], expected: str, tmp_path: Path
) -> None:
    began = time.monotonic()
    with pytest.raises(error) as caught:
        measured(experiment(trials={"ready_timeout_s": 1}), tmp_path, *flags)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
    assert time.monotonic() - began < 20


def test_an_interruption_ends_the_measurement(tmp_path: Path) -> None:
    class StopError(Exception):
        pass

    calls = iter(range(10**6))

    def check() -> None:
        if next(calls) > 3:
            raise StopError

    with pytest.raises(StopError):
        measured(experiment(), tmp_path, "--silent", "eager", check=check)


def run(what: Experiment, out: Path, *flags: str, arm_flags: Sequence[str] = ()) -> RunOutcome:
    return Orchestrator(
        what,
        out=out,
        arm_command=[sys.executable, str(FAKE_ARM), *arm_flags],
        parity_command=[sys.executable, str(FAKE_MEASURE), *flags],
    ).run()


def test_a_run_that_asks_for_it_measures_first_and_starts_nothing_when_parity_fails(tmp_path: Path) -> None:
    what = experiment(parity={"full": True})
    outcome = run(what, tmp_path, "--noise", "padded=0.004")
    assert outcome.failed_parity is not None
    assert (outcome.complete, outcome.error, outcome.failed_parity["verdict"]) == (False, None, "FAIL")
    assert not list(outcome.run_dir.glob("trial-*"))
    assert read_document(outcome.run_dir / "parity.json").content == outcome.failed_parity


def test_a_run_whose_measurement_breaks_is_broken(tmp_path: Path) -> None:
    outcome = run(experiment(parity={"full": True}), tmp_path, "--crash", "eager")
    assert outcome.error is not None
    assert "the weights are missing" in outcome.error


def test_the_command_line_refuses_before_it_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["parity", "demo", "--set", "arms.compiled-naive.model.dtype=bfloat16", "--out", str(tmp_path / "out")]
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "arms[2].model.dtype is 'bfloat16' but the control \"eager\" has 'float32'" in err
    assert not (tmp_path / "out").exists()


OTHER_BACKEND = ("arms[1].compile.mode=default",)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (['arms[1].compile.regions=["nothing"]'], "nothing"),
        (["arms[1].compile.artifact=/no/such/file"], "/no/such/file"),
        (["arms[1].model.quantisation=int8-weight-only", "parity.texts=/no/texts.jsonl"], "/no/texts.jsonl"),
        (["model.device=cuda"], "no GPU of NVIDIA or AMD is visible"),
    ],
)
def test_what_no_arm_can_be_measured_with_leaves_no_folder(
    settings: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loadtests.trials.preflight.sees_gpu", lambda: False)
    assert_refused(settings, said, tmp_path, capsys)


@pytest.mark.usefixtures("torch_asked_once")
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ([*OTHER_BACKEND, "arms[1].compile.backend=none-such"], "compile.backend is"),
        (
            [*OTHER_BACKEND, "arms[1].compile.backend=own", "arms[1].compile.backend_module=no_such.module"],
            "no_such.module",
        ),
        (["arms[1].compile.options.fastest=1"], "compile.options.fastest is unknown"),
    ],
)
def test_what_torch_does_not_know_leaves_no_folder(
    settings: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_refused(settings, said, tmp_path, capsys)


def assert_refused(settings: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [flag for setting in settings for flag in ("--set", setting)]
    assert main(["parity", "demo", *flags, "--out", str(tmp_path / "out")]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err
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
