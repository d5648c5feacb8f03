"""What a run answers Argo Rollouts and Flagger, and whole rollouts with the manifests of deploy/."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tailgate.analysis.judging.alarms import ServedCompile
from tailgate.analysis.settings.gate_limits import GateLimits
from tailgate.analysis.settings.ramp_limits import RampLimits
from tailgate.loadtests.experiments.model import Experiment
from tailgate.loadtests.provider import TOKEN_VARIABLE
from tailgate.loadtests.provider import server as serving
from tailgate.loadtests.provider.answers import GOALS, HOOKS, Answer, Goal, answer
from tailgate.loadtests.provider.server import FLAGGER, JUDGEMENT, ProviderServer
from tailgate.loadtests.trials import ramp, users_ramp, weights
from tailgate.loadtests.trials.status import ArmLoad
from tailgate.loadtests.trials.steering import Judge
from tailgate.loadtests.trials.users_ramp import PassiveRamp
from tailgate.servers.complaint import ConfigError
from tests.fakes.kubernetes import asked
from tests.fakes.processes import refusal
from tests.loadtests.trials.test_ramp import FakeSplitter, steered

START_NS = 10**18
TOKEN = "0123456789abcdef"
ROLLBACK = f"{FLAGGER}/rollback"
STEP, PROMOTION = GOALS
ESCAPES = "for=%1b%5b31m%0d%0aSet-Cookie:x%e2%80%ae"


class Watched:
    """A run whose weights others move, by a clock of its own: `server` answers from it."""

    def __init__(self, folder: Path, server: ProviderServer, patch: pytest.MonkeyPatch, *, notes: list[str]) -> None:
        self.clock_ns, self.server, self.notes = START_NS, server, notes
        for module in (ramp, users_ramp, weights, serving):
            patch.setattr(module, "now_ns", lambda: self.clock_ns)
        self.interim: dict[str, Any] | None = None
        self.splitter = FakeSplitter({"old": 50, "new": 50})
        self.trial = steered(self.splitter)
        self.collector = self.trial.collector
        experiment = SimpleNamespace(
            ramp=RampLimits(candidate="new"),
            gates=GateLimits(max_recompiles=1),
            control=SimpleNamespace(name="old"),
        )
        self.passive_ramp = PassiveRamp(
            folder,
            cast(Experiment, experiment),
            judge=cast(Judge, SimpleNamespace(last=lambda: self.interim)),
            provider=server,
        )
        self.finished = self.failed = self.analyses = 0

    def poll(self, seconds: float = 1.0) -> None:
        self.clock_ns += int(seconds * 1e9)
        self.passive_ramp.poll(self.trial)

    def go(self, **seen: Any) -> None:
        """Some time with traffic, and an interim analysis at its end."""
        self.ends(40)
        self.poll(30.0)
        self.analyses += 1
        self.interim = {"number": self.analyses, "at_ns": self.clock_ns, "step": {"requests": 40, **seen}}
        self.poll(0.1)

    def ends(self, finished: int, *, failed: int = 0) -> None:
        """So many requests of the candidate end."""
        self.finished, self.failed = self.finished + finished, self.failed + failed
        self.trial.context.status.load.arms["new"] = ArmLoad(finished=self.finished, failed=self.failed)

    def dies(self) -> None:
        self.trial.context.facts.deaths.append({"arm": "new", "replica": "new-0", "at_ns": self.clock_ns})
        self.poll()

    def answer(self, goal: Goal = PROMOTION) -> Answer:
        return answer(self.server.evidence, goal, now_ns=self.clock_ns)


@pytest.fixture
def run(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    notes: list[str] = []
    monkeypatch.setenv(TOKEN_VARIABLE, getattr(request, "param", ""))
    server = ProviderServer("127.0.0.1:0", note=notes.append)
    server.open()
    run = Watched(tmp_path, server, monkeypatch, notes=notes)
    if not hasattr(request, "param"):
        run.poll()
    yield run
    server.close()


def hooked(run: Watched, hook: str, **metadata: str) -> tuple[int, str]:
    body = {"name": "served", "namespace": "default", "phase": "Progressing", "checksum": "1", "metadata": metadata}
    return asked(run.server.port, "POST", f"{FLAGGER}/{hook}", body=json.dumps(body))


def test_a_judgement_is_json_with_reasons(run: Watched, tmp_path: Path) -> None:
    run.go(safe=True)
    status, body = asked(run.server.port, "GET", f"{JUDGEMENT}?for=step")
    document = json.loads(body)
    assert (status, document.pop("at")[:4].isdigit()) == (200, True)
    assert document == {
        **{"verdict": "PASS", "reasons": ["it is surely at most 25 % slower than the control"], "candidate": "new"},
        **{"for": "step", "run": tmp_path.name, "requests": 40, "interim": 1},
    }


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status"),
    [
        *(("GET", path, None, {}, 404) for path in ("/", "/v1/judgement/", FLAGGER, "/%2e%2e/status.json")),
        ("GET", "//etc/passwd", None, {}, 404),
        *(("GET", f"{JUDGEMENT}?{query}", None, {}, 400) for query in ("arms=new", "for=step&for=step", ESCAPES)),
        *(("POST", path, "{}", {}, 404) for path in (JUDGEMENT, f"{ROLLBACK}/x", FLAGGER, f"{FLAGGER}/Rollback")),
        ("POST", ROLLBACK, "x" * 65_537, {}, 400),
        ("POST", ROLLBACK, None, {"Content-Length": "9" * 5000}, 400),
        ("POST", ROLLBACK, None, {"Content-Length": "-1"}, 400),
        ("POST", ROLLBACK, "0\r\n\r\n", {"Transfer-Encoding": "chunked"}, 400),
        *(("POST", ROLLBACK, body, {}, 400) for body in ("", "{", "[]", "null", "[" * 60_000, '"\\ud800"', "\xff")),
        ("POST", ROLLBACK, '{"metadata": [1], "name": {"a": 1}}', {}, 409),
        # Without a token only names of this machine are answered.
        ("GET", JUDGEMENT, None, {"Host": "evil.example"}, 403),
        ("POST", ROLLBACK, '{"name": "served", "metadata": {}}', {"Host": "evil.example"}, 403),
    ],
)
def test_a_request_is_bounded_of_this_machine_and_refused_in_one_printable_line(
    run: Watched, method: str, path: str, body: str | None, headers: dict[str, str], status: int
) -> None:
    found, text = asked(run.server.port, method, path, body=body, headers=headers)
    assert (found, text.count("\n"), text[:-1].isprintable()) == (status, 1, True)


def test_a_client_that_says_nothing_more_delays_no_other(run: Watched) -> None:
    with socket.create_connection(("127.0.0.1", run.server.port)) as silent:
        silent.sendall(b"POST /v1/flagger/rollback HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n")
        assert asked(run.server.port, "GET", "/healthz") == (200, "ok\n")


@pytest.mark.parametrize("run", [TOKEN], indirect=True)
def test_flagger_sends_the_token_in_its_metadata_and_others_as_a_bearer(run: Watched) -> None:
    assert hooked(run, "rollback", token=TOKEN) == (409, "INCONCLUSIVE: the traffic is not watched yet\n")
    run.dies()
    assert hooked(run, "rollback")[0] == hooked(run, "rollback", token="wrong")[0] == 401
    for _ in range(2):
        assert hooked(run, "rollback", token=TOKEN) == (200, "FAIL: new-0 died\n")
    bearer = {"Authorization": f"Bearer {TOKEN}"}
    for path, headers, status in ((JUDGEMENT, {}, 401), (JUDGEMENT, bearer, 200), ("/healthz", {}, 200)):
        assert asked(run.server.port, "GET", path, headers=headers)[0] == status
    # A changed answer is noted once, and no note holds the secret.
    assert [note.partition(":")[0] for note in run.notes] == ["rollback", "rollback", "promotion"]
    assert TOKEN not in "".join(run.notes)


def test_beyond_this_machine_it_takes_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    assert TOKEN_VARIABLE in refusal(ConfigError, ProviderServer, "0.0.0.0:0", note=print)
    for token, why in (("short", "holds 5 characters"), ("a" * 16 + ";x", "letters, digits, -, _ and . alone")):
        monkeypatch.setenv(TOKEN_VARIABLE, token)
        assert why in (said := refusal(ConfigError, ProviderServer, "127.0.0.1:0", note=print))
        assert token not in said
    monkeypatch.setenv(TOKEN_VARIABLE, f" {TOKEN} ")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert f'"{address}", which cannot be used' in refusal(ConfigError, ProviderServer, address, note=print)


@pytest.mark.parametrize(
    ("happens", "yes"),
    [
        # What is open neither promotes nor rolls back.
        (lambda run: None, ("confirm-rollout", "rollout")),
        (Watched.dies, ("rollback",)),
        # Where nothing is watched any more, nothing begins nor rolls back.
        (lambda run: setattr(run, "clock_ns", run.clock_ns + 16 * 10**9), ("rollout",)),
        (
            lambda run: run.go(safe=True, passed=True),
            ("confirm-rollout", "rollout", "confirm-traffic-increase", "confirm-promotion"),
        ),
    ],
)
def test_each_hook_goes_on_where_that_is_safe(
    run: Watched, happens: Callable[[Watched], object], yes: tuple[str, ...]
) -> None:
    run.go()
    happens(run)
    found = {hook: hooked(run, hook)[0] for hook in HOOKS}
    assert found == {hook: 200 if hook in yes else 409 for hook in HOOKS}


def test_the_first_traffic_of_a_canary_needs_no_evidence_and_the_second_does(run: Watched) -> None:
    assert hooked(run, "confirm-traffic-increase")[0] == 200
    assert hooked(run, "confirm-traffic-increase")[0] == 409


@pytest.mark.parametrize(
    ("step", "promotion", "seen"),
    [
        ("the candidate is not yet shown to be at most 25 % slower", "not every gate has passed", {}),
        (None, "not every gate has passed", {"safe": True}),
        (None, None, {"safe": True, "passed": True}),
        *(
            (words, words, {"safe": True, "passed": True, key: value})
            for words, key, value in (
                ("the candidate had 29 of 30 requests", "requests", 29),
                ("uneven", "uneven", "uneven"),
            )
        ),
    ],
)
def test_a_step_takes_the_margin_and_the_promotion_every_gate(
    run: Watched, step: str | None, promotion: str | None, seen: dict[str, Any]
) -> None:
    run.go(**seen)
    for goal, lacking in ((STEP, step), (PROMOTION, promotion)):
        found = run.answer(goal)
        assert found.verdict == ("INCONCLUSIVE" if lacking else "PASS")
        assert lacking is None or found.reasons[0].startswith(lacking)


def test_pass_takes_a_recent_interim_analysis_of_the_present_weights(run: Watched) -> None:
    assert run.answer().reasons == (
        "there is no interim analysis of these weights yet: it takes a block (traffic.block_s) of requests",
    )
    run.go(safe=True, passed=True)
    assert run.answer().verdict == "PASS"
    run.poll(121)
    assert run.answer().reasons == ("there was no interim analysis for 121 s; the limit is 120 s",)
    run.go(safe=True, passed=True)
    run.splitter.kept = {"old": 20, "new": 80}
    run.poll()
    assert "no interim analysis of these weights yet" in run.answer().reasons[0]
    run.go(safe=True, passed=True)
    run.splitter.deaf = True
    run.poll()
    assert run.answer().reasons == ("the weights in force are not known",)
    run.splitter.deaf = False
    run.poll()
    assert run.answer().verdict == "PASS"
    run.clock_ns += 16 * 10**9
    assert "has made no interim analysis for 16 s" in run.answer().reasons[0]


def test_an_alarm_is_a_failure_at_once_and_for_good(run: Watched) -> None:
    run.go(safe=True, passed=True)
    own = ServedCompile(arm="new", replica="new-0", kind="compile", start_ns=run.clock_ns, shape="1×81")
    run.collector.served_compiles = [replace(own, start_ns=run.clock_ns - 10**8, end_ns=run.clock_ns)]
    run.poll()
    own = replace(own, start_ns=run.clock_ns)
    run.collector.compiling = [own, replace(own, arm="old"), replace(own, kind="graph_capture")]
    run.poll(0.9)
    assert run.answer().verdict == "PASS"
    run.poll(0.6)
    run.collector.compiling = []
    run.poll()
    assert str(run.answer()) == "FAIL: new has been compiling for 1.5 s while serving for 1×81"
    run.go(failed="It is surely slower.")
    assert str(run.answer()) == "FAIL: It is surely slower."


def test_a_burst_of_errors_counts_in_five_minutes_of_the_same_weights(run: Watched) -> None:
    run.go(safe=True, passed=True)
    run.ends(60, failed=24)
    run.splitter.kept = {"old": 20, "new": 80}  # the errors were those of the step before
    run.go(safe=True, passed=True)
    assert run.answer().verdict == "PASS"
    run.ends(64, failed=4)
    run.poll(301)
    run.ends(16, failed=4)
    run.go(safe=True, passed=True)
    assert run.answer().verdict == "PASS"
    run.ends(4, failed=4)
    run.poll()
    assert run.answer().verdict == "PASS", "eight are less than a fifth"
    run.ends(20, failed=20)
    run.poll()
    assert "requests to new failed in the last" in run.answer().reasons[0]
