"""Whole rollouts with the manifests of deploy/: what Argo Rollouts and Flagger make of the provider's answers."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from analysis.judging.alarms import Alarm
from analysis.settings.ramp_limits import RampLimits
from loadtests.provider.judgement import Evidence, Judgement, judge
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
ROLLBACK = f"{FLAGGER}/rollback"


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
        **{"verdict": "PASS", "reasons": ["it is surely at most 25 % slower than the control"], "candidate": "new"},
        **{"for": "step", "gate": None, "run": run.folder.name, "window": "90s", "requests": 40, "interim": 1},
    }


@pytest.mark.parametrize(
    ("query", "error"),
    [
        ("arm=old", 'arm "old" is no candidate'),
        ("arms=new", '"arms" is no parameter of /v1/judgement: give some of arm, gate, for, window, inconclusive'),
        ("arm=new&arm=new", '"arm" comes twice in the address: give it once'),
        ("&".join(f"a{number}=1" for number in range(40)), "the address has more than 16 parameters"),
        ("arm=%1b%5b31m%0d%0aSet-Cookie:x%e2%80%ae", 'arm "\\x1b[31m Set-Cookie:x\\u202e" is no candidate'),
        ("window=0s", 'window is "0s": give 1s to 60m'),
        ("window=2h", 'window is "2h"'),
        ("window=nan", 'window is "nan"'),
        ("window=", 'window is ""'),
        ("for=ever", 'for is "ever": give step or promotion'),
        ("inconclusive=pass", 'inconclusive is "pass": give wait or fail'),
        ("arm=" + "x" * 201, "arm has 201 characters; the limit is 200"),
        ("gate=" + "x" * 201, "gate has 201 characters"),
    ],
)
def test_what_cannot_be_asked_is_one_printable_line(run: Rollout, serve: Serve, query: str, error: str) -> None:
    status, body = asked(serve().port, "GET", f"{JUDGEMENT}?{query}")
    assert (status, body.count("\n")) == (400, 1)
    assert body[:-1].isprintable()
    assert body.startswith(error)


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status"),
    [
        *(("GET", path, None, {}, 404) for path in ("/", "/v1", "/v1/judgement/", FLAGGER, "/%2e%2e/status.json")),
        ("GET", "//etc/passwd", None, {}, 404),
        ("POST", JUDGEMENT, "{}", {}, 404),
        ("POST", f"{ROLLBACK}/x", "{}", {}, 404),
        ("DELETE", JUDGEMENT, None, {}, 501),
        ("POST", ROLLBACK, "x" * 65_537, {}, 413),
        ("POST", ROLLBACK, None, {"Content-Length": "9" * 4000}, 413),
        ("POST", ROLLBACK, None, {"Content-Length": "-1"}, 411),
        ("POST", ROLLBACK, "0\r\n\r\n", {"Transfer-Encoding": "chunked"}, 411),
        *(("POST", ROLLBACK, body, {}, 400) for body in ("", "{", "[]", "null", "[" * 60_000, '"\\ud800"', "\xff")),
        ("POST", ROLLBACK, '{"metadata": [1], "name": {"a": 1}}', {}, 409),
        # Without a token only names of this machine are answered.
        ("GET", JUDGEMENT, None, {"Host": "evil.example"}, 403),
        ("POST", ROLLBACK, '{"name": "served", "metadata": {}}', {"Host": "evil.example"}, 403),
    ],
)
def test_a_request_is_bounded_and_of_this_machine(
    serve: Serve, method: str, path: str, body: str | None, headers: dict[str, str], status: int
) -> None:
    assert asked(serve().port, method, path, body=body, headers=headers)[0] == status


def test_a_client_that_says_nothing_more_delays_nobody(serve: Serve) -> None:
    server = serve()
    with socket.create_connection(("127.0.0.1", server.port)) as silent:
        silent.sendall(b"POST /v1/flagger/rollback HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n")
        assert asked(server.port, "GET", "/healthz") == (200, "ok\n")


def test_flagger_sends_the_token_in_its_metadata_and_all_others_as_a_bearer(run: Rollout, serve: Serve) -> None:
    server = serve(token=TOKEN)
    run.died()
    assert hooked(server, "rollback")[0] == hooked(server, "rollback", token="wrong")[0] == 401
    assert hooked(server, "rollback", token=TOKEN) == (200, "FAIL: new-0 died\n")
    for path, status in ((JUDGEMENT, 401), ("/healthz", 200)):
        assert asked(server.port, "GET", path)[0] == status


HOOKS = ("confirm-rollout", "pre-rollout", "rollout", "confirm-traffic-increase", "confirm-promotion", "rollback")


@pytest.mark.parametrize(
    ("happens", "yes"),
    [
        (None, ("confirm-rollout", "pre-rollout", "rollout")),  # what is open neither promotes nor rolls back
        (lambda run: run.compiled(2.0), ("rollback",)),
        (Rollout.end, ("rollout",)),  # where nothing is watched any more, nothing begins nor rolls back
    ],
)
def test_each_hook_goes_on_where_that_is_safe(
    run: Rollout, serve: Serve, happens: Callable[[Rollout], None] | None, yes: tuple[str, ...]
) -> None:
    run.answer()
    run.look("PASS" if happens else None)
    if happens is not None:
        happens(run)
    server = serve()
    found = {hook: hooked(server, hook)[0] for hook in HOOKS}
    assert found == {hook: 200 if hook in yes else 409 for hook in HOOKS}


def test_before_there_is_a_run_nothing_is_known(tmp_path: Path, serve: Serve) -> None:
    (empty := tmp_path / "empty").mkdir()
    assert hooked(serve(folder=empty), "rollout") == (200, "INCONCLUSIVE: there is no run in empty yet\n")


def test_the_first_traffic_of_a_run_needs_no_evidence_and_the_second_does(run: Rollout, serve: Serve) -> None:
    server, newest = serve(folder=run.folder.parent), run
    for number in (2, 3):
        assert hooked(server, "confirm-traffic-increase")[0] == 200
        # No request of the candidate was seen: without evidence there is no second step.
        assert hooked(server, "confirm-traffic-increase")[0] == 409
        newest = Rollout(folder=run.folder.with_name(f"2026010{number}T120000Z-canary"))
    newest.died()
    assert hooked(server, "rollback")[0] == 200


@pytest.mark.parametrize(
    ("hook", "metadata", "status", "body"),
    [
        ("rollout", {"inconclusive": "fail"}, 409, "FAIL: still open"),
        ("rollback", {"inconclusive": "fail"}, 400, "inconclusive=fail at the hook rollback would"),
        *((hook, {}, 400, f'hook "{hook}" is none of Flagger: post to {FLAGGER}/<c') for hook in ("", "Rollback")),
        ("", {"hook": "rollout"}, 200, "INCONCLUSIVE"),
        *((hook, {"eventMessage": "New revision detected!"}, 200, "noted") for hook in ("event", "post-rollout")),
    ],
)
def test_what_a_hook_is_told(serve: Serve, hook: str, metadata: dict[str, str], status: int, body: str) -> None:
    found = hooked(serve(), hook, **metadata)
    assert (found[0], found[1][: len(body)]) == (status, body)


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


DEPLOY = Path(__file__).resolve().parents[3] / "deploy"


def going(run: Rollout, seconds: float = 30.0, *, decision: str | None = None, safe: bool = False) -> None:
    """Some time with traffic and a look at it."""
    run.at_s += seconds
    run.alive()
    run.answer()
    run.look(decision, safe=safe)


def test_argo_pauses_a_step_that_stays_open_and_does_not_promote_it(run: Rollout, serve: Serve) -> None:
    templates = yaml.safe_load_all((DEPLOY / "argo" / "analysis-templates.yaml").read_text())
    (template,) = (item for item in templates if item["metadata"]["name"] == "tailgate-wait")
    port = serve(token=TOKEN).port
    for older in (False, True):
        step = AnalysisRun(template, port, {"token": TOKEN})
        if older:  # before 1.8 the field is not known, and dropped
            del step.metric["consecutiveSuccessLimit"]
        while step.phase == "Running":
            going(run)
            step.measure()
        assert (step.phase, sum(step.counts.values())) == ("Inconclusive", 120)


def test_flagger_goes_up_as_evidence_allows_and_is_promoted_by_pass_alone(run: Rollout, serve: Serve) -> None:
    canary: dict[str, Any] = yaml.safe_load((DEPLOY / "flagger" / "canary.yaml").read_text())
    for hook in canary["spec"]["analysis"]["webhooks"]:
        hook["metadata"] |= {"token": TOKEN}
    flagger = Flagger(canary, serve(token=TOKEN).port)
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


def judged(run: Rollout, question: Question = PROMOTION, *, stale_s: float | None = None) -> Judgement:
    observed = Observed(run.folder, stale_s=stale_s, clock=run.now_ns)
    return judge(observed.evidence(question), question)


def test_a_step_takes_that_it_is_surely_not_much_slower_and_the_promotion_every_gate(run: Rollout) -> None:
    going(run)
    assert (judged(run, STEP).verdict, judged(run).verdict) == ("INCONCLUSIVE", "INCONCLUSIVE")
    going(run, safe=True)
    assert (judged(run, STEP).verdict, judged(run).verdict) == ("PASS", "INCONCLUSIVE")
    assert judged(run).reasons[-1] == "It is open."
    assert judged(run, Question(gate="errors")).verdict == "PASS"
    with pytest.raises(ConfigError, match="is not in the last look: give noninferiority p99_ttft, errors"):
        judged(run, Question(gate="speed"))
    going(run, decision="PASS")
    assert (judged(run, STEP).verdict, judged(run).verdict) == ("PASS", "PASS")


ERRORS = {"arm": "new", "gate": "errors", "verdict": "PASS", "reason": "None failed."}
LOOK: dict[str, Any] = {"arms": {"new": {"decision": "PASS"}}, "gates": [ERRORS], "step": {"safe": True}}
EVIDENCE = Evidence(run="run", arm="new", limits=RampLimits(), look=LOOK, requests=30, ever=99)
GATE = Question(gate="errors")
ALARMS = [Alarm(at_ns=1, why="first"), Alarm(at_ns=2, why="second")]


@pytest.mark.parametrize(
    ("question", "look", "changes", "verdict", "reason"),
    [
        (PROMOTION, {}, {}, "PASS", "every gate that may be looked at has passed"),
        (GATE, {}, {}, "PASS", "errors has passed"),
        (GATE, {"gates": [ERRORS | {"verdict": "INCONCLUSIVE"}]}, {}, "INCONCLUSIVE", "None failed."),
        (STEP, {"arms": {"new": {"decision": "FAIL", "reason": "late"}}}, {"unwatched": "it ended"}, "FAIL", "late"),
        (STEP, {"step": {"failed": "It is slower."}}, {"stale": "old"}, "FAIL", "It is slower."),
        (PROMOTION, {}, {"requests": 29}, "INCONCLUSIVE", "the candidate had 29 of 30 requests"),
        (PROMOTION, {}, {"stale": "old"}, "INCONCLUSIVE", "old"),
        (STEP, {"step": {"safe": True, "uneven": "uneven"}}, {}, "INCONCLUSIVE", "uneven"),
        (GATE, {"gates": []}, {}, "INCONCLUSIVE", 'the last look has no gate "errors"'),
        (GATE, {"gates": [ERRORS | {"arm": "other"}]}, {}, "INCONCLUSIVE", 'the last look has no gate "errors"'),
        (GATE, {"gates": [ERRORS | {"verdict": "FAIL", "reason": "9 %"}]}, {}, "FAIL", "9 %"),
        (replace(GATE, inconclusive="fail"), {}, {"stale": "old"}, "FAIL", "still open, and inconclusive=fail"),
        (STEP, {}, {"alarms": ALARMS}, "FAIL", "first"),
    ],
)
def test_a_judgement_of_evidence(
    question: Question, look: dict[str, Any], changes: dict[str, Any], verdict: str, reason: str
) -> None:
    found = judge(replace(EVIDENCE, look=LOOK | look, **changes), question)
    assert (found.verdict, found.reasons[0][: len(reason)]) == (verdict, reason)


def test_pass_takes_requests_in_the_window_and_a_fresh_look(run: Rollout) -> None:
    going(run, decision="PASS")
    run.at_s += 59
    run.alive()
    assert judged(run, Question(window_s=59.0)).verdict == "PASS"
    assert judged(run, Question(window_s=50.0)).reasons == ("the candidate had 0 of 30 requests",)
    assert judged(run, stale_s=58.0).reasons == ("the last look is 59 s old, and counts for 58 s",)
    run.at_s += 62
    run.alive()
    assert judged(run).reasons == ("the last look is 121 s old, and counts for 120 s",)


def test_a_run_that_is_silent_or_has_ended_is_no_pass_any_more(run: Rollout) -> None:
    going(run, decision="PASS")
    run.at_s += 16
    assert judged(run).reasons == (f"run {run.folder.name} has said nothing for 16 s",)
    summary = run.folder / "summary.json"
    for ends in (lambda: summary.write_text("{}"), run.end):
        run.alive()
        ends()
        assert judged(run).reasons == (f"run {run.folder.name} has ended: nobody watches any more",)
        summary.unlink(missing_ok=True)
    (run.folder / "status.json").unlink()
    assert "nothing shows that it goes on" in judged(run).reasons[0]


def test_an_alarm_is_a_failure_without_a_look(tmp_path: Path) -> None:
    run = Rollout(folder=tmp_path / "run", settings="[gates]\nmax_recompiles = 1\n")
    observed = Observed(run.folder, clock=run.now_ns)
    assert judge(observed.evidence(STEP), STEP).verdict == "INCONCLUSIVE"
    run.compiled(9.0, phase="warmup")
    for _ in range(2):  # telemetry that resumed repeats the event
        run.at_s = 1.0
        run.compiled(0.1)
    assert judge(observed.evidence(STEP), STEP).verdict == "INCONCLUSIVE"
    run.at_s += 1
    run.compiled(1.5)
    assert str(judge(observed.evidence(STEP), STEP)) == "FAIL: new compiled for 1.5 s while serving for prefill 1×81"


def test_a_compile_under_way_is_a_failure_once_it_reaches_the_limit_and_counts_once(run: Rollout) -> None:
    observed = Observed(run.folder, clock=run.now_ns)
    going(run, decision="PASS")
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


def test_a_burst_of_errors_is_a_failure_as_long_as_it_is_in_the_window(run: Rollout) -> None:
    going(run, decision="PASS")
    run.answer(40, status="CANCELLED")  # by their client: they have not failed
    assert judged(run).verdict == "PASS"
    run.answer(24, status="UNAVAILABLE")
    assert judged(run).reasons == ("24 of 64 requests to new failed in the last 300 s",)
    run.at_s += 61
    run.alive()
    run.answer()
    assert judged(run, Question(window_s=60.0)).verdict == "PASS"
    assert judged(run).verdict == "FAIL"
    run.weighed("advance")  # the errors were those of the step before
    assert judged(run).verdict == "PASS"


def test_a_death_and_what_the_run_itself_took_back_are_failures_at_once(run: Rollout) -> None:
    going(run, decision="PASS")
    run.died()
    run.weighed("rollback", "new-0 died")
    assert judged(run) == Judgement(verdict="FAIL", reasons=("new-0 died", "the run has rolled it back: new-0 died"))


@pytest.mark.parametrize(
    ("settings", "arm", "expected"),
    [
        ('[ramp]\ncandidate = "new"\n', "", "new"),
        ("", "third", "third"),
        ("", "", "has 2 candidates: give arm=new, third"),
        ("", "old", 'arm "old" is no candidate of run: give new, third'),
    ],
)
def test_the_candidate_is_that_asked_for_or_of_the_ramp(tmp_path: Path, settings: str, arm: str, expected: str) -> None:
    run = Rollout(folder=tmp_path / "run", others=("third",), settings=settings)
    try:
        found = Observed(run.folder, clock=run.now_ns).evidence(Question(arm=arm)).arm
    except ConfigError as error:
        found = str(error)
    assert found.endswith(expected)
