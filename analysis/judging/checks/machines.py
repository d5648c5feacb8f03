"""Whether the machines of joined runs tell one story: a ratio or a share over all of them stands for each."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from analysis.judging.gates import FAIL, PASS
from analysis.judging.gates.latency import noninferiority_name
from analysis.judging.validity import Check
from analysis.settings.metrics import quantile_label
from analysis.statistics.compare import Comparison
from analysis.statistics.machines import disagreement
from analysis.wording import counted, sentence

# Few machines show little, so that differences count from here on (as is usual of Cochran's Q).
DISAGREE_ALPHA = 0.1


def check_machines(
    arm: str, gated: Sequence[Comparison], apart: Sequence[Comparison], shares: Sequence[tuple[str, str, str]]
) -> Check:
    """No machine by itself says the contrary of what all of them together decide.

    `gated` are the arm's decided comparisons over all machines and `apart` the same of each machine. One is
    contradicted by a machine that is surely on the other side of the margin, or by one that was seen there where
    machines differ by more than chance (Cochran's Q). `shares` are the gates on shares that passed while one machine
    surely misses them: (gate, kind, what was seen there).
    """
    faults: list[str] = []
    gates: list[str] = []
    kinds: list[str] = []
    smallest: float | None = None
    for item in gated:
        own = [one for one in apart if (one.metric, one.quantile) == (item.metric, item.quantile)]
        p_value = _p_of_one_ratio(own)
        smallest = p_value if smallest is None or (p_value is not None and p_value < smallest) else smallest
        against = _contrary(item, own, p_value)
        if against:
            label, seen = quantile_label(item.metric, item.quantile), _listed(own)
            chance = "" if p_value is None else f"; one ratio for all has p = {p_value:.2g}"
            faults.append(f"{label} is {item.ratio:.2f} times that of {item.control} over all, and {seen}{chance}")
            gates.append(noninferiority_name(item))
            kinds.append("noninferiority")
    for gate, kind, seen in shares:
        faults.append(seen)
        gates.append(gate)
        kinds.append(kind)
    machines = len({one.machine for one in apart})
    return Check(
        check="machines",
        ok=not faults,
        value=smallest,
        limit=DISAGREE_ALPHA,
        arm=arm,
        reason=f"The machines disagree: {sentence(faults)[0].lower()}{sentence(faults)[1:]}."
        if faults
        else f"No one of {counted(machines, 'machine')} contradicts what all of them say of {arm}.",
        affects=tuple(dict.fromkeys(kinds)) or ("noninferiority", "slo", "error"),
        gates=tuple(gates),
        remedy="Find out in what the machines differ (the section on the runs shows each), or judge each by itself.",
    )


def _p_of_one_ratio(apart: Sequence[Comparison]) -> float | None:
    known = [one for one in apart if one.ratio and one.spread is not None]
    spreads = [math.hypot(one.spread or 0.0, one.restart_spread / math.sqrt(max(1, one.trials))) for one in known]
    return disagreement(np.log([one.ratio or 1.0 for one in known]), np.array(spreads))


def _contrary(item: Comparison, apart: Sequence[Comparison], p_value: float | None) -> list[Comparison]:
    """The machines that were seen on the other side of the margin, if that is more than chance."""
    if item.verdict not in (PASS, FAIL):
        return []
    worse = item.verdict == PASS
    other = [one for one in apart if one.ratio is not None and (one.ratio > 1.0 + item.margin) is worse]
    p_values = [one.p_inferior if worse else one.p_noninferior for one in other]
    surely = any(value is not None and value <= item.alpha for value in p_values)
    return other if surely or (p_value is not None and p_value <= DISAGREE_ALPHA) else []


def _listed(apart: Sequence[Comparison]) -> str:
    known = sorted((one for one in apart if one.ratio is not None), key=lambda one: -(one.ratio or 0.0))
    return ", ".join(f"{one.ratio:.2f} on {one.machine}" for one in known)
