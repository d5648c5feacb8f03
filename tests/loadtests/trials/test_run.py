import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from analysis.records.schemas import REQUESTS, STEPS
from analysis.records.tables import read_table
from analysis.summary.summary import analyze
from loadtests.experiments.model import Experiment
from loadtests.experiments.reading import from_table
from loadtests.experiments.writing import to_table
from loadtests.trials.live_page import LivePage
from loadtests.trials.progress import Status
from loadtests.trials.run import Orchestrator, RunOutcome
from servers.fields import ConfigError
from tests.fakes.http1 import DONE, HttpPeer, Request, answer, plain, said, scripted, usage

FAKE_ARM = Path(__file__).resolve().parents[2] / "fakes" / "arm.py"


def experiment(**tables: dict[str, Any]) -> Experiment:
    table: dict[str, Any] = {
        "name": "small",
        "seed": 3,
        "model": {"device": "cpu", "dtype": "float32"},
        "engine": {"max_prompt_tokens": 128, "max_new_tokens": 16},
        "arms": [
            {"name": "eager", "preset": "eager", "control": True},
            {"name": "naive", "preset": "compiled-naive"},
        ],
        "traffic": {"duration_s": 2, "rate": 8, "length_scale": 0.05, "block_s": 1, "timeout_s": 10},
        "trials": {"starting_at_once": 2},
        "bed": {"reference_s": 0},
    }
    for key, value in tables.items():
        table[key] = {**table.get(key, {}), **value}
    return from_table(table)


def run(
    what: Experiment, out: Path, *flags: str, status: Status | None = None, page: LivePage | None = None
) -> tuple[RunOutcome, Status]:
    status = status or Status()
    command = [sys.executable, str(FAKE_ARM), *flags]
    return Orchestrator(what, out=out, status=status, page=page, arm_command=command).run(), status


def trial_facts(outcome: RunOutcome, number: int = 1) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((outcome.run_dir / f"trial-{number:02d}" / "trial.json").read_text())
    return facts


def requests(outcome: RunOutcome, number: int = 1) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for path in sorted((outcome.run_dir / f"trial-{number:02d}").glob("requests*.arrow")):
        rows += read_table(path, REQUESTS)[0].to_pylist()
    return rows


def children_of_this_process() -> set[str]:
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
        except OSError:
            continue
        if parent == str(os.getpid()):
            found.add(folder.name)
    return found


def encoders(**tables: dict[str, Any]) -> Experiment:
    base: dict[str, dict[str, Any]] = {
        "model": {"id": "example/encoder", "task": "embed"},
        "engine": {"max_prompt_tokens": 128, "max_new_tokens": 128},
    }
    return experiment(**{key: {**base.get(key, {}), **tables.get(key, {})} for key in {**base, **tables}})


@pytest.mark.process
@pytest.mark.parametrize("design", ["mirrored", "split", "switchback", "shadow"])
def test_encoders_are_sent_texts_and_judged_by_their_vectors(design: str, tmp_path: Path) -> None:
    outcome, _ = run(encoders(traffic={"design": design}), tmp_path, "--token", "naive-0=6")
    assert outcome.complete, outcome.error
    rows = requests(outcome)
    assert {row["arm"] for row in rows} == {"eager", "naive"}
    assert {row["status"] for row in rows} == {"OK"}
    assert {row["output_tokens"] for row in rows} == {row["first_token_ns"] for row in rows} == {None}
    assert all(row["padded_length"] == row["prompt_tokens"] for row in rows)
    steps = read_table(outcome.run_dir / "trial-01" / "steps.arrow", STEPS)[0].to_pylist()
    assert {step["kind"] for step in steps} == {"encode"}
    answers = {row["replica"]: row for row in trial_facts(outcome)["answers"]["replicas"]}
    assert answers["eager-0"]["cosine"] == pytest.approx(1.0)
    assert answers["naive-0"]["cosine"] == pytest.approx(0.5403, abs=1e-4)  # the fake's vector turns by one radian
    summary = analyze(outcome.run_dir)
    parity = [gate["verdict"] for gate in summary["gates"] if gate["gate"] == "parity"]
    assert parity == ["FAIL"]
    assert {row["metric"] for row in summary["comparisons"]} == {"e2e"}


@pytest.mark.process
def test_an_arm_that_dies_is_recorded_and_the_run_goes_on(tmp_path: Path) -> None:
    outcome, status = run(experiment(), tmp_path, "--die", "naive-0=3")
    assert outcome.complete, outcome.error
    (death,) = trial_facts(outcome)["deaths"]
    assert (death["arm"], death["replica"], death["exit_code"]) == ("naive", "naive-0", 9)
    rows = requests(outcome)
    assert {row["status"] for row in rows if row["arm"] == "eager"} == {"OK"}
    failed = [row for row in rows if row["status"] != "OK"]
    assert failed
    assert all(row["arm"] in ("naive", None) for row in failed)
    assert max(row["scheduled_ns"] for row in rows if row["arm"] == "eager") > death["at_ns"]
    assert "the device fell off the bus" in status.notes[0]


@pytest.mark.process
def test_an_arm_that_cannot_start_breaks_the_run_with_its_own_words(tmp_path: Path) -> None:
    before = children_of_this_process()
    outcome, _ = run(experiment(), tmp_path, "--fail-start", "naive-0")
    assert outcome.error is not None
    assert 'arm "naive": naive-0 ended with exit code 3' in outcome.error
    assert "the weights are missing" in outcome.error
    assert "\n" not in outcome.error
    assert children_of_this_process() <= before


@pytest.mark.parametrize(
    ("tables", "expected"),
    [
        ({"model": {"device": "tpu"}}, 'model.device is "tpu": use auto, cpu, cuda or cuda:N'),
        ({"model": {"device": "cpu", "id": "./no-such-model"}}, 'model.id "./no-such-model" does not exist'),
        ({"traffic": {"rate": 0.001, "duration_s": 1}}, "would send no request"),
        ({"traffic": {"rate": 0, "arrivals": "trace", "trace": "/no/such.csv"}}, "/no/such.csv"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(
    tables: dict[str, dict[str, Any]], expected: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        run(experiment(**tables), tmp_path / "runs")
    assert expected in str(caught.value)
    assert not (tmp_path / "runs").exists()


def test_a_missing_compiler_is_named_before_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match='the C\\+\\+ compiler "no-such-compiler" is missing'):
        run(experiment(), tmp_path / "runs")


# --- External arms ----------------------------------------------------------------------------------------------------


def beside_external(address: str | list[str], **tables: dict[str, Any]) -> Experiment:
    own = {"name": "eager", "preset": "eager", "control": True}
    vllm = {"name": "vllm", "kind": "openai", "address": address, "model_name": "llama", **tables.pop("arm", {})}
    base = to_table(experiment(**tables))
    for table in ("splitter", "model", "engine"):
        del base[table]
    return from_table({**base, "compare_models": True, "arms": [own, vllm], "engine": {"max_new_tokens": 16}})


@pytest.mark.process
def test_external_arm_that_fails_shows_in_its_errors_and_its_token_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_TOKEN", "s3cret-token")
    streamed = answer(said("a"), said(" b", finish="length"), usage(2, 9), DONE)

    def script(request: Request) -> bool | None:
        if len(peer.requests) > 8:
            return False  # the server is going down: at first it drops what it is asked
        if len(peer.requests) > 5:
            request.send(plain("401 No", b'{"error": {"message": "s3cret-token is not known"}}'))
        else:
            request.send(streamed if request.line.startswith("POST") else plain("200 OK"))
        return None

    with HttpPeer(script) as peer:
        what = beside_external(peer.address, arm={"token_env": "VLLM_TOKEN"}, traffic={"duration_s": 2})
        outcome, _ = run(what, tmp_path)
    assert outcome.complete, outcome.error
    assert trial_facts(outcome)["deaths"] == []
    statuses = [row["status"] for row in requests(outcome) if row["arm"] == "vllm"]
    assert set(statuses) == {"OK", "UNAUTHENTICATED", "UNAVAILABLE"}
    assert {row["status"] for row in requests(outcome) if row["arm"] == "eager"} == {"OK"}
    assert "HTTP 401: *** is not known" in {row["error"] for row in requests(outcome)}
    assert {request.headers["authorization"] for request in peer.requests} == {"Bearer s3cret-token"}
    for path in outcome.run_dir.rglob("*"):
        assert path.is_dir() or b"s3cret-token" not in path.read_bytes(), path
    monkeypatch.delenv("VLLM_TOKEN")
    with pytest.raises(ConfigError, match="VLLM_TOKEN, which is not set"):
        Orchestrator(what, out=tmp_path / "none").run()
    assert not (tmp_path / "none").exists()


@pytest.mark.process
def test_external_arm_that_cannot_be_used_ends_the_run_before_anything_starts(tmp_path: Path) -> None:
    for number, (reply, says) in enumerate(
        (
            (plain("404 No", b'{"error": {"message": "no such model"}}'), "cannot be used: HTTP 404: no such model"),
            (plain("503 Busy", b"loading"), "was not ready after 1 s (HTTP 503: loading): start the server"),
        )
    ):
        with HttpPeer(scripted([reply])) as peer:
            what = beside_external(peer.address, trials={"ready_timeout_s": 1})
            outcome, _ = run(what, tmp_path / str(number))
        assert not outcome.complete
        assert outcome.error is not None
        assert f'arm "vllm": {peer.address} {says}' in outcome.error
        logs = {path.name for path in (outcome.run_dir / "trial-01" / "logs").iterdir()}
        assert logs == {"watcher.log"}  # the machines are watched before anything starts on them


@pytest.mark.process
def test_requests_that_do_not_fit_an_external_arm_end_the_run_before_its_load(tmp_path: Path) -> None:
    streamed = answer(said("a"), said(" b", finish="length"), usage(2, 9), DONE)
    models = plain("200 OK", b'{"data": [{"id": "llama", "max_model_len": 20}]}')

    def script(request: Request) -> None:
        request.send(streamed if request.line.startswith("POST") else models)

    with HttpPeer(script) as peer:
        outcome, _ = run(beside_external(peer.address), tmp_path)
    assert not outcome.complete
    assert re.fullmatch(
        rf'arm "vllm": {peer.address} takes 20 tokens for a prompt and its answer, and \d+ of \d+ requests have more, '
        r"\d+ at most: serve it with a longer context, or lower engine.max_prompt_tokens or engine.max_new_tokens",
        outcome.error or "",
    )
    assert sum(request.line.startswith("POST") for request in peer.requests) == 1
