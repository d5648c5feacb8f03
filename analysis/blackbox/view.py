"""What an arm's stalls amount to, seen from outside: which of them are compiles, and what could not have been seen."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from analysis.arrays import Floats
from analysis.blackbox.calls import Evidence, calls
from analysis.blackbox.firstseen import Shapes, SlowFirst, shapes_of, slow_first
from analysis.blackbox.stalls import COMPILE, PART, UNKNOWN, Stall, Watch, look
from analysis.records.requests import Requests
from analysis.run.run import Run
from analysis.run.spikes import windows_of

_SHARED = 2  # stalls of some requests alone; one may be an accident


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """What shows of one arm without its telemetry."""

    arm: str
    stalls: tuple[Stall, ...]
    p_value: float  # that so many of the arm's own stalls, beyond their work, begin with first-seen shapes by chance
    watches: tuple[Watch, ...]  # one a server
    slow: SlowFirst  # whether requests with first-seen shapes take longer without a stall
    shapes_known: bool

    @property
    def recompiles(self) -> bool:
        """Whether this arm compiles while serving, as far as stalls tell."""
        return any(stall.cause == COMPILE for stall in self.stalls)

    def of_cause(self, *causes: str) -> list[Stall]:
        """The stalls with one of the causes."""
        return [stall for stall in self.stalls if stall.cause in causes]

    @property
    def detectable_s(self) -> float:
        """The shortest stall that would have shown on every server; NaN where one could not be watched."""
        lengths = [watch.detectable_s for watch in self.watches]
        return float(np.max(lengths)) if lengths else math.nan  # NaN where one of them is

    @property
    def witnesses(self) -> int:
        """Other servers that separate the host's stalls from the arm's."""
        return min((watch.witnesses for watch in self.watches), default=0)


def shapes_seen(run: Run) -> dict[str, Shapes]:
    """The shapes of each arm's prompts, and which of them it had met."""
    # Nothing restarts an external arm between the trials of a run: what it compiled in one it has in the next.
    return {
        arm: shapes_of(
            run.requests,
            arm,
            ladder=run.account(arm).length_ladder,
            lives=run.place if run.account(arm).external else None,
        )
        for arm in run.arms
    }


def outside_of(
    requests: Requests, shapes: Mapping[str, Shapes], *, control: str = "", rng: np.random.Generator
) -> dict[str, Outside]:
    """What shows of each arm in `shapes`."""
    stalls, watches = look(requests, shapes)
    # A generator for each, so that one arm more does not change the others' numbers.
    own = dict(zip(shapes, rng.spawn(len(shapes)), strict=True))
    return {
        arm: _outside(requests, arm, shapes[arm], stalls[arm], watches[arm], control=control, rng=own[arm])
        for arm in shapes
    }


def _outside(
    requests: Requests,
    arm: str,
    shapes: Shapes,
    stalls: Sequence[Stall],
    watches: Sequence[Watch],
    *,
    control: str,
    rng: np.random.Generator,
) -> Outside:
    decided, p_values = list(stalls), []
    # Several servers that share one name do not tell which of them had met a shape.
    known = [] if sum(stall.cause == PART for stall in stalls) >= _SHARED else list(enumerate(stalls))
    # By lengths alone, and with numbers of rows as well: an arm that compiles for one of them may stall for the other.
    for with_rows in (False, True):
        telling = [index for index, stall in known if _tells(stall, with_rows)]
        called, p_value = calls(_evidence([stalls[index] for index in telling], with_rows))
        p_values.append(p_value)
        for index, compiled in zip(telling, called.tolist(), strict=True):
            if compiled:
                decided[index] = replace(stalls[index], cause=COMPILE)
    return Outside(
        arm=arm,
        stalls=tuple(decided),
        p_value=min(p_values),
        watches=tuple(watches),
        slow=slow_first(requests, shapes, windows_of((s.start_ns, s.end_ns) for s in stalls), control=control, rng=rng),
        shapes_known=bool((shapes.shape >= 0).any()),
    )


def _tells(stall: Stall, with_rows: bool) -> bool:
    """Whether the stall is evidence: one without a first-seen shape is no compile, whatever its prompts took."""
    return stall.cause == UNKNOWN and (stall.beyond_work or not _first_seen(stall, with_rows))


def _first_seen(stall: Stall, with_rows: bool) -> bool:
    return stall.trigger >= 0 or (with_rows and stall.new_rows)


def _evidence(stalls: Sequence[Stall], with_rows: bool) -> Evidence:
    rows = np.array([stall.chance_rows if with_rows else 0.0 for stall in stalls])

    def chances(name: str) -> Floats:
        lengths = np.array([getattr(stall, name) for stall in stalls])
        return np.asarray(1.0 - (1.0 - lengths) * (1.0 - rows))

    return Evidence(
        new=np.array([_first_seen(stall, with_rows) for stall in stalls], dtype=np.bool_),
        begun=np.array([stall.begun or (with_rows and stall.new_rows) for stall in stalls], dtype=np.bool_),
        beyond=np.array([stall.beyond_work for stall in stalls], dtype=np.bool_),
        seconds=np.array([stall.seconds for stall in stalls]),
        chance=chances("chance_new"),
        chance_as_long=chances("chance_as_long"),
        longest=np.array([stall.longest for stall in stalls]),
    )
