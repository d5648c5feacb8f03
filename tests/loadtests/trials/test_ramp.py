"""What steers a trial: the controller of a ramp, the early end, stalls and the interim analyses."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tailgate.analysis.records.weight_journal import BY_HAND, read_journal
from tailgate.analysis.settings.gate_limits import GateLimits
from tailgate.analysis.settings.ramp_limits import RampLimits
from tailgate.loadtests.experiments.model import Experiment
from tailgate.loadtests.trials import ramp as ramping
from tailgate.loadtests.trials import weights
from tailgate.loadtests.trials.ramp import RampControl
from tailgate.loadtests.trials.steering import Judge, end_when_decided
from tailgate.loadtests.trials.users_ramp import step_of
from tailgate.servers.complaint import ConfigError
from tailgate.servers.splitter.admin import Shares, SplitterError
from tests.fakes.processes import refusal

START_NS = 10**18 + 10**12
FIRST, HALF, BACK = {"eager": 9900, "new": 100}, {"eager": 5000, "new": 5000}, {"eager": 10_000, "new": 0}
CONFIGURED, FOREIGN = {"eager": 1, "new": 0}, {"eager": 4000, "new": 6000}
LIMITS = RampLimits(candidate="new", steps=(1.0, 50.0, 100.0), step_s=1.0)


class FakeSplitter:
    """Keeps the weights; a deaf one raises."""

    def __init__(self, weights: Mapping[str, int]) -> None:
        self.kept = dict(weights)
        self.deaf = False

    def shares(self) -> Shares:
        self._answer()
        return Shares(weights=dict(self.kept), shadows={})

    def reweight(self, weights: Mapping[str, int]) -> None:
        self._answer()
        self.kept = {**self.kept, **weights}

    def _answer(self) -> None:
        if self.deaf:
            raise SplitterError("no split answers")


def steered(splitter: Any, **facts: Any) -> Any:
    """Return a trial as its steering sees it."""
    status = SimpleNamespace(detail="", note=lambda _: None, load=SimpleNamespace(arms={}))
    context = SimpleNamespace(facts=SimpleNamespace(deaths=[], **facts), status=status)
    return SimpleNamespace(
        context=context, collector=SimpleNamespace(served_compiles=[], compiling=[]), splitter=splitter
    )


class Ramp:
    """A ramp of two steps to "new" by a made-up clock, and all that its controller sees."""

    def __init__(self, folder: Path, splitter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.splitter, self.clock_ns = folder, splitter, START_NS
        monkeypatch.setattr(weights, "_READ_NS", 0)
        for module in (ramping, weights):
            monkeypatch.setattr(module, "now_ns", self.now_ns)
        self.interim: dict[str, Any] | None = None
        self.ends: list[int | None] = []
        self.trial = steered(splitter, start_ns=START_NS, duration_s=1e9, ended=None)
        self.trial.end_load = self.ends.append
        self.facts, self.status = self.trial.context.facts, self.trial.context.status
        self.control = self.controller()

    def now_ns(self) -> int:
        self.clock_ns += 1000
        return self.clock_ns

    def controller(self, *, step: int = 0, **limits: Any) -> RampControl:
        """One that begins at the step."""
        control, ramp = SimpleNamespace(name="eager"), LIMITS.model_copy(update=limits)
        return RampControl(
            self.folder,
            cast(Experiment, SimpleNamespace(ramp=ramp, gates=GateLimits(), control=control)),
            judge=cast(Judge, SimpleNamespace(last=lambda: self.interim)),
            step=step,
        )

    def poll(self, times: int = 1, *, after_s: float = 0.0) -> None:
        self.clock_ns += int(after_s * 1e9)
        for _ in range(times):
            self.control.poll(self.trial)

    def die(self) -> None:
        """The candidate is dead."""
        self.facts.deaths.append({"arm": "new", "replica": "new-0", "at_ns": self.now_ns()})

    @property
    def actions(self) -> list[str]:
        return [change.action for change in read_journal(self.folder)[0]]


@pytest.fixture
def ramp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ramp:
    return Ramp(tmp_path, FakeSplitter(CONFIGURED), monkeypatch)


def test_the_first_step_is_recorded_before_and_after_the_splitter_takes_it(ramp: Ramp) -> None:
    ramp.splitter.deaf = True
    ramp.poll()
    (change,) = read_journal(ramp.folder)[0]
    assert (change.action, change.weights, change.done_ns) == ("start", FIRST, None)
    assert ramp.splitter.kept == CONFIGURED
    ramp.splitter.deaf = False
    ramp.poll()
    (change,) = read_journal(ramp.folder)[0]
    assert change.done_ns is not None
    assert ramp.splitter.kept == FIRST


def test_a_rollback_that_the_splitter_does_not_take_is_decided_once(ramp: Ramp) -> None:
    ramp.poll()
    ramp.splitter.deaf = True
    for _ in range(2):
        ramp.die()
        ramp.poll(5)
    assert len((ramp.folder / "weights.jsonl").read_text().splitlines()) == 3  # start twice, rollback once
    ramp.splitter.deaf = False
    ramp.poll()
    assert (ramp.actions, ramp.splitter.kept, ramp.ends) == (["start", "rollback"], BACK, [])
    ramp.poll(after_s=11)  # the load goes on for a while
    assert len(ramp.ends) == 1
    assert all(words in str(ramp.facts.ended) for words in ("rollback", "new-0"))


@pytest.mark.parametrize("due", ["", "advance", "rollback"])
def test_weights_that_another_program_sets_are_left_and_end_the_ramp(ramp: Ramp, due: str) -> None:
    said: list[str] = []
    ramp.poll()
    ramp.status.note = said.append
    ramp.splitter.deaf = True  # as a route that another program changes at the same time: 409
    if due == "rollback":
        ramp.die()
    elif due:
        ramp.control._act(ramp.trial, "advance", "the step is safe")
    ramp.poll(2)
    ramp.splitter.deaf, ramp.splitter.kept = False, dict(FOREIGN)
    ramp.poll(3)
    assert ramp.actions == ["start", *([due] if due else []), BY_HAND]
    assert read_journal(ramp.folder)[0][-1].weights == ramp.splitter.kept == FOREIGN
    assert any("the weights are eager=4000, new=6000 now" in text and due in text for text in said)
    assert "another program changed eager=9900, new=100" in str(ramp.facts.ended)


@pytest.mark.parametrize("action", ["rollback", "advance"])
def test_a_change_that_was_taken_though_the_answer_was_lost_is_no_other_program(ramp: Ramp, action: str) -> None:
    ramp.poll()
    ramp.splitter.deaf = True
    if action == "advance":
        ramp.control._act(ramp.trial, "advance", "the step is safe")
        ramp.poll()
    ramp.die()
    ramp.poll()
    ramp.splitter.deaf, ramp.splitter.kept = False, dict(HALF if action == "advance" else BACK)
    ramp.poll()
    assert ramp.actions == ["start", *(["advance"] if action == "advance" else []), "rollback"]
    assert ramp.splitter.kept == BACK


@pytest.mark.parametrize(
    ("waits_s", "age_s", "deaf", "advances"),
    [
        (100, 0, False, True),
        (100, 0, True, False),  # the weights are unknown
        (100, 101, False, False),  # it is of the weights before
        (200, 130, False, False),  # it is too old
    ],
)
def test_a_step_up_takes_a_recent_interim_analysis_of_the_weights_in_force(
    ramp: Ramp, waits_s: float, age_s: float, deaf: bool, advances: bool
) -> None:
    ramp.poll(2)
    ramp.splitter.deaf = deaf
    ramp.clock_ns += int(waits_s * 1e9)
    evidence = {"safe": True, "passed": True, "requests": 100}
    ramp.interim = {"number": 1, "at_ns": ramp.clock_ns - int(age_s * 1e9), "step": evidence}
    ramp.poll(3)
    assert ramp.actions == ["start", *["advance"] * advances]
    assert ("does not answer" in ramp.status.detail) is deaf


@pytest.mark.parametrize(("on_inconclusive", "share"), [("hold", 100), ("rollback", 0)])
@pytest.mark.parametrize(
    ("duration_s", "waits_s", "why"),
    [
        (1e9, (100, 30), ("60 s", "130 s")),  # an interim analysis may be late
        (300.0, (297, 2), ()),
    ],
    ids=["by its longest time", "at the end of the time"],
)
def test_an_open_step_is_held_or_rolled_back(
    ramp: Ramp, on_inconclusive: str, share: int, duration_s: float, waits_s: tuple[int, int], why: tuple[str, ...]
) -> None:
    limits = {"most_step_s": 60.0} if why else {}
    ramp.control = ramp.controller(on_inconclusive=on_inconclusive, **limits)
    ramp.facts.duration_s = duration_s
    ramp.poll(2)
    ramp.poll(2, after_s=waits_s[0])
    assert (ramp.actions, ramp.splitter.kept["new"]) == (["start"], 100)
    ramp.poll(3, after_s=waits_s[1])
    ended = [] if share and not why else [on_inconclusive]
    assert (ramp.actions, ramp.splitter.kept["new"]) == (["start", *ended], share)
    assert all(words in read_journal(ramp.folder)[0][-1].why for words in why)
    lines = (ramp.folder / "weights.jsonl").read_text().count("\n")
    assert lines == 2 + {"hold": 1, "rollback": 2}[on_inconclusive] * len(ended), "a share that stays is not sent again"


def test_the_last_step_is_promoted_by_an_interim_analysis_alone_and_ends_the_ramp(ramp: Ramp) -> None:
    ramp.control = ramp.controller(step=2)
    ramp.poll(2)
    ramp.poll(3, after_s=10_000)
    assert ramp.actions == ["start"]
    ramp.interim = {"number": 1, "at_ns": ramp.clock_ns}
    ramp.poll(3)
    assert (ramp.actions, len(ramp.ends)) == (["start", "promoted"], 1)


@pytest.mark.parametrize(
    ("weights", "step"),
    [(CONFIGURED, 0), ({"eager": 995, "new": 5}, 0), (FIRST, 0), ({"eager": 60, "new": 40}, 0), (HALF, 1)],
)
def test_a_ramp_begins_at_the_last_step_whose_share_the_candidate_has_unless_that_is_all(
    weights: Mapping[str, int], step: int
) -> None:
    assert step_of(weights, LIMITS, control="eager") == step
    assert "new has all of" in refusal(ConfigError, step_of, {"eager": 0, "new": 7}, LIMITS, control="eager")


@pytest.mark.parametrize(
    ("decisions", "trial", "ended", "failed"),
    [
        ({"new": "PASS", "other": None}, 1, (), []),
        ({"new": "FAIL", "other": None}, 1, (), ["new"]),
        ({"new": "FAIL", "other": "PASS"}, 2, (), []),  # an analysis of another trial
        ({"new": "PASS", "other": "FAIL"}, 1, ("decided after 5.0 minutes", "new: PASS", "other: FAIL"), []),
        ({}, 1, (), []),
    ],
)
def test_an_arm_that_fails_gets_no_more_and_the_trial_ends_when_all_are_decided(
    ramp: Ramp, decisions: dict[str, str | None], trial: int, ended: tuple[str, ...], failed: list[str]
) -> None:
    arms = {arm: {"decision": decision, "reason": f"{arm} is so."} for arm, decision in decisions.items()}
    judge = cast(Judge, SimpleNamespace(last=lambda: {"seconds": 300.0, "arms": arms, "trial": trial}))
    ramp.trial.context.number, ramp.facts.ended_arms = 1, {}
    for _ in range(2):
        end_when_decided(judge, ramp.trial)
    assert bool(ramp.facts.ended) == bool(ended)
    assert all(words in str(ramp.facts.ended) for words in ended)
    assert list(ramp.facts.ended_arms) == failed
    assert [at_ns is None for at_ns in ramp.ends] == [True] * len(failed) + [False] * bool(ended)
