"""Whole rollouts with the manifests of deploy/: what Argo Rollouts and Flagger make of the provider's answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from loadtests.provider.server import ProviderServer
from tests.fakes.controllers import AnalysisRun, Flagger
from tests.fakes.rollout import Rollout
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


# --- Argo Rollouts ----------------------------------------------------------------------------------------------------


def test_argo_waits_at_a_step_for_the_first_pass(run: Rollout, server: ProviderServer) -> None:
    step = analysis(server, "tailgate-wait")
    for _ in range(20):
        going(run)
        assert step.measure() == "Running"
    going(run, safe=True)
    assert step.measure() == "Successful"
    assert analysis(server, "tailgate-wait", **{"for": "promotion"}).measure() == "Running"


def test_argo_pauses_a_step_that_stays_open_and_does_not_promote_it(run: Rollout, server: ProviderServer) -> None:
    for older in (False, True):
        step = analysis(server, "tailgate-wait")
        if older:  # before 1.8 the field is not known, and dropped
            del step.metric["consecutiveSuccessLimit"]
        while step.phase == "Running":
            going(run)
            step.measure()
        assert (step.phase, sum(step.counts.values())) == ("Inconclusive", 120)


def test_argo_aborts_a_step_at_once_where_something_happened(run: Rollout, server: ProviderServer) -> None:
    step = analysis(server, "tailgate-wait")
    going(run)
    assert step.measure() == "Running"
    run.compiled(3.0)
    assert step.measure() == "Failed"


def test_a_background_analysis_stops_harm_and_never_holds_what_is_open(run: Rollout, server: ProviderServer) -> None:
    open_, harmed = analysis(server, "tailgate-harm"), analysis(server, "tailgate-harm")
    for _ in range(50):
        assert open_.measure() == "Running"
    # At the end of the rollout it is Successful although nothing ever passed: the steps have to hold.
    assert open_.terminate() == "Successful"
    assert harmed.measure() == "Running"
    run.died()
    assert harmed.measure() == "Failed"


def test_argo_forgives_a_provider_that_is_gone_for_less_than_a_minute(run: Rollout, server: ProviderServer) -> None:
    harm = analysis(server, "tailgate-harm")
    token, harm.metric["provider"]["web"]["headers"] = harm.metric["provider"]["web"]["headers"], []
    assert [harm.measure() for _ in range(12)] == ["Running"] * 12  # not allowed: an Error each
    harm.metric["provider"]["web"]["headers"] = token
    assert harm.measure() == "Running"
    assert harm.errors_in_a_row == 0


# --- Flagger ----------------------------------------------------------------------------------------------------------


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


def test_flagger_waits_for_ever_where_nothing_is_sure(run: Rollout, server: ProviderServer) -> None:
    flagger = canary(server)
    flagger.tick()
    for _ in range(100):
        flagger.tick()
        going(run, 10.0)
    assert (flagger.phase, flagger.weight, flagger.failed_checks) == ("Progressing", 1, 0)
    assert "it is not sure that the candidate is at most 25 % slower" in flagger.events[-1]


@pytest.mark.parametrize("waits", ["for more traffic", "for promotion"])
def test_flagger_rolls_back_at_the_next_tick_also_while_it_waits(
    run: Rollout, server: ProviderServer, waits: str
) -> None:
    flagger = canary(server)
    flagger.tick()
    for _ in range(6):
        flagger.tick()
        going(run, safe=waits == "for promotion")
    assert flagger.phase == ("WaitingPromotion" if waits == "for promotion" else "Progressing")
    run.compiled(2.0)
    assert (flagger.tick(), flagger.weight) == ("Failed", 0)


def test_flagger_begins_nothing_that_nobody_watches_and_keeps_what_lost_its_watcher(
    run: Rollout, server: ProviderServer
) -> None:
    run.at_s += 60  # silent for a minute
    flagger = canary(server)
    assert (flagger.tick(), flagger.tick()) == ("Waiting", "Waiting")
    run.alive()
    assert (flagger.tick(), flagger.tick(), flagger.weight) == ("Progressing", "Progressing", 1)
    run.at_s += 600
    for _ in range(20):
        flagger.tick()
    assert (flagger.phase, flagger.weight, flagger.failed_checks) == ("Progressing", 1, 0)


def test_flagger_survives_a_provider_that_is_gone_for_less_than_a_minute(run: Rollout, server: ProviderServer) -> None:
    flagger = canary(server)
    flagger.tick()
    flagger.tick()
    port, flagger.port = flagger.port, 9
    for _ in range(5):
        flagger.tick()
    flagger.port = port
    assert (flagger.tick(), flagger.weight, flagger.failed_checks) == ("Progressing", 1, 5)
