"""Whether the machines behaved: nobody else on them, nothing held back, and as fast as before and as each other.

What disturbs one arm's device leaves that arm's gates open; on the control's device it leaves all open, as does what
disturbs a host. A difference that falls on an arm and the control alike, since they changed places, opens nothing and
is still said.
"""

from __future__ import annotations

from collections.abc import Sequence

from analysis.judging.checks.bed_speed import APART, DRIFT, SLOW, apart, drift, slow
from analysis.judging.checks.bed_traffic import (
    BUSY,
    FOREIGN,
    SETTINGS,
    STEAL,
    THROTTLING,
    busy_host,
    foreign_work,
    settings,
    steal,
    throttling,
)
from analysis.judging.checks.disturbances import Disturbance, checks_of, gathered
from analysis.judging.validity import Check
from analysis.run.test_bed import TestBed


def check_bed(bed: TestBed, arms: Sequence[str], limit: float) -> tuple[list[Check], list[Disturbance]]:
    """The checks that the bed's records allow, and what they rest on, worst first in each check.

    `arms` begins with the control; `limit` is how far two measurements of the reference may lie apart. What could not
    be read has no check.
    """
    checks: list[Check] = []
    disturbances: list[Disturbance] = []
    for aspect, found in (
        (FOREIGN, foreign_work(bed)),
        (THROTTLING, throttling(bed, arms, limit)),
        (SETTINGS, settings(bed, arms, limit)),
        (STEAL, steal(bed)),
        (BUSY, busy_host(bed)),
        (DRIFT, drift(bed, limit)),
        (APART, apart(bed, arms, limit)),
        (SLOW, slow(bed)),
    ):
        if found is not None:
            own = gathered(found, arms[0])
            disturbances += own
            checks += checks_of(aspect, own, arms)
    return checks, disturbances
