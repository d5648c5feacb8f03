"""Whole rollouts with the manifests of deploy/: what Argo Rollouts and Flagger make of the provider's answers."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from loadtests.provider.judgement import Judgement, judge
from loadtests.provider.observed import Observed
from loadtests.provider.question import Question
from loadtests.provider.server import ProviderServer
from servers.fields import ConfigError
from tests.fakes.kubernetes import AnalysisRun, Flagger, asked
from tests.fakes.live_runs import Rollout

Serve = Callable[..., ProviderServer]


@pytest.fixture
def run(tmp_path: Path) -> Rollout:
    return Rollout(folder=tmp_path / "20260101T120000Z-canary")


@pytest.fixture
def serve(run: Rollout) -> Iterator[Serve]:
    """Answers for `run`, by the run's own clock, until the test ends."""
    with ExitStack() as stack:

        def start(*, token: str = "", folder: Path = run.folder, notes: list[str] | None = None) -> ProviderServer:
            observed = Observed(folder, clock=run.now_ns)
            said = notes if notes is not None else []
            server = stack.enter_context(ProviderServer(observed, "127.0.0.1", 0, token=token, note=said.append))
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
            thread.start()
            stack.callback(server.shutdown)
            return server

        yield start


TOKEN = "0123456789abcdef"
JUDGEMENT, FLAGGER = "/v1/judgement", "/v1/flagger"


def hooked(server: ProviderServer, hook: str, /, **metadata: str) -> tuple[int, str]:
    body = {"name": "served", "namespace": "default", "phase": "Progressing", "checksum": "1", "metadata": metadata}
    return asked(server.port, "POST", f"{FLAGGER}/{hook}" if hook else FLAGGER, body=json.dumps(body))


def test_a_judgement_is_json_with_reasons(run: Rollout, serve: Serve) -> None:
    run.answer()
    run.look(safe=True)
    status, body = asked(serve().port, "GET", f"{JUDGEMENT}?arm=new&for=step&window=90s")
    document = json.loads(body)
    assert (status, document.pop("at")[:4].isdigit()) == (200, True)
    assert document == {
        "verdict": "PASS",
        "reasons": ["it is surely at most 25 % slower than the control"],
        "candidate": "new",
        "for": "step",
        "gate": None,
        "run": run.folder.name,
        "window": "90s",
        "requests": 40,
        "look": 1,
    }


@pytest.mark.parametrize(
    ("query", "error"),
    [
        ("?arm=old", 'arm "old" is no candidate'),
        ("?arms=new", '"arms" is no parameter of /v1/judgement: give some of arm, gate, for, window, inconclusive'),
        ("?arm=new&arm=new", '"arm" comes twice in the address: give it once'),
        ("?window=soon", 'window is "soon": give 1s to 60m, such as 5m'),
        ("?" + "&".join(f"a{number}=1" for number in range(40)), "the address has more than 16 parameters"),
        ("?arm=%1b%5b31m%0d%0aSet-Cookie:x%e2%80%ae", 'arm "\\x1b[31m Set-Cookie:x\\u202e" is no candidate'),
        ("?arm=" + "x" * 5000, "arm has 5000 characters; the limit is 200"),
    ],
)
def test_what_cannot_be_asked_is_one_printable_line(run: Rollout, serve: Serve, query: str, error: str) -> None:
    status, body = asked(serve().port, "GET", JUDGEMENT + query)
    assert (status, body.count("\n")) == (400, 1)
    assert body[:-1].isprintable()
    assert body.startswith(error)


def test_other_places_and_methods_are_not_there(serve: Serve) -> None:
    port = serve().port
    for path in ("/", "/v1", "/v1/judgement/", "/v1/flagger", "/%2e%2e/status.json", "//etc/passwd"):
        assert asked(port, "GET", path)[0] == 404
    assert asked(port, "POST", JUDGEMENT, body="{}")[0] == 404
    assert asked(port, "POST", f"{FLAGGER}/rollout/x", body="{}")[0] == 404
    assert asked(port, "DELETE", JUDGEMENT)[0] == 501


def test_a_body_is_bounded_and_a_json_object(serve: Serve) -> None:
    port = serve().port
    place = f"{FLAGGER}/rollback"
    assert asked(port, "POST", place, body="x" * 65_537)[0] == 413
    assert asked(port, "POST", place, headers={"Content-Length": "9" * 4000})[0] == 413
    assert asked(port, "POST", place, headers={"Content-Length": "-1"})[0] == 411
    assert asked(port, "POST", place, headers={"Transfer-Encoding": "chunked"}, body="0\r\n\r\n")[0] == 411
    for body in ("", "{", "[]", "null", "[" * 60_000, '"\\ud800"', "\xff"):
        assert asked(port, "POST", place, body=body)[0] == 400
    assert asked(port, "POST", place, body='{"metadata": [1], "name": {"a": 1}}')[0] == 409


def test_a_client_that_says_nothing_more_delays_nobody(serve: Serve) -> None:
    server = serve()
    with socket.create_connection(("127.0.0.1", server.port)) as silent:
        silent.sendall(b"POST /v1/flagger/rollback HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n")
        assert asked(server.port, "GET", "/healthz") == (200, "ok\n")


def test_flagger_sends_the_token_in_its_metadata(run: Rollout, serve: Serve) -> None:
    server = serve(token=TOKEN)
    run.died()
    assert hooked(server, "rollback")[0] == hooked(server, "rollback", token="wrong")[0] == 401
    assert hooked(server, "rollback", token=TOKEN) == (200, "FAIL: new-0 died\n")


def test_without_a_token_only_names_of_this_machine_are_answered(serve: Serve) -> None:
    port = serve().port
    assert asked(port, "GET", JUDGEMENT, headers={"Host": "evil.example"})[0] == 403
    body = json.dumps({"name": "served", "metadata": {}})
    assert asked(port, "POST", f"{FLAGGER}/rollback", body=body, headers={"Host": "evil.example"})[0] == 403


HOOKS = ("confirm-rollout", "pre-rollout", "rollout", "confirm-traffic-increase", "confirm-promotion", "rollback")


def answers(server: ProviderServer, **metadata: str) -> dict[str, bool]:
    """Which hooks go on."""
    found = {hook: hooked(server, hook, **metadata)[0] for hook in HOOKS}
    assert set(found.values()) <= {200, 409}
    return {hook: status == 200 for hook, status in found.items()}


def test_what_is_open_neither_promotes_nor_rolls_back(run: Rollout, serve: Serve) -> None:
    run.answer()
    run.look()
    assert answers(serve()) == {
        "confirm-rollout": True,
        "pre-rollout": True,
        "rollout": True,
        "confirm-traffic-increase": False,
        "confirm-promotion": False,
        "rollback": False,
    }


def test_a_failure_closes_every_gate_and_rolls_back(run: Rollout, serve: Serve) -> None:
    server = serve()
    run.answer()
    run.look("PASS")
    run.compiled(2.0)
    assert answers(server) == {**dict.fromkeys(HOOKS, False), "rollback": True}
    assert hooked(server, "rollout") == (409, "FAIL: new compiled for 2.0 s while serving for prefill 1×81\n")


def test_where_nobody_watches_nothing_begins_nor_rolls_back(run: Rollout, serve: Serve) -> None:
    run.answer()
    run.look("PASS")
    run.end()
    assert answers(serve()) == {**dict.fromkeys(HOOKS, False), "rollout": True}


def test_the_first_traffic_needs_no_evidence_and_the_second_does(run: Rollout, serve: Serve) -> None:
    server = serve()
    assert hooked(server, "confirm-traffic-increase")[0] == 200
    # No request of the candidate was seen: without evidence there is no second step.
    assert hooked(server, "confirm-traffic-increase")[0] == 409


def test_what_is_open_can_count_towards_the_rollback_and_never_is_one(run: Rollout, serve: Serve) -> None:
    server = serve()
    assert hooked(server, "rollout", inconclusive="fail")[0] == 409
    status, body = hooked(server, "rollback", inconclusive="fail")
    assert (status, body.partition(" would")[0]) == (400, "inconclusive=fail at the hook rollback")


def test_the_type_of_a_hook_must_be_known(serve: Serve) -> None:
    server = serve()
    for hook in ("", "Rollback", "manual-traffic-control"):
        status, body = hooked(server, hook)
        assert (status, body.startswith(f'hook "{hook}" is none of Flagger: post to {FLAGGER}/<confirm')) == (400, True)
    assert hooked(server, "", hook="rollout")[0] == 200


def test_what_flagger_only_tells_is_noted(serve: Serve) -> None:
    server = serve()
    for hook in ("event", "post-rollout"):
        assert hooked(server, hook, eventMessage="New revision detected!") == (200, "noted\n")


def test_answers_are_noted_when_they_change_and_hold_no_secret(run: Rollout, serve: Serve) -> None:
    notes: list[str] = []
    server = serve(token=TOKEN, notes=notes)
    for _ in range(2):
        hooked(server, "rollback", token=TOKEN)
    run.died()
    hooked(server, "rollback", token=TOKEN)
    assert [note.partition(":")[0] for note in notes] == ["rollback new default served"] * 2
    assert "FAIL: new-0 died" in notes[1]
    assert TOKEN not in "".join(notes)


def test_a_question_is_read_from_its_parameters() -> None:
    given = {"arm": "new", "gate": "errors", "for": "step", "window": "90s", "inconclusive": "fail", "token": "x"}
    assert Question.of(given) == Question(arm="new", gate="errors", goal="step", window_s=90.0, inconclusive="fail")
    assert Question.of({}, goal="step") == Question(goal="step")


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"window": "0s"}, 'window is "0s": give 1s to 60m'),
        ({"window": "2h"}, 'window is "2h"'),
        ({"window": "nan"}, 'window is "nan"'),
        ({"window": ""}, 'window is ""'),
        ({"for": "ever"}, 'for is "ever": give step or promotion'),
        ({"inconclusive": "pass"}, 'inconclusive is "pass": give wait or fail'),
        ({"arm": "x" * 201}, "arm has 201 characters; the limit is 200"),
        ({"gate": "x" * 201}, "gate has 201 characters"),
    ],
)
def test_what_is_no_question_is_one_line(given: dict[str, str], error: str) -> None:
    with pytest.raises(ConfigError, match=error.replace("(", r"\(")) as found:
        Question.of(given)
    assert "\n" not in str(found.value)


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


def going_run(run: Rollout, *, decision: str | None = None, safe: bool = False) -> None:
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
    going_run(run)
    assert (verdict(run, STEP), verdict(run)) == ("INCONCLUSIVE", "INCONCLUSIVE")
    going_run(run, safe=True)
    assert (verdict(run, STEP), verdict(run)) == ("PASS", "INCONCLUSIVE")
    assert judged(run).reasons[-1] == "It is open."
    going_run(run, decision="PASS")
    assert (verdict(run, STEP), verdict(run)) == ("PASS", "PASS")


def test_a_gate_is_asked_alone(run: Rollout) -> None:
    going_run(run)
    assert verdict(run, Question(gate="errors")) == "PASS"
    assert verdict(run, Question(gate="noninferiority p99_ttft")) == "INCONCLUSIVE"
    with pytest.raises(ConfigError, match="is not in the last look: give noninferiority p99_ttft, errors"):
        judged(run, Question(gate="speed"))


def test_pass_takes_requests_in_the_window(run: Rollout) -> None:
    going_run(run, decision="PASS")
    run.at_s += 59
    run.alive()
    assert verdict(run) == "PASS"
    assert judged(run, Question(window_s=50.0)).reasons == ("the candidate had 0 of 30 requests",)


def test_a_run_that_is_silent_or_has_ended_is_no_pass_any_more(run: Rollout) -> None:
    going_run(run, decision="PASS")
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


def test_a_compile_under_way_is_a_failure_once_it_reaches_the_limit_and_counts_once(run: Rollout) -> None:
    observed = Observed(run.folder, clock=run.now_ns)
    going_run(run, decision="PASS")
    run.compiling(0.9)
    assert judge(observed.evidence(STEP), STEP).verdict == "PASS"
    for seconds in (1.5, 0.0):  # what was under way for too long stays an alarm until its event is written
        run.compiling(seconds)
        assert judge(observed.evidence(STEP), STEP) == Judgement(
            verdict="FAIL", reasons=("new has been compiling for 1.5 s while serving for prefill 1×81",)
        )
    run.at_s += 1
    run.compiled(2.5)
    assert [alarm.why for alarm in observed.evidence(STEP).alarms] == [
        "new compiled for 2.5 s while serving for prefill 1×81"
    ]


def test_a_death_is_a_failure_at_once(run: Rollout) -> None:
    going_run(run, decision="PASS")
    run.died()
    assert judged(run) == Judgement(verdict="FAIL", reasons=("new-0 died",))


def test_a_burst_of_errors_is_a_failure_as_long_as_it_is_in_the_window(run: Rollout) -> None:
    going_run(run, decision="PASS")
    run.answer(12, status="UNAVAILABLE")
    assert judged(run).reasons == ("12 of 52 requests to new failed in the last 300 s",)
    run.at_s += 61
    run.alive()
    run.answer()
    assert verdict(run, Question(window_s=60.0)) == "PASS"


def test_requests_that_their_client_cancelled_have_not_failed(run: Rollout) -> None:
    going_run(run, decision="PASS")
    run.answer(40, status="CANCELLED")
    assert verdict(run) == "PASS"


def test_what_the_run_itself_took_back_has_failed(run: Rollout) -> None:
    run.rolled_back("new-0 died")
    assert judged(run).reasons == ("the run has rolled it back: new-0 died",)
