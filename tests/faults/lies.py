"""Lies: a replica says of itself, of its answers and of its compiles what is not so, from its start on."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tests.fakes.lying_arm import Lie
from tests.faults import arms
from tests.faults.fault import CANDIDATE, CONTROL, Fault, Kind, Live, Moment, Setup, Situation, Truth

# Not among them: "compiles hidden", of which only latencies tell (see docs/reliability.md).
_ANSWERS: tuple[Lie, ...] = (
    "more tokens than came",
    "every token twice",
    "one token of all",
    "nothing at once",
    "no trailers",
    "late trailers",
    "times that go backwards",
    "another name",
    "steps that go backwards",
)
_COMPILES: tuple[Lie, ...] = (
    "compiles twice",
    "compiles lost",
    "compiles from the future",
    "compiles of negative length",
)
# With these a candidate cannot be judged by what it says, or does less work than the control.
_NO_PASS: frozenset[Lie] = frozenset(
    {
        "more tokens than came",
        "every token twice",
        "one token of all",
        "nothing at once",
        "late trailers",
        "another name",
        "compiles lost",
    }
)
# A run is refused before it begins.
_REFUSED: frozenset[Lie] = frozenset({"another name"})
_KINDS: tuple[Kind, ...] = ("run", "until-decided", "ramp", "workers", "remote worker")


@dataclass(frozen=True)
class Lying(Fault):
    """An arm lies."""

    lie: Lie
    arm: str
    truth: Truth

    @property
    def name(self) -> str:
        """Such as "compiles lost, says candidate"."""
        return f"{self.lie}, says {self.arm}"

    @property
    def hurts(self) -> frozenset[str]:
        """The arm that lies; a control that cheats is faster than any candidate, which then may well fail."""
        return frozenset({CONTROL, CANDIDATE})

    @property
    def forbids_pass(self) -> bool:
        """Whether no candidate may pass so."""
        return self.lie in _NO_PASS

    def arrange(self, setup: Setup) -> None:
        """The arm lies from its start on."""
        names = {CONTROL: "eager", CANDIDATE: "compiled-naive" if self.truth == "naive" else "compiled-padded"}
        arms.let_lie(setup, f"{names[self.arm]}-0", self.lie)

    def inject(self, live: Live) -> str:
        """It lies already."""
        return "every word"


def draw(rng: random.Random, situation: Situation) -> Moment | None:
    """A lie of one arm. Lies about compiles are those of an arm that compiles."""
    if situation.kind not in _KINDS:
        return None
    lie, arm = rng.choice(_ANSWERS + _COMPILES), rng.choice((CANDIDATE, CANDIDATE, CONTROL))
    if lie in _COMPILES:
        arm = CANDIDATE
    if situation.liveness and (lie in _REFUSED or (lie in _COMPILES and situation.truth == "naive")):
        return None  # compiles that cannot be placed are no reason to fail
    return Moment(phase="starting arms", after_s=0.0, fault=Lying(lie, arm, situation.truth))
