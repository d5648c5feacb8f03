"""The table of all checks, and what it finds in a run."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain, groupby

import pyarrow as pa

from tailgate.analysis.checks.arms import answers, comparable, equal_work, token_stream
from tailgate.analysis.checks.check import Check, Evidence, Rule
from tailgate.analysis.checks.complete import alive, damaged, missing
from tailgate.analysis.checks.data import autocorrelation, blocks, cut, heterogeneity, tail_size
from tailgate.analysis.checks.generator import generator
from tailgate.analysis.checks.machines import foreign, host, settings, speed, throttled
from tailgate.analysis.checks.overload import overload
from tailgate.analysis.checks.pressure import pressure
from tailgate.analysis.checks.telemetry import blind, compiled, telemetry, unknown_stalls
from tailgate.analysis.checks.traffic import control_errors, interference, open_loop, pairs, sample_ratio, schedules
from tailgate.analysis.judging.comparisons import Comparisons
from tailgate.analysis.judging.load_steps import is_search
from tailgate.analysis.run.client_stalls import ArmStalls
from tailgate.analysis.run.machine_records import MachineRecords
from tailgate.analysis.run.run import Run

# Rules of one check follow each other. Of two with one rank, the first gives the reason of an open verdict.
RULES: tuple[Rule, ...] = (
    overload,
    *(damaged, missing),
    alive,
    schedules,
    sample_ratio,
    control_errors,
    pressure,
    generator,
    open_loop,
    interference,
    answers,
    blocks,
    tail_size,
    autocorrelation,
    comparable,
    equal_work,
    token_stream,
    pairs,
    cut,
    *(telemetry, blind),
    unknown_stalls,
    compiled,
    *(foreign, host),
    *(throttled, settings),
    speed,
    heterogeneity,
)


def checks_of_run(
    run: Run, compared: Comparisons, stalls: Mapping[str, ArmStalls], *, at_end: bool = True
) -> tuple[list[Check], MachineRecords]:
    """Return what all rules find, and the machines' records. An interim analysis (`at_end` False) leaves out what only
    the end of a run can tell."""
    machines = MachineRecords.of(run)
    seen = Evidence(run=run, compared=compared, stalls=stalls, machines=machines, search=is_search(run))
    applied = [rule for rule in RULES if (at_end or not rule.at_end) and (rule.in_search or not seen.search)]
    with ThreadPoolExecutor(2) as processors:
        each = processors.map(lambda rule: list(rule.find(seen)), applied)
    pa.default_memory_pool().release_unused()  # for NumPy, of which the rules take much in a long run
    checks: list[Check] = []
    for _, group in groupby(chain.from_iterable(each), lambda check: check.check):
        found = list(group)
        # Where none failed, one that holds.
        checks += [check for check in found if not check.ok] or [replace(check, arm=None) for check in found[:1]]
    return checks, machines
