"""One run with TLS, a token, two load workers, two replicas and two trials; the tests read what it left."""

from __future__ import annotations

import json
import os
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from analysis.records.run_records import read_run
from analysis.records.schemas import COMPILE_EVENTS, REQUESTS, STEPS
from analysis.records.tables import read_table
from analysis.summary.summary import analyze
from loadtests.experiments.model import Experiment
from loadtests.experiments.reading import from_table
from loadtests.experiments.writing import to_table
from loadtests.trials.progress import Status
from servers.clock import ANCHOR_NS
from tests.fakes.certificates import make_certificates
from tests.loadtests.trials.test_run import children_of_this_process, experiment, requests, run, trial_facts

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("canonical run")]

TOKEN = "canonical-bearer-4be9"


@dataclass(frozen=True)
class Canonical:
    what: Experiment
    outcome: Any
    status: Status
    left: set[str]  # processes that the run did not end
    secrets: dict[str, bytes]

    @property
    def folder(self) -> Path:
        folder: Path = self.outcome.run_dir
        return folder

    def table(self, name: str, schema: Any, trial: int = 1) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = read_table(self.folder / f"trial-0{trial}" / name, schema)[0].to_pylist()
        return rows


@pytest.fixture(scope="module")
def canonical(tmp_path_factory: pytest.TempPathFactory) -> Canonical:
    given, out = tmp_path_factory.mktemp("given"), tmp_path_factory.mktemp("runs")
    pem = make_certificates(given)
    table = to_table(
        experiment(
            traffic={"design": "mirrored", "workers": 2, "rate": 12},
            trials={"count": 2, "starting_at_once": 4},
            splitter={"tls_certificate": pem.certificate, "tls_key": pem.key, "tls_client_ca": pem.ca},
            security={
                "tls_ca": pem.ca,
                "tls_certificate": pem.client_certificate,
                "tls_key": pem.client_key,
                "token_env": "CANONICAL_TOKEN",
            },
        )
    )
    arms = [
        {"name": "eager", "preset": "eager", "control": True, "replicas": 2},
        {"name": "naive", "preset": "compiled-naive", "replicas": 2},
    ]
    what = from_table(table | {"arms": arms})
    before = children_of_this_process()
    os.environ["CANONICAL_TOKEN"] = TOKEN
    try:
        outcome, status = run(what, out)
    finally:
        del os.environ["CANONICAL_TOKEN"]
    keys = {
        f"{name}, line {number}": line.encode()
        for name in ("key", "client_key")
        for number, line in enumerate(Path(getattr(pem, name)).read_text().splitlines())
        if len(line) > 20 and not line.startswith("-----")
    }
    return Canonical(what, outcome, status, children_of_this_process() - before, {"token": TOKEN.encode(), **keys})


def test_the_run_is_complete_and_leaves_no_process(canonical: Canonical) -> None:
    assert canonical.outcome.error is None
    assert canonical.outcome.complete
    assert canonical.left == set()


def test_the_written_experiment_reads_back_as_it_was(canonical: Canonical) -> None:
    assert from_table(tomllib.loads((canonical.folder / "experiment.toml").read_text())) == canonical.what


def test_the_environment_names_clock_versions_and_machine(canonical: Canonical) -> None:
    environment = json.loads((canonical.folder / "environment.json").read_text())
    assert environment["clock"]["anchor_ns"] == ANCHOR_NS
    assert {"python", "versions", "cpu", "gpus"} <= set(environment)
    assert len(environment["machine"]) == 12


@pytest.mark.parametrize("trial", [1, 2])
def test_every_planned_request_is_recorded_once_for_each_arm(canonical: Canonical, trial: int) -> None:
    facts, rows = trial_facts(canonical.outcome, trial), requests(canonical.outcome, trial)
    assert facts["complete"]
    assert facts["deaths"] == []
    assert facts["planned"]["eager"] == facts["planned"]["naive"] > 0
    assert {row["status"] for row in rows} == {"OK"}
    pairs = [(row["pair_id"], row["arm"]) for row in rows]
    assert len(set(pairs)) == len(pairs) == 2 * facts["planned"]["eager"]


def test_two_workers_share_the_schedule(canonical: Canonical) -> None:
    files = sorted((canonical.folder / "trial-01").glob("requests-*.arrow"))
    assert [path.name for path in files] == ["requests-0.arrow", "requests-1.arrow"]
    assert all(read_table(path, REQUESTS)[0].num_rows for path in files)


def test_replicas_share_the_requests_of_their_arm(canonical: Canonical) -> None:
    assert {row["replica"] for row in requests(canonical.outcome)} == {"eager-0", "eager-1", "naive-0", "naive-1"}


def test_no_request_is_due_before_every_arm_is_ready(canonical: Canonical) -> None:
    facts, rows = trial_facts(canonical.outcome), requests(canonical.outcome)
    assert min(row["scheduled_ns"] for row in rows) >= facts["start_ns"] > max(facts["ready"].values())


def test_trials_have_different_traffic(canonical: Canonical) -> None:
    first, second = ([row["prompt_tokens"] for row in requests(canonical.outcome, trial)] for trial in (1, 2))
    assert first != second
    assert canonical.status.load.finished == len(second)


def test_compile_events_name_the_requests_that_they_delayed(canonical: Canonical) -> None:
    serving = [row for row in canonical.table("compile_events.arrow", COMPILE_EVENTS) if row["phase"] == "serving"]
    assert {row["arm"] for row in serving} == {"naive"}
    recorded = {row["request_id"] for row in requests(canonical.outcome) if row["arm"] == "naive"}
    assert {name for row in serving for name in row["request_ids"]} <= recorded


def test_there_is_a_step_record_for_each_answer_of_the_fakes(canonical: Canonical) -> None:
    assert len(canonical.table("steps.arrow", STEPS)) == len(requests(canonical.outcome))


def test_trials_record_which_events_stall(canonical: Canonical) -> None:
    assert "limit_hit" in trial_facts(canonical.outcome)["stalling_kinds"]


def test_the_host_and_every_process_are_sampled(canonical: Canonical) -> None:
    records = read_run(canonical.folder)
    assert records.problems == ()
    assert records.bed is not None
    found = {(row["kind"], row["name"], row["arm"]) for row in records.bed.to_pylist()}
    assert found >= {
        ("host", "run", None),
        ("process", "eager-0", "eager"),
        ("process", "eager-1", "eager"),
        ("process", "naive-0", "naive"),
        ("process", "splitter", None),
    }
    bed = trial_facts(canonical.outcome)["bed"]
    assert bed["interval_s"] == 1.0
    assert bed["machines"]["run"]["machine"] == records.environment["machine"]
    assert bed["arms"] == {"eager": "cpu", "naive": "cpu"}
    assert bed["gaps"] == []


def test_compile_caches_are_removed(canonical: Canonical) -> None:
    assert not list(canonical.folder.glob("trial-*/compile-cache"))


def test_no_file_holds_a_secret(canonical: Canonical) -> None:
    for path in canonical.folder.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert [name for name, secret in canonical.secrets.items() if secret in content] == [], path


def test_the_naive_arm_fails_by_its_recompiles(canonical: Canonical) -> None:
    summary = analyze(canonical.folder)
    failed = {(gate["arm"], gate["gate"]) for gate in summary["gates"] if gate["verdict"] == "FAIL"}
    assert ("naive", "recompiles") in failed
    assert {event["arm"] for event in summary["events"]} == {"naive"}
