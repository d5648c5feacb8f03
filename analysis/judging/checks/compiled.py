"""Whether an arm that is judged as compiled ran compiled code at all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from analysis.judging.validity import ESTIMATES, Check
from analysis.run.compiled import CompiledSteps, compiled_steps
from analysis.run.run import Run
from analysis.wording import counted


def check_compiled(run: Run) -> Iterable[Check]:
    """One check for each arm whose configuration compiles and whose steps are recorded."""
    for arm in run.arms:
        if counts := compiled_steps(run, arm):
            yield check_compiled_code(arm, counts, control=arm == run.control)


def check_compiled_code(arm: str, counts: list[CompiledSteps], *, control: bool) -> Check:
    """Every replica of the arm ran compiled code in every trial, and steps of every kind did: else its figures are, in
    whole or in part, an eager server's.

    An arm can ask for compiling and still call its model around what was compiled; nothing fails then, and nothing
    recompiles.
    """
    replicas = sorted({(count.replica, count.trial) for count in counts} - _compiling(counts, "replica", "trial"))
    kinds = sorted({(count.kind,) for count in counts} - _compiling(counts, "kind"))
    without = [f"step ran compiled code of {replica} in trial {trial}" for replica, trial in replicas]
    without += [] if without else [f"{kind} step ran compiled code" for (kind,) in kinds]
    steps = sum(count.steps for count in counts)
    return Check(
        check="compiled code",
        ok=not without,
        value=float(len(without)),
        limit=0.0,
        arm=None if control else arm,
        reason=f"{arm} asks for compiling, and no {', no '.join(without)}."
        if without
        else f"{sum(count.compiled for count in counts)} of {counted(steps, 'step')} of {arm} ran compiled code.",
        affects=(*ESTIMATES, "recompile"),
        remedy="See compile.regions and the graph breaks of the arm with tailgate inspect, or call it eager.",
    )


def _compiling(counts: Sequence[CompiledSteps], *names: str) -> set[tuple[Any, ...]]:
    """The values of these fields among steps that ran compiled code."""
    return {tuple(getattr(count, name) for name in names) for count in counts if count.compiled}
