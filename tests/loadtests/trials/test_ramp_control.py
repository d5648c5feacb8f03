"""Who moves the weights of a ramp, with a splitter that can be deaf, start anew, or be moved by somebody else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from analysis.records.weight_journal import BY_HAND, WeightChange, append, read_weights
from analysis.settings.gate_limits import GateLimits
from analysis.settings.ramp_limits import RampLimits
from loadtests.trials import ramp_control
from loadtests.trials.judge import Judge
from loadtests.trials.ramp_control import RampControl
from loadtests.trials.steering import Steered
from servers.clock import now_ns
from servers.splitter.admin import SplitterError

FIRST, HALF, BACK = {"eager": 9900, "new": 100}, {"eager": 5000, "new": 5000}, {"eager": 10_000, "new": 0}
CONFIGURED = {"eager": 1, "new": 0}


class FakeSplitter:
    """Keeps the weights; a deaf one raises."""

    def __init__(self, weights: Mapping[str, int]) -> None:
        self.kept = dict(weights)
        self.deaf = False
        self.up = 1e9

    def weights(self) -> Mapping[str, int]:
        self._answer()
        return dict(self.kept)

    def after(self, weights: Mapping[str, int]) -> Mapping[str, int]:
        return weights

    def reweight(self, weights: Mapping[str, int]) -> None:
        self._answer()
        self.kept = dict(weights)

    def up_s(self) -> float:
        self._answer()
        return self.up

    def _answer(self) -> None:
        if self.deaf:
            raise SplitterError("no split answers")


class Ramp:
    """A ramp of two steps to "new", and all that it sees."""

    def __init__(self, folder: Path, splitter: Any) -> None:
        self.folder, self.splitter = folder, splitter
        self.look: dict[str, Any] | None = None
        self.ends: list[int | None] = []
        self.facts = SimpleNamespace(start_ns=now_ns(), duration_s=1e9, deaths=[], ended=None)
        self.status = SimpleNamespace(detail="", note=lambda _: None, load=SimpleNamespace(arms={}))
        self.trial = cast(
            Steered,
            SimpleNamespace(
                context=SimpleNamespace(facts=self.facts, status=self.status),
                collector=SimpleNamespace(served_compiles=[], compiling=[]),
                splitter=splitter,
                end_load=self.ends.append,
            ),
        )
        self.control = self.controller(())

    def controller(self, before: Sequence[WeightChange], **limits: Any) -> RampControl:
        """One that goes on after these changes."""
        return RampControl(
            self.folder,
            limits=RampLimits(candidate="new", steps=(1.0, 50.0, 100.0), step_s=1.0, **limits),
            gates=GateLimits(),
            control="eager",
            judge=cast(Judge, SimpleNamespace(last=lambda: self.look)),
            before=before,
        )

    def resume(self) -> None:
        """Another controller goes on from the journal."""
        self.control = self.controller(read_weights(self.folder))

    def poll(self, times: int = 1) -> None:
        for _ in range(times):
            self.control.poll(self.trial)

    def die(self) -> None:
        """The candidate is dead."""
        self.facts.deaths.append({"arm": "new", "replica": "new-0", "at_ns": now_ns()})

    @property
    def actions(self) -> list[str]:
        return [change.action for change in read_weights(self.folder)]


@pytest.fixture
def ramp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ramp:
    monkeypatch.setattr(ramp_control, "_READ_NS", 0)
    return Ramp(tmp_path, FakeSplitter(CONFIGURED))


def test_the_first_step_is_written_down_before_and_after_the_splitter_is_told(ramp: Ramp) -> None:
    ramp.splitter.deaf = True
    ramp.poll()
    (change,) = read_weights(ramp.folder)
    assert (change.action, change.weights, change.done_ns) == ("start", FIRST, None)
    assert ramp.splitter.kept == CONFIGURED
    ramp.splitter.deaf = False
    ramp.poll()
    (change,) = read_weights(ramp.folder)
    assert change.done_ns is not None
    assert ramp.splitter.kept == FIRST


def test_a_rollback_that_a_deaf_splitter_does_not_take_is_decided_once(ramp: Ramp) -> None:
    ramp.poll()
    ramp.splitter.deaf = True
    ramp.die()
    ramp.poll(5)
    ramp.die()
    ramp.poll(5)
    assert len((ramp.folder / "weights.jsonl").read_text().splitlines()) == 3  # start twice, rollback once
    ramp.splitter.deaf = False
    ramp.poll()
    assert ramp.actions == ["start", "rollback"]
    assert ramp.splitter.kept == BACK


def test_the_load_goes_on_for_a_while_after_a_rollback(ramp: Ramp, monkeypatch: pytest.MonkeyPatch) -> None:
    ramp.poll()
    ramp.die()
    ramp.poll(3)
    assert ramp.ends == []
    monkeypatch.setattr(ramp_control, "now_ns", lambda: now_ns() + 11_000_000_000)
    ramp.poll()
    assert len(ramp.ends) == 1
    assert ramp.facts.ended == "the ramp ended: rollback, new-0 died"


def test_weights_that_somebody_else_sets_are_left_and_end_the_ramp(ramp: Ramp) -> None:
    ramp.poll()
    ramp.splitter.kept = dict(HALF)
    ramp.die()
    ramp.die()
    ramp.facts.deaths.clear()
    ramp.poll(4)
    assert ramp.actions == ["start", BY_HAND]
    assert ramp.splitter.kept == HALF
    assert ramp.facts.ended is not None


def test_a_splitter_that_started_anew_is_told_again(ramp: Ramp) -> None:
    ramp.poll()
    ramp.splitter.kept, ramp.splitter.up = dict(CONFIGURED), 0.0
    ramp.poll()
    ramp.splitter.up = 1e9
    ramp.poll(3)
    assert ramp.actions == ["start", "again"]
    assert ramp.splitter.kept == FIRST


def test_nothing_is_decided_while_nobody_knows_the_weights(ramp: Ramp) -> None:
    ramp.poll()
    ramp.splitter.deaf = True
    ramp.look = {"look": 1, "at_ns": now_ns() + 10**12, "arms": {}}
    ramp.poll(3)
    assert ramp.actions == ["start"]
    assert "does not answer" in ramp.status.detail


@pytest.mark.parametrize(("on_inconclusive", "share"), [("hold", 100), ("rollback", 0)])
def test_a_step_that_nobody_looks_at_ends_by_its_longest_time(
    ramp: Ramp, monkeypatch: pytest.MonkeyPatch, on_inconclusive: str, share: int
) -> None:
    ramp.control = ramp.controller((), most_step_s=60.0, on_inconclusive=on_inconclusive)
    ramp.poll(2)
    monkeypatch.setattr(ramp_control, "now_ns", lambda: now_ns() + 100_000_000_000)
    ramp.poll(2)
    assert ramp.actions == ["start"], "a look may be late"
    monkeypatch.setattr(ramp_control, "now_ns", lambda: now_ns() + 130_000_000_000)
    ramp.poll(3)
    last = read_weights(ramp.folder)[-1]
    assert (ramp.actions, ramp.splitter.kept["new"]) == (["start", on_inconclusive], share)
    assert last.why == "still open after 60 s: nobody has looked at the run for 130 s"


@pytest.mark.parametrize(("on_inconclusive", "share"), [("hold", 100), ("rollback", 0)])
def test_a_step_that_is_open_when_the_time_is_over_stays_or_goes_back_as_was_asked(
    ramp: Ramp, monkeypatch: pytest.MonkeyPatch, on_inconclusive: str, share: int
) -> None:
    ramp.control = ramp.controller((), on_inconclusive=on_inconclusive)
    ramp.facts.duration_s = 300.0
    ramp.poll(2)
    monkeypatch.setattr(ramp_control, "now_ns", lambda: now_ns() + 297_000_000_000)
    ramp.poll(2)
    assert ramp.splitter.kept["new"] == 100
    monkeypatch.setattr(ramp_control, "now_ns", lambda: now_ns() + 299_000_000_000)
    ramp.poll(3)
    assert ramp.splitter.kept["new"] == share
    assert ramp.actions == (["start"] if share else ["start", "rollback"])


def test_the_last_step_is_not_promoted_without_a_look(ramp: Ramp, monkeypatch: pytest.MonkeyPatch) -> None:
    for change in (START, of("advance", {"eager": 0, "new": 10_000}, 2, done=True, at_ns=10**18 + 10**9)):
        append(ramp.folder, change)
    ramp.splitter.kept = {"eager": 0, "new": 10_000}
    ramp.resume()
    ramp.poll(2)
    monkeypatch.setattr(ramp_control, "now_ns", lambda: now_ns() + 10**13)
    ramp.poll(3)
    assert ramp.actions[-1] == "resume"


def of(action: str, weights: Mapping[str, int], step: int, *, done: bool, at_ns: int) -> WeightChange:
    """A change of a controller that is gone."""
    done_ns = at_ns + 1000 if done else None
    return WeightChange(at_ns=at_ns, weights=weights, why="a test", action=action, step=step, done_ns=done_ns)


START = of("start", FIRST, 0, done=True, at_ns=10**18)


def advance(*, done: bool) -> WeightChange:
    return of("advance", HALF, 1, done=done, at_ns=10**18 + 10**9)


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        pytest.param([of("start", FIRST, 0, done=False, at_ns=10**18)], CONFIGURED, id="killed before the first"),
        pytest.param([START], FIRST, id="killed in a step"),
        pytest.param([START, advance(done=False)], FIRST, id="killed before the splitter was told"),
        pytest.param([START, advance(done=False)], HALF, id="killed after the splitter was told"),
        pytest.param([START, advance(done=True)], HALF, id="killed in a later step"),
        pytest.param(
            [START, advance(done=False), of("resume", HALF, 1, done=False, at_ns=10**18 + 2 * 10**9)],
            FIRST,
            id="killed twice before the splitter was told",
        ),
    ],
)
def test_a_step_begins_anew_after_its_controller_was_killed(
    ramp: Ramp, changes: Sequence[WeightChange], kept: Mapping[str, int]
) -> None:
    for change in changes:
        append(ramp.folder, change)
    ramp.splitter.kept = dict(kept)
    ramp.resume()
    ramp.poll()
    assert ramp.actions[-1] == "resume"
    assert ramp.splitter.kept == changes[-1].weights


def test_a_rollback_that_was_decided_is_done_by_the_next_controller(ramp: Ramp) -> None:
    for change in (START, of("rollback", BACK, 0, done=False, at_ns=10**18 + 10**9)):
        append(ramp.folder, change)
    ramp.splitter.kept = dict(FIRST)
    ramp.resume()
    ramp.poll(3)
    assert ramp.splitter.kept == BACK
    assert ramp.actions == ["start", "rollback"]


def test_weights_set_while_there_was_no_controller_are_left(ramp: Ramp) -> None:
    append(ramp.folder, START)
    ramp.splitter.kept = dict(HALF)
    ramp.resume()
    ramp.poll(3)
    assert ramp.actions == ["start", BY_HAND]
    assert ramp.splitter.kept == HALF


def test_no_controller_goes_on_blindly(ramp: Ramp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ramp_control, "_READ_NS", 10**9)
    append(ramp.folder, START)
    ramp.splitter.kept = dict(HALF)
    ramp.splitter.deaf = True
    ramp.resume()
    ramp.poll(3)
    ramp.splitter.deaf = False
    ramp.poll(3)
    assert ramp.actions == ["start", BY_HAND]


def test_a_splitter_that_started_anew_meanwhile_gets_the_step_again(ramp: Ramp) -> None:
    for change in (START, advance(done=True)):
        append(ramp.folder, change)
    ramp.splitter.up = 1.0
    ramp.resume()
    ramp.poll()
    assert ramp.splitter.kept == HALF
