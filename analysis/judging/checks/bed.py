"""Whether the machines behaved: nobody else on them, nothing held back, and as fast as before and as each other.

What disturbs one arm's device leaves that arm's gates open; on the control's device it leaves all open, as does what
disturbs a host. A difference that falls on an arm and the control alike, since they changed places, opens nothing and
is still said.
"""

from __future__ import annotations

from collections.abc import Sequence

from analysis.judging.checks.bed_speed import APART, DRIFT, SLOW, apart, drift, slow
from analysis.judging.checks.bed_traffic import (
    FOREIGN,
    HOST,
    SETTINGS,
    THROTTLING,
    foreign_work,
    host_work,
    settings,
    throttling,
)
from analysis.judging.checks.disturbances import Disturbance, checks_of, gathered
from analysis.judging.validity import Check
from analysis.run.test_bed import TestBed
from analysis.settings.gate_limits import GateLimits


def check_bed(
    bed: TestBed, arms: Sequence[str], limits: GateLimits, *, shared: bool
) -> tuple[list[Check], list[Disturbance]]:
    """Return the checks that the machines' records allow, and what they rest on, worst first in each check.

    `arms` begins with the control. `shared`: all arms ran at the same time. What could not be read has no check.
    """
    limit = limits.max_bed_drift
    checks: list[Check] = []
    disturbances: list[Disturbance] = []
    for aspect, found in (
        (FOREIGN, foreign_work(bed)),
        (THROTTLING, throttling(bed, arms, limit)),
        (SETTINGS, settings(bed, arms, limit)),
        (HOST, host_work(bed, limits, shared=shared)),
        (DRIFT, drift(bed, limit, shared=shared)),
        (APART, apart(bed, arms, limit)),
        (SLOW, slow(bed)),
    ):
        if found is not None:
            own = gathered(found, arms[0])
            disturbances += own
            checks += checks_of(aspect, own, arms)
    return checks, disturbances
