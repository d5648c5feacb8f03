"""Whole rollouts with the manifests of deploy/: what Argo Rollouts and Flagger make of the provider's answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from loadtests.provider.judgement import Judgement, judge
from loadtests.provider.observed import Observed
from loadtests.provider.question import Question
from loadtests.provider.server import ProviderServer
from servers.fields import ConfigError
from tests.fakes.kubernetes import AnalysisRun, Flagger
from tests.fakes.live_runs import Rollout
from tests.loadtests.provider.conftest import Serve

TOKEN = "0123456789abcdef"
DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
TEMPLATES = {
    item["metadata"]["name"]: item
    for item in yaml.safe_load_all((DEPLOY / "argo" / "analysis-templates.yaml").read_text())
}


@pytest.fixture
def server(serve: Serve) -> ProviderServer:
    return serve(token=TOKEN)


def analysis(server: ProviderServer, name: str, **args: str) -> AnalysisRun:
    return AnalysisRun(TEMPLATES[name], server.port, {"token": TOKEN, **args})


def canary(server: ProviderServer) -> Flagger:
    document: dict[str, Any] = yaml.safe_load((DEPLOY / "flagger" / "canary.yaml").read_text())
    for hook in document["spec"]["analysis"]["webhooks"]:
        hook["metadata"] = {**hook["metadata"], "token": TOKEN}
    return Flagger(document, server.port)


def going(run: Rollout, seconds: float = 30.0, *, decision: str | None = None, safe: bool = False) -> None:
    run.at_s += seconds
    run.alive()
    run.answer()
    run.look(decision, safe=safe)


def test_argo_pauses_a_step_that_stays_open_and_does_not_promote_it(run: Rollout, server: ProviderServer) -> None:
    for older in (False, True):
        step = analysis(server, "tailgate-wait")
        if older:  # before 1.8 the field is not known, and dropped
            del step.metric["consecutiveSuccessLimit"]
        while step.phase == "Running":
            going(run)
            step.measure()
        assert (step.phase, sum(step.counts.values())) == ("Inconclusive", 120)


def test_flagger_goes_up_as_evidence_allows_and_is_promoted_by_pass_alone(run: Rollout, server: ProviderServer) -> None:
    flagger = canary(server)
    assert (flagger.tick(), flagger.tick(), flagger.weight) == ("Progressing", "Progressing", 1)
    for weight in (1, 5, 25):
        for _ in range(5):
            going(run)
            flagger.tick()
            assert (flagger.phase, flagger.weight) == ("Progressing", weight)
        going(run, safe=True)
        flagger.tick()
        assert flagger.weight > weight
    for _ in range(20):
        going(run, safe=True)
        assert flagger.tick() == "WaitingPromotion"
    going(run, decision="PASS")
    assert (flagger.tick(), flagger.weight, flagger.failed_checks) == ("Promoting", 50, 0)


STEP = Question(goal="step")
PROMOTION = Question()


def judged(run: Rollout, question: Question = PROMOTION) -> Judgement:
    observed = Observed(run.folder, clock=run.now_ns)
    return judge(observed.evidence(question), question)


def verdict(run: Rollout, question: Question = PROMOTION) -> str:
    return judged(run, question).verdict


def going_of_observed(run: Rollout, *, decision: str | None = None, safe: bool = False) -> None:
    """A minute of traffic and a look at it."""
    run.at_s += 60
    run.alive()
    run.answer()
    run.look(decision, safe=safe)


def test_before_there_is_a_run_nothing_is_known(tmp_path: Path) -> None:
    observed = Observed(tmp_path, clock=lambda: 0)
    assert judge(observed.evidence(STEP), STEP) == Judgement(
        verdict="INCONCLUSIVE", reasons=(f"there is no run in {tmp_path.name} yet",)
    )


def test_a_step_takes_that_it_is_surely_not_much_slower_and_the_promotion_every_gate(run: Rollout) -> None:
    going_of_observed(run)
    assert (verdict(run, STEP), verdict(run)) == ("INCONCLUSIVE", "INCONCLUSIVE")
    going_of_observed(run, safe=True)
    assert (verdict(run, STEP), verdict(run)) == ("PASS", "INCONCLUSIVE")
    assert judged(run).reasons[-1] == "It is open."
    going_of_observed(run, decision="PASS")
    assert (verdict(run, STEP), verdict(run)) == ("PASS", "PASS")


def test_a_gate_is_asked_alone(run: Rollout) -> None:
    going_of_observed(run)
    assert verdict(run, Question(gate="errors")) == "PASS"
    assert verdict(run, Question(gate="noninferiority p99_ttft")) == "INCONCLUSIVE"
    with pytest.raises(ConfigError, match="is not in the last look: give noninferiority p99_ttft, errors"):
        judged(run, Question(gate="speed"))


def test_pass_takes_requests_in_the_window(run: Rollout) -> None:
    going_of_observed(run, decision="PASS")
    run.at_s += 59
    run.alive()
    assert verdict(run) == "PASS"
    assert judged(run, Question(window_s=50.0)).reasons == ("the candidate had 0 of 30 requests",)


def test_a_run_that_is_silent_or_has_ended_is_no_pass_any_more(run: Rollout) -> None:
    going_of_observed(run, decision="PASS")
    run.at_s += 16
    assert judged(run).reasons == (f"run {run.folder.name} has said nothing for 16 s",)
    run.end()
    assert judged(run).reasons == (f"run {run.folder.name} has ended: nobody watches any more",)
    (run.folder / "status.json").unlink()
    assert "nothing shows that it goes on" in judged(run).reasons[0]


def test_a_failure_stays_one_when_nobody_looks_any_more(run: Rollout) -> None:
    run.look("FAIL", reason="Its p99 is 1.5 times the control's.")
    run.end()
    run.at_s += 10_000
    assert judged(run, STEP) == Judgement(verdict="FAIL", reasons=("Its p99 is 1.5 times the control's.",))


def test_harm_within_a_step_is_a_failure(run: Rollout) -> None:
    run.look(failed="It is surely 25 % slower.")
    assert judged(run, STEP) == Judgement(verdict="FAIL", reasons=("It is surely 25 % slower.",))


def test_an_alarm_is_a_failure_without_a_look(run: Rollout) -> None:
    observed = Observed(run.folder, clock=run.now_ns)
    assert judge(observed.evidence(STEP), STEP).verdict == "INCONCLUSIVE"
    run.compiled(9.0, phase="warmup")
    assert judge(observed.evidence(STEP), STEP).verdict == "INCONCLUSIVE"
    run.compiled(1.5)
    assert judge(observed.evidence(STEP), STEP) == Judgement(
        verdict="FAIL", reasons=("new compiled for 1.5 s while serving for prefill 1×81",)
    )


def test_a_death_is_a_failure_at_once(run: Rollout) -> None:
    going_of_observed(run, decision="PASS")
    run.died()
    assert judged(run) == Judgement(verdict="FAIL", reasons=("new-0 died",))


def test_a_burst_of_errors_is_a_failure_as_long_as_it_is_in_the_window(run: Rollout) -> None:
    going_of_observed(run, decision="PASS")
    run.answer(12, status="UNAVAILABLE")
    assert judged(run).reasons == ("12 of 52 requests to new failed in the last 300 s",)
    run.at_s += 61
    run.alive()
    run.answer()
    assert verdict(run, Question(window_s=60.0)) == "PASS"


def test_requests_that_their_client_cancelled_have_not_failed(run: Rollout) -> None:
    going_of_observed(run, decision="PASS")
    run.answer(40, status="CANCELLED")
    assert verdict(run) == "PASS"


def test_what_the_run_itself_took_back_has_failed(run: Rollout) -> None:
    run.rolled_back("new-0 died")
    assert judged(run).reasons == ("the run has rolled it back: new-0 died",)
