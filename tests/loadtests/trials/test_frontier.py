"""A search over arms that are started in turn, decided on made-up trials by a made-up clock."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tailgate.analysis.frontier.search import Turn
from tailgate.analysis.records.documents import write_document
from tailgate.analysis.records.run_records import read_run
from tailgate.analysis.records.schemas import REQUESTS
from tailgate.analysis.records.tables import RecordWriter
from tailgate.analysis.run.run import Run
from tailgate.analysis.summary.summary import analyze
from tailgate.loadtests.experiments.model import Experiment
from tailgate.loadtests.traffic.schedule import Schedule, planned_requests
from tailgate.loadtests.trials import frontier as searching
from tailgate.loadtests.trials.context import RunError, StartError, StopRequestedError, TrialContext
from tailgate.loadtests.trials.run import Orchestrator, RunOutcome
from tailgate.loadtests.trials.served_parity import Answers
from tailgate.servers.clock import now_ns
from tailgate.servers.complaint import ConfigError
from tests.fakes.processes import refusal
from tests.fakes.whole_run import experiment as small
from tests.fakes.whole_run import trial_facts

SECOND = 1_000_000_000
KNEES = {"eager": 12.0, "padded": 3.0, "dynamic": 30.0}
START_S = {"eager": 5.0, "padded": 40.0, "dynamic": 60.0}
AROUND_S = 8.0
TWO_ARMS = [{"name": "eager", "preset": "eager", "control": True}, {"name": "padded", "preset": "compiled-padded"}]


def configure(run_dir: Path, config: Callable[[str], dict[str, Any]]) -> None:
    """The run's records say that each arm, by its name, was configured so."""
    for path in run_dir.glob("trial-*/trial.json"):
        info = json.loads(path.read_text())
        for row in info["arms"]:
            row["config"] = config(row["name"])
        write_document(path, info)


def experiment(**tables: Any) -> Experiment:
    traffic = {"arrivals": "saturation", "rate": 0, "rates": [4, 64], "duration_s": 80, "step_s": 10, "settle_s": 2}
    traffic |= {"block_s": 30, "timeout_s": 3, **tables.pop("traffic", {})}
    common: dict[str, Any] = {
        "arms": [*TWO_ARMS, {"name": "dynamic", "preset": "compiled-dynamic"}],
        "engine": {"max_prompt_tokens": 64, "max_new_tokens": 4},
        "slo": {"p90_ttft_ms": 400},
        "machines": {"reference_s": 0},
        "parity": {"served": False},
    }
    return small(**{**common, "traffic": traffic, **tables})


class MadeUpTrials(searching.FrontierSearch):
    """A search whose trials take no time: arms answer in 100 ms up to their knee and in 2 s above it.

    `time_s` is its own clock. `broken` is how trials fail, by their number; `interrupted_in` is the number of one.
    """

    slow_start = 1.0
    interrupted_in = 0

    def __init__(self, what: Experiment, **options: Any) -> None:
        super().__init__(what, **options)
        self.time_s = self._began_s = 1000.0
        self.broken: dict[int, Exception] = {}

    @property
    def spent_s(self) -> float:
        return self.time_s - self._began_s

    def _run_trial(self, context: TrialContext, schedule: Schedule, expected: dict[str, Answers] | None = None) -> None:
        context.folder.mkdir()
        arms = [arm.name for arm in context.experiment.arms]
        start_s = self.slow_start * max(START_S[arm] for arm in arms)
        context.write_facts()
        if error := self.broken.get(context.number):
            raise error
        began_ns = now_ns()
        self.time_s += start_s
        self._check()
        facts = context.facts
        facts.ready_ns = began_ns + int(start_s * SECOND)
        # So far apart that the times of trials do not meet.
        facts.start_ns = began_ns + context.number * 10_000 * SECOND
        self._send(context, schedule, facts.start_ns)
        self.time_s += context.experiment.traffic.duration_s + AROUND_S
        facts.complete = True
        context.write_facts()

    def _send(self, context: TrialContext, schedule: Schedule, start_ns: int) -> None:
        cut_s = (
            schedule.steps[0]["end_s"]
            if self.interrupted_in == context.number
            else context.experiment.traffic.duration_s
        )
        with RecordWriter(context.folder / "requests-0.arrow", REQUESTS) as writer:
            for row in planned_requests(schedule.table):
                at_s = row.offset_ns / 1e9
                if at_s > cut_s + 1.0:
                    break
                rate = next(step["rate"] for step in schedule.steps if at_s < step["end_s"])
                for arm in schedule.arms:
                    due = start_ns + row.offset_ns
                    end = due + (SECOND // 10 if rate <= KNEES[arm] else 2 * SECOND)
                    name, tokens = f"{context.number}-{row.index}", row.max_tokens
                    sent = dict.fromkeys(("scheduled_ns", "sent_ns"), due) | {"phase": "measure", "status": "OK"}
                    sent |= {"request_id": f"{name}-{arm}", "pair_id": name, "trial": context.number, "arm": arm}
                    sent |= {"prompt_tokens": row.prompt_tokens, "max_tokens": tokens, "output_tokens": tokens}
                    writer.append(sent | {"replica": f"{arm}-0", "first_token_ns": end, "end_ns": end})
        if cut_s < context.experiment.traffic.duration_s:
            raise StopRequestedError


def made_up(
    out: Path, what: Experiment | None = None, *, budget_s: float = 500.0, **trials: Any
) -> tuple[MadeUpTrials, RunOutcome]:
    search = MadeUpTrials(what or experiment(), out=out, budget_s=budget_s)
    for name, value in trials.items():
        setattr(search, name, value)
    return search, search.run()


def arms_in_turn(outcome: RunOutcome) -> list[str]:
    """The arm of each trial."""
    trials = sorted(outcome.run_dir.glob("trial-*/trial.json"))
    return [json.loads(path.read_text())["arms"][0]["name"] for path in trials]


def document(outcome: RunOutcome) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((outcome.run_dir / "frontier.json").read_text())
    return found


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> tuple[MadeUpTrials, RunOutcome]:
    """A search of a quarter of an hour."""
    return made_up(tmp_path_factory.mktemp("frontier"), budget_s=900.0)


@pytest.fixture
def copied(searched: tuple[MadeUpTrials, RunOutcome], tmp_path: Path) -> Path:
    """Its records, to be changed."""
    return shutil.copytree(searched[1].run_dir, tmp_path / "copied")


@pytest.fixture(scope="module")
def judged(searched: tuple[MadeUpTrials, RunOutcome]) -> dict[str, Any]:
    """Its summary."""
    return analyze(searched[1].run_dir)


def test_a_search_keeps_to_its_budget_and_uses_it_where_the_answer_is_open(
    searched: tuple[MadeUpTrials, RunOutcome], tmp_path: Path
) -> None:
    search, outcome = searched
    assert outcome.complete, outcome.error
    assert 600.0 < search.spent_s <= 900.0
    short = MadeUpTrials(experiment(), out=tmp_path, budget_s=600.0)
    short._began_s = 700.0  # 300 s were spent before the search
    ended = short.run()
    assert ended.complete, ended.error
    assert short.time_s - 700.0 <= 600.0


def test_a_start_that_takes_longer_than_is_left_is_given_up(tmp_path: Path) -> None:
    _, outcome = made_up(tmp_path, budget_s=200.0, slow_start=6.0)
    assert outcome.complete, outcome.error
    assert document(outcome)["stop"] == "the budget was spent"
    assert trial_facts(outcome.run_dir, 2)["ended"] == "the budget was spent"
    assert "No higher load is shown to be held by padded." in analyze(outcome.run_dir)["frontier"]["answer"]


def test_arms_take_turns_from_the_control_on_and_one_that_cannot_win_leaves(
    searched: tuple[MadeUpTrials, RunOutcome],
) -> None:
    found = document(searched[1])
    turns = arms_in_turn(searched[1])
    assert turns[:3] == ["eager", "padded", "dynamic"]
    assert turns.count("padded") == 1
    assert found["left"][0]["arm"] == "padded"
    assert "eager held" in found["left"][0]["reason"]
    run = Run.of(read_run(searched[1].run_dir))
    assert (run.in_turn, run.control) == (True, "eager")
    assert [[arm for arm in run.arms if trial.has(arm)] for trial in run.trials] == [[arm] for arm in turns]


def test_an_arm_that_does_not_start_is_left_out_and_the_search_goes_on(tmp_path: Path) -> None:
    _, outcome = made_up(tmp_path, broken={2: StartError("padded-0 ended with exit code 3")})
    assert outcome.complete, outcome.error
    (left,) = [row for row in document(outcome)["left"] if row["arm"] == "padded"]
    assert left["reason"] == "did not start: padded-0 ended with exit code 3"
    assert arms_in_turn(outcome).count("padded") == 1
    summary = analyze(outcome.run_dir)
    complete = " ".join(check["reason"] for check in summary["validity"] if check["check"] == "complete")
    assert "stopped" not in complete, "made-up trials have no load process, and all of them ended"
    assert any("than every other arm that stayed in the search" in line for line in summary["frontier"]["answer"])


def blocked(frontier: dict[str, Any]) -> list[str]:
    """What the answer says of loads that checks leave open."""
    return [line for line in frontier["answer"] if line.startswith("No load is known for")]


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ({1: StartError("eager-0 ended with exit code 3")}, "eager-0 ended with exit code 3"),
        ({3: RunError("Envoy ended with exit code 1")}, "Envoy ended with exit code 1"),
    ],
)
def test_a_control_that_does_not_start_or_a_broken_run_ends_the_search(
    broken: dict[int, Exception], reason: str, tmp_path: Path
) -> None:
    _, outcome = made_up(tmp_path, broken=broken)
    assert outcome.error == document(outcome)["stop"] == reason
    if 3 in broken:
        assert blocked(analyze(outcome.run_dir)["frontier"]) == []


def test_an_interrupted_search_keeps_its_answer(tmp_path: Path) -> None:
    _, outcome = made_up(tmp_path, interrupted_in=5, budget_s=900.0)
    assert outcome.interrupted
    assert "interrupted" in document(outcome)["stop"]
    summary = analyze(outcome.run_dir)
    assert blocked(summary["frontier"]) == []
    cut = [step for step in summary["frontier"]["steps"] if step["trial"] == 5]
    assert [step["held"] == "undecided" for step in cut] == [False, *[True] * (len(cut) - 1)]
    assert {row["arm"] for row in summary["frontier"]["arms"] if row["starts"] >= 2} == {"eager", "dynamic"}


def test_records_of_a_killed_search_give_the_same_answer(
    searched: tuple[MadeUpTrials, RunOutcome], judged: dict[str, Any], copied: Path
) -> None:
    """The last trial has no end, and frontier.json is as it was before it."""
    last = max(copied.glob("trial-*/trial.json"))
    write_document(last, {**json.loads(last.read_text()), "complete": False})
    write_document(copied / "frontier.json", {**document(searched[1]), "stop": ""})
    whole, cut = judged["frontier"], analyze(copied)["frontier"]
    assert blocked(cut) == []
    steps = [sum(row["steps"] for row in rows["arms"]) for rows in (whole, cut)]
    assert 0 <= steps[0] - steps[1] <= 1
    assert any("The search was cut off" in line for line in cut["answer"])


def test_a_search_without_an_answer_does_not_end_with_exit_code_0(judged: dict[str, Any], copied: Path) -> None:
    (copied / "trial-01" / "trial.json").write_text("{")
    summary = analyze(copied)
    assert summary["headline"].startswith("No load is known, because checks failed: complete.")
    assert (judged["exit_code"], summary["exit_code"]) == (0, 3)


def test_an_arm_that_was_never_started_does_not_block_the_others(tmp_path: Path) -> None:
    _, outcome = made_up(tmp_path, budget_s=130.0)
    assert arms_in_turn(outcome) == ["eager", "padded"]
    configure(outcome.run_dir, lambda _: {"model": {"dtype": "float32"}, "engine": {"slots": 8}})
    summary = analyze(outcome.run_dir)
    frontier = summary["frontier"]
    assert blocked(frontier) == []
    assert [row["steps"] for row in frontier["arms"]] == [3, 3, 0]
    assert any("dynamic was not tried" in line for line in frontier["answer"])
    assert ("comparable", "dynamic", False) in {(row["check"], row["arm"], row["ok"]) for row in summary["validity"]}
    gates = {arm: [gate for gate in summary["gates"] if gate["arm"] == arm] for arm in ("padded", "dynamic")}
    assert {row["arm"] for row in summary["validity"] if "has no request" in row["reason"]} == {"dynamic"}
    assert {gate["verdict"] for gate in gates["dynamic"]} == {"INCONCLUSIVE"}
    assert summary["overall"] == "INCONCLUSIVE"


def test_an_arm_that_differs_in_more_than_its_policy_blocks_itself_alone(judged: dict[str, Any], copied: Path) -> None:
    configure(copied, lambda arm: {"model": {"dtype": "float16" if arm == "padded" else "float32"}})
    frontier = analyze(copied)["frontier"]
    assert blocked(frontier) == ["No load is known for padded, because checks failed: comparable."]
    before = {row["arm"]: row["steps"] for row in judged["frontier"]["arms"]}
    assert {row["arm"]: row["steps"] for row in frontier["arms"]} == {**before, "padded": 0}


def test_the_answer_about_an_arm_of_other_weights_says_that_its_quality_is_open(copied: Path) -> None:
    weights = {"dynamic": "int8-weight-only"}
    configure(copied, lambda arm: {"model": {"dtype": "float32", "quantisation": weights.get(arm, "none")}})
    answer = " ".join(analyze(copied)["frontier"]["answer"])
    assert all(words in answer for words in ("Whether dynamic answers as well is open", "int8-weight-only"))
    assert "padded answers" not in answer


def test_a_budget_that_is_too_short_is_refused() -> None:
    message = refusal(ConfigError, searching.check_budget, experiment(), 120.0)
    assert all(word in message for word in ("--budget is 2m", "3 arms", "3 steps"))
    searching.check_budget(experiment(), 240.0)


@pytest.mark.parametrize("budget_s", [600.0, 240.0])
def test_parity_takes_its_time_from_the_budget(
    budget_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    search = MadeUpTrials(experiment(parity={"full": True}), out=tmp_path, budget_s=budget_s)

    def measure(self: Orchestrator, run_dir: Path) -> dict[str, Any]:
        for _ in range(300):
            self._check()
            search.time_s += 1.0
        return {"verdict": "PASS", "arms": []}

    monkeypatch.setattr(Orchestrator, "measure_parity", measure)
    outcome = search.run()
    assert search.spent_s <= budget_s
    if budget_s < 300.0:
        assert all(words in str(outcome.error) for words in ("--budget of 4m",))
        assert not list(outcome.run_dir.glob("trial-*"))
        return
    assert outcome.complete, outcome.error
    assert document(outcome)["spent_s"] == search.spent_s > 300.0


def test_the_starts_of_an_arm_are_spread_out() -> None:
    turns = [Turn(arm=arm, steps=3) for arm in "aabbc"]
    assert [item.arm for item in searching.in_rounds(turns)] == ["a", "b", "c", "a", "b"]
