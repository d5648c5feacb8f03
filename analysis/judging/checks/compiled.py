"""Whether an arm that is judged as compiled ran compiled code at all."""

from __future__ import annotations

from collections.abc import Iterable

from analysis.judging.validity import ESTIMATES, Check
from analysis.judging.wording import counted
from analysis.run.compiled import CompiledSteps, compiled_steps
from analysis.run.run import Run


def check_compiled(run: Run) -> Iterable[Check]:
    """One check for each arm whose configuration compiles and whose steps are recorded."""
    for arm in run.arms:
        if counts := compiled_steps(run, arm):
            yield check_compiled_code(arm, counts, control=arm == run.control)


def check_compiled_code(arm: str, counts: list[CompiledSteps], *, control: bool) -> Check:
    """Every replica of the arm ran compiled code in every trial: else its figures are an eager server's.

    An arm can ask for compiling and still call its model around what was compiled; nothing fails then, and nothing
    recompiles.
    """
    without = [f"{count.replica} in trial {count.trial}" for count in counts if not count.compiled]
    steps = sum(count.steps for count in counts)
    return Check(
        check="compiled code",
        ok=not without,
        value=float(len(without)),
        limit=0.0,
        arm=None if control else arm,
        reason=f"{arm} asks for compiling, and no step ran compiled code of {', '.join(without)}."
        if without
        else f"{sum(count.compiled for count in counts)} of {counted(steps, 'step')} of {arm} ran compiled code.",
        affects=(*ESTIMATES, "recompile"),
        remedy="See compile.regions and the graph breaks of the arm with tailgate inspect, or call it eager.",
    )
