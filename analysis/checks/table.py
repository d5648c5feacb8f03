"""The table of all checks, and what it finds in a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby

from tailgate.analysis.checks.arms import ANSWERS, COMPARABLE, EQUAL_WORK, TOKEN_STREAM
from tailgate.analysis.checks.check import Check, Evidence, Rule
from tailgate.analysis.checks.complete import ALIVE, DAMAGED, MISSING
from tailgate.analysis.checks.data import AUTOCORRELATION, BLOCKS, CUT, HETEROGENEITY, TAIL_SIZE
from tailgate.analysis.checks.generator import GENERATOR
from tailgate.analysis.checks.machines import FOREIGN, HOST, SETTINGS, SPEED, THROTTLED
from tailgate.analysis.checks.overload import OVERLOAD
from tailgate.analysis.checks.pressure import PRESSURE
from tailgate.analysis.checks.telemetry import BLIND, COMPILED, TELEMETRY, UNKNOWN_STALLS
from tailgate.analysis.checks.traffic import CONTROL_ERRORS, INTERFERENCE, OPEN_LOOP, PAIRS, SAMPLE_RATIO, SCHEDULES
from tailgate.analysis.judging.comparisons import Comparisons
from tailgate.analysis.judging.load_steps import is_search
from tailgate.analysis.run.client_stalls import ArmStalls
from tailgate.analysis.run.machine_records import MachineRecords
from tailgate.analysis.run.run import Run

# Rules of one check follow each other. Of two with one rank, the first gives the reason of an open verdict.
RULES: tuple[Rule, ...] = (
    OVERLOAD,
    *(DAMAGED, MISSING),
    ALIVE,
    SCHEDULES,
    SAMPLE_RATIO,
    CONTROL_ERRORS,
    PRESSURE,
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
    SPEED,
    HETEROGENEITY,
)


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
        applied = [rule for rule in rules if (at_end or not rule.at_end) and (rule.in_search or not seen.search)]
        found = [check for rule in applied for check in rule.find(seen)]
        # Where none failed, one that holds.
        checks += [check for check in found if not check.ok] or [replace(check, arm=None) for check in found[:1]]
    return checks, machines
