"""What a check is: a rule, an entry of the table, and what it found in one run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tailgate.analysis.judging.comparisons import Comparisons
from tailgate.analysis.run.client_stalls import ArmStalls
from tailgate.analysis.run.machine_records import MachineRecords
from tailgate.analysis.run.run import Run

# Kinds of gates.
ESTIMATES = ("noninferiority", "slo")
ALL_KINDS = (*ESTIMATES, "recompile", "error")
PARITY = "parity"  # not among them: its prompts are not part of the traffic

# The failed check with the lowest rank gives the reason of an open verdict. Faults come first, since a longer run does
# not fix them. Too few blocks come before disturbed machines: a minute on quiet machines decides nothing either.
OVERLOADED, FAULT, TOO_SHORT, STALLS, MACHINES, TAIL = range(6)
_MOST_SHOWN = 3  # faults that one row names


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What checks read. `search`: the run raised the load in steps to find what the arms hold."""

    run: Run
    compared: Comparisons
    stalls: Mapping[str, ArmStalls]  # by arm, as clients saw them
    machines: MachineRecords
    search: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One entry of the table. Rules of one name are parts of one check, each with its own remedy and gates."""

    name: str
    sees: str  # what it fails on, for the reference
    find: Callable[[Evidence], Iterable[Check]]  # nothing where the rule does not apply
    says: str = "{}."  # the sentence around the faults
    remedy: str = ""  # empty where a longer run is the answer
    opens: tuple[str, ...] = ESTIMATES  # kinds of gates that a failure turns INCONCLUSIVE
    keeps: tuple[str, ...] = ("recompile", "error")  # kinds whose FAIL it keeps, as counts of what happened
    rank: int = FAULT
    at_end: bool = False  # only the end of a run can tell
    fixed_by_length: bool = False  # a longer run of the same kind passes it
    in_search: bool = True  # applies to a search for load too
    by_step: bool = False  # where arms take turns in a search, the steps of single trials are left out instead
    slows: bool = False  # what it sees can only have made requests slower

    def found(self, faults: Sequence[str], **more: Any) -> Check:
        """Return the check with these faults: it holds without any. `more` are fields of `Check`; where it has no gates
        and no remedy, it has the rule's."""
        shown = [*faults[:_MOST_SHOWN], *([f"{len(faults) - _MOST_SHOWN} more"] if len(faults) > _MOST_SHOWN else [])]
        reason = self.says.format("; ".join(shown)) if faults else ""
        own = {"opens": self.opens, "remedy": self.remedy, "reason": reason}
        own |= {key: value for key, value in more.items() if value is not None}
        return Check(rule=self, ok=not faults, **own)  # type: ignore[arg-type]


def rule(name: str, **facts: Any) -> Callable[[Callable[[Evidence], Iterable[Check]]], Rule]:
    """Make a rule with these fields of the function that finds its checks."""
    return lambda find: Rule(name=name, find=find, **facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What a rule found. `arm` None concerns all arms."""

    rule: Rule
    ok: bool
    reason: str  # empty where it holds
    opens: tuple[str, ...]  # kinds of gates
    arm: str | None = None
    gates: tuple[str, ...] = ()  # the only gates of these kinds that it concerns; empty: all
    shift: float | None = None  # the most that it can have moved the log of a ratio by; None: unknown
    among_trials: bool = False  # it falls on some trials and not on others, so their differences have it in
    spares: str = ""  # the verdict of a ratio that what it saw cannot have made
    remedy: str = ""

    @property
    def check(self) -> str:
        return self.rule.name
