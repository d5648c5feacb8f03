"""The table of all checks, and what it finds in a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby

from analysis.checks.arms import ANSWERS, COMPARABLE, EQUAL_WORK, TOKEN_STREAM
from analysis.checks.check import Check, Evidence, Rule
from analysis.checks.complete import ALIVE, DAMAGED, MISSING
from analysis.checks.data import AUTOCORRELATION, BLOCKS, CUT, HETEROGENEITY, TAIL_SIZE
from analysis.checks.generator import GENERATOR
from analysis.checks.machines import FOREIGN, HOST, SETTINGS, SLOW, SPEED, THROTTLED
from analysis.checks.overload import OVERLOAD
from analysis.checks.telemetry import BLIND, COMPILED, TELEMETRY, UNKNOWN_STALLS
from analysis.checks.traffic import CONTROL_ERRORS, INTERFERENCE, OPEN_LOOP, PAIRS, SAMPLE_RATIO, SCHEDULES
from analysis.judging.comparisons import Comparisons
from analysis.judging.load_steps import is_search
from analysis.run.client_stalls import ArmStalls
from analysis.run.machine_records import MachineRecords
from analysis.run.run import Run

# Rules of one check follow each other. Of two with one rank, the first gives the reason of an open verdict.
RULES: tuple[Rule, ...] = (
    OVERLOAD,
    *(DAMAGED, MISSING),
    ALIVE,
    SCHEDULES,
    SAMPLE_RATIO,
    CONTROL_ERRORS,
    GENERATOR,
    OPEN_LOOP,
    INTERFERENCE,
    ANSWERS,
    BLOCKS,
    TAIL_SIZE,
    AUTOCORRELATION,
    COMPARABLE,
    EQUAL_WORK,
    TOKEN_STREAM,
    PAIRS,
    CUT,
    *(TELEMETRY, BLIND),
    UNKNOWN_STALLS,
    COMPILED,
    *(FOREIGN, HOST),
    *(THROTTLED, SETTINGS),
    *(SPEED, SLOW),
    HETEROGENEITY,
)


LENGTH_CHECKS = frozenset(rule.name for rule in RULES if rule.mended_by_length)


def checks_of_run(
    run: Run, compared: Comparisons, stalls: Mapping[str, ArmStalls], *, at_end: bool = True
) -> tuple[list[Check], MachineRecords]:
    """Return what all rules find, and the machines' records. An interim analysis (`at_end` False) leaves out what only
    the end of a run can tell."""
    machines = MachineRecords.of(run)
    seen = Evidence(run=run, compared=compared, stalls=stalls, machines=machines, search=is_search(run))
    checks: list[Check] = []
    for _, group in groupby(RULES, lambda rule: rule.name):
        rules = list(group)
        asked = [rule for rule in rules if (at_end or not rule.at_end) and (rule.in_search or not seen.search)]
        checks += _joined([check for rule in asked for check in rule.find(seen)], rules[0].sound)
    return checks, machines


def _joined(rows: list[Check], sound: str) -> list[Check]:
    """The rows of one check that failed; where there is none, one that holds."""
    failed = [row for row in rows if not row.ok]
    if failed or not rows:
        return failed
    own = next((row.reason for row in rows if row.reason), sound)
    return [replace(rows[0], arm=rows[0].arm if len(rows) == 1 else None, reason=own)]
