"""A ramp of users' traffic beside what it starts: how long one that was killed may go on, and what it refuses."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from analysis.records.documents import write_document
from analysis.records.weight_journal import WeightChange, append
from loadtests.experiments.model import Experiment
from loadtests.experiments.reading import from_table, load_table
from loadtests.experiments.users import of_users
from loadtests.trials import run, users_ramp
from loadtests.trials.ramp import ramped
from loadtests.trials.splitters import EnvoySplitter
from loadtests.trials.trial_facts import TrialFacts
from loadtests.trials.users_ramp import UsersRamp
from servers.clock import now_ns
from servers.fields import ConfigError
from servers.splitter.admin import Admin
from servers.splitter.weights import Shares

HOUR_S, SECOND = 3600.0, 1_000_000_000
WEIGHTS = {"eager": 9500, "compiled-padded": 500}


def experiment(**users: str) -> Experiment:
    settings = ["ramp.load=none", "ramp.candidate=compiled-padded"]
    settings += [f"users.{key}={value}" for key, value in users.items()]
    return ramped(from_table(of_users(load_table("demo", settings=settings, needs_traffic=False))))


class FakeTrial:
    """Ends at once, and keeps what it was given."""

    given: TrialFacts

    def __init__(self, context: Any, **_: object) -> None:
        FakeTrial.given = context.facts

    def run(self) -> None:
        pass

    def close(self, *, hurry: bool) -> None:
        pass


@pytest.fixture
def killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a ramp of an hour whose controller was killed a day ago, ten minutes after its start."""
    splitter = SimpleNamespace(weights=lambda: dict(WEIGHTS))
    monkeypatch.setattr(users_ramp, "splitter_of", lambda *_: splitter)
    monkeypatch.setattr(users_ramp, "UsersTrial", FakeTrial)
    judge = SimpleNamespace(failure=lambda: None, stop=lambda: None)
    monkeypatch.setattr(run, "Judge", lambda _: judge)
    (tmp_path / "trial-01").mkdir()
    start_ns = now_ns() - 24 * 3600 * SECOND
    write_document(tmp_path / "trial-01" / "trial.json", {"start_ns": start_ns, "duration_s": HOUR_S, "deaths": []})
    for action, minutes in (("start", 0), ("advance", 6), ("hold", 9)):
        at_ns = start_ns + minutes * 60 * SECOND
        change = WeightChange(
            at_ns=at_ns, weights=WEIGHTS, why="a test", action=action, step=int(action != "start"), done_ns=at_ns
        )
        append(tmp_path, change)
    return tmp_path


def test_a_ramp_whose_controller_was_gone_for_long_has_the_time_that_it_had(killed: Path) -> None:
    route = experiment(route="models/tailgate", api="127.0.0.1:1", access_log="requests.log")
    UsersRamp(route, out=killed.parent, resumed=killed).run()
    facts = FakeTrial.given
    assert facts.start_ns is not None
    left_s = facts.start_ns / SECOND + facts.duration_s - now_ns() / SECOND
    # Its step begins anew, six minutes after the start.
    assert left_s == pytest.approx(54 * 60, abs=5)


@pytest.mark.parametrize(
    ("percent", "words"), [(25.0, "compiled-padded gets copies of 25 % of the requests"), (0.0, "")]
)
def test_a_candidate_that_gets_copies_is_refused_before_it_gets_a_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, percent: float, words: str
) -> None:
    weights: Mapping[str, int] = {"eager": 1, "compiled-padded": 0}
    shares = Shares(weights=dict(weights), shadows={"compiled-padded": percent} if percent else {})
    splitter = EnvoySplitter(Admin("127.0.0.1:1"))
    monkeypatch.setattr(EnvoySplitter, "weights", lambda _: weights)
    monkeypatch.setattr(users_ramp, "splitter_of", lambda *_: splitter)
    for name, answer in (("log_path", "requests.log"), ("replica_addresses", {}), ("configured_weights", weights)):
        monkeypatch.setattr(users_ramp, name, lambda _, answer=answer: answer)
    monkeypatch.setattr(users_ramp, "live_shares", lambda _: shares, raising=False)
    ramp = UsersRamp(experiment(admin="127.0.0.1:1"), out=tmp_path)
    if not words:
        ramp.prepare()
        return
    with pytest.raises(ConfigError, match=words):
        ramp.prepare()
