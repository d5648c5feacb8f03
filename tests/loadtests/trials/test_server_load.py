"""Pages of servers are read each second, whatever they answer."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from analysis.records.schemas import SERVER_LOAD
from analysis.records.tables import read_table
from loadtests.trials import server_load
from loadtests.trials.server_load import ServerLoads
from servers.clock import now_ns
from tests.fakes.metrics_page import metrics_page, vllm_page
from tests.fakes.patience import wait_for
from tests.fakes.trial_context import external_trial


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_load, "EVERY_S", 0.02)


def wait_for_rows(path: Path, count: int) -> None:
    wait_for(lambda: path.exists() and read_table(path, SERVER_LOAD)[0].num_rows >= count)


def test_the_load_is_recorded_while_the_trial_goes_on(tmp_path: Path) -> None:
    began_ns = now_ns()
    with metrics_page(lambda n: vllm_page(running=n, waiting=3, cache=0.5, preemptions=2)) as page:
        trial = external_trial(tmp_path / "trial-01", {"metrics": page})
        loads = ServerLoads(trial)
        wait_for_rows(trial.folder / "server_load.arrow", 3)  # before the trial ends
        loads.stop()
        loads.stop()
    rows = read_table(trial.folder / "server_load.arrow", SERVER_LOAD)[0].to_pylist()
    assert [row["running"] for row in rows] == list(range(len(rows)))
    assert {(row["trial"], row["arm"], row["replica"]) for row in rows} == {(1, "vllm", "vllm-0")}
    assert {(row["waiting"], row["cache_pct"], row["preemptions"]) for row in rows} == {(3, 50, 2)}
    assert began_ns < rows[0]["at_ns"] < rows[-1]["at_ns"] < now_ns()
    [facts] = trial.facts.arms[1]["told"]["metrics"]
    assert (facts["replica"], facts["failed"], facts["why"]) == ("vllm-0", 0, "")
    assert facts["answered"] >= len(rows)


def test_what_a_page_does_not_answer_costs_those_samples_alone_and_is_counted(tmp_path: Path) -> None:
    def answer(number: int) -> str | int:
        if number == 3:
            return "<html>"
        return 503 if number < 3 else vllm_page(running=1, waiting=0, cache=0.0, preemptions=0)

    with metrics_page(answer) as page, metrics_page(lambda n: "up 1\n") as other:
        trial = external_trial(tmp_path / "trial-01", {"metrics": [page, other]}, replicas=2)
        loads = ServerLoads(trial)
        wait_for_rows(trial.folder / "server_load.arrow", 2)
        loads.stop()
    first, second = trial.facts.arms[1]["told"]["metrics"]
    assert (first["replica"], first["failed"]) == ("vllm-0", 4)
    assert first["why"] == "HTTPError: HTTP Error 503: Service Unavailable"
    assert (second["answered"], second["why"][:31]) == (0, "ValueError: the page shows no l")
    assert any(note.startswith(f"{page} failed 4 of ") for note in trial.status.notes)


def test_a_page_that_takes_long_is_late_and_another_is_not(tmp_path: Path) -> None:
    def slow(number: int) -> str:
        time.sleep(0.2)
        return vllm_page(running=0, waiting=0, cache=0.0, preemptions=0)

    quick = vllm_page(running=9, waiting=0, cache=0.0, preemptions=0)
    with metrics_page(slow) as page, metrics_page(lambda n: quick) as other:
        trial = external_trial(tmp_path / "trial-01", {"metrics": [page, other]}, replicas=2)
        loads = ServerLoads(trial)
        wait_for_rows(trial.folder / "server_load.arrow", 20)
        loads.stop()
    first, second = trial.facts.arms[1]["told"]["metrics"]
    assert first["late"] >= 5 * first["answered"] > 0
    assert second["answered"] > 2 * first["answered"]


def test_nothing_is_recorded_of_arms_that_show_nothing(tmp_path: Path) -> None:
    trial = external_trial(tmp_path / "trial-01", {})
    ServerLoads(trial).stop()
    assert not (trial.folder / "server_load.arrow").exists()
    assert "told" not in trial.facts.arms[1]
