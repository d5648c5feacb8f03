"""Whether two runs had machines of one speed, by the references that each took before and after its trials.

A ratio of latencies is decided where it would stand if the machines made all of their difference.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from analysis.checks.check import MACHINES, Check, Rule
from analysis.compare.pair import BASELINE, CANDIDATE
from analysis.judging.gates import FAIL, PASS
from analysis.records.schemas import RUN_HOST
from analysis.run.placement import devices_of
from analysis.run.references import CARD_FIGURES, FIGURES, references_of, speed_of
from analysis.run.run import Run

_NOISE = 0.01  # of a log reference, by which two runs of one machine may differ
# From here on a queue may have grown by more than the machine was slower.
DRIFT = 0.05
_NAMES = {
    "matmul_tflops": "matrix product",
    "read_gb_per_s": "memory read",
    "launch_us": "launches",
    "python_ms": "Python",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSpeeds:
    """How much longer the candidate's machine took for each reference that both runs have, as logarithms.

    `one_sided` are parts of the machine that only one run measured; `same` is None where a run does not say which
    machine it had.
    """

    slower: Mapping[str, float]
    one_sided: frozenset[str]
    same: bool | None

    @property
    def known(self) -> bool:
        """Whether the machines' speeds compare."""
        return self.same is True or (bool(self.slower) and not self.one_sided)

    @property
    def moved(self) -> dict[str, float]:
        """The references that differ by more than their noise."""
        return {key: value for key, value in self.slower.items() if abs(value) > _NOISE}

    @property
    def text(self) -> str:
        """What differs: "the candidate's host was slower (Python ×1.08)"."""
        words = []
        for side, slower in (("slower", True), ("faster", False)):
            own = {key: value for key, value in self.moved.items() if (value > 0) is slower}
            if own:
                parts = " and ".join(dict.fromkeys(map(part_of, own)))
                listed = ", ".join(f"{_NAMES[key]} ×{math.exp(abs(value)):.2f}" for key, value in own.items())
                words.append(f"the candidate's {parts} {'were' if ' and ' in parts else 'was'} {side} ({listed})")
        return "; ".join(words)


def part_of(figure: str) -> str:
    """The part of the machine that a reference measures: card or host."""
    return "card" if figure in CARD_FIGURES else "host"


def machine_speeds(run: Run, machines: tuple[str, str]) -> MachineSpeeds:
    """The speeds of the two arms' machines; `machines` are their identities, empty where unknown."""
    external = any(run.account(arm).external for arm in run.arms)
    one, two = (({} if external else _typical(run, arm)) for arm in (BASELINE, CANDIDATE))
    slower = {key: speed_of(key, one[key]) - speed_of(key, two[key]) for key in FIGURES if key in one and key in two}
    measured = {part_of(key) for key in (*one, *two)}
    return MachineSpeeds(
        slower=slower,
        one_sided=frozenset(measured - set(map(part_of, slower))),
        # An external server is not on the machine of the run.
        same=machines[0] == machines[1] if all(machines) and not external else None,
    )


def _typical(run: Run, arm: str) -> dict[str, float]:
    """The median of each reference of the device that the arm had; those of another card are left out."""
    taken = [row for row in references_of(run.trials) if row.host == RUN_HOST and row.error is None]
    values: dict[str, list[float]] = {}
    for trial in run.trials_of(arm):
        device = devices_of(trial).get(arm)
        for row in taken:
            if row.trial == trial.number and device in (None, row.device):
                for key, value in row.figures.items():
                    values.setdefault(key, []).append(value)
    return {key: statistics.median(own) for key, own in values.items()}


def check_machines(speeds: MachineSpeeds, *, trusted: bool) -> Check:
    """The check "machine speed": the machines were equally fast, or are `trusted` to be."""
    moved = speeds.moved
    spread = max(map(abs, moved.values()), default=0.0)
    shift, spares, reason, remedy = None, "", "", ""
    unknown = not speeds.known and not trusted
    if unknown:
        reason = "Nothing says that the machines of both runs were equally fast."
        remedy = "Take references in both runs ([bed] reference_s), or give --trust-machines."
    elif moved:
        reason = f"{speeds.text[0].upper()}{speeds.text[1:]}."
        remedy = "Run the baseline again on the candidate's machine."
        shift = spread if spread <= math.log1p(DRIFT) else None
        slowed, sped = max(moved.values()) > 0, min(moved.values()) < 0
        spares = "" if slowed and sped else PASS if slowed else FAIL
    elif not speeds.known:
        reason = "Nothing says that the machines of both runs were equally fast, which is taken for granted."
    return SPEED.row(
        not (unknown or moved),
        reason,
        value=100.0 * math.expm1(spread),
        limit=100.0 * _NOISE,
        arm=CANDIDATE,
        shift=shift,
        spares=spares,
        remedy=remedy,
    )


SPEED = Rule(
    name="machine speed",
    find=lambda seen: (),
    sound="The machines of both runs were equally fast.",
    opens=("noninferiority", "goodput"),
    rank=MACHINES,
)
